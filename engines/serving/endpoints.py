"""Addresses and API keys of the engine and router servers to which this process sends requests.

A process that gets a server's address also gets the server's API key and calls `set_api_key`. From then on requests of
this process to that address have the key in the Authorization header; requests to other addresses do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from penstock.storage.errors import EngineError
from penstock.storage.secrets import has_credentials, register_secret

_keys: dict[str, str] = {}  # URL of a server -> its API key


def set_api_key(url: str, key: str | None) -> None:
    """Set the API key that this process sends with every request to the server at `url`; None: send no key."""
    if key:
        _keys[url] = register_secret(key)
    else:
        _keys.pop(url, None)


def known_api_keys(urls: Iterable[str]) -> dict[str, str]:
    """Return URL -> API key for the servers at these URLs whose key this process knows."""
    return {url: _keys[url] for url in urls if url in _keys}


def auth_headers(url: str) -> dict[str, str]:
    """Return the HTTP authorization header for requests to the server at `url`; {} if no key is known."""
    return {"Authorization": f"Bearer {_keys[url]}"} if url in _keys else {}


def engine_url(address: str) -> str:
    """Return the URL (scheme://host:port) of an engine whose address is host:port or a URL. Raises EngineError if the
    address is invalid, or has credentials or a path."""
    url = address if "://" in address else f"http://{address}"
    if has_credentials(url):
        raise EngineError(
            "--rollout-external-engine-addrs contains credentials: give host:port there, and the API key as the engine "
            "option api_key"
        )
    parts = urlsplit(url)
    try:
        if parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/"):
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:  # the port is not a number
        pass
    raise EngineError(
        f"--rollout-external-engine-addrs {address} is not a valid address: give host:port, for instance 10.0.0.7:30000"
    )


def is_on_this_machine(address: str) -> bool:
    """Return whether an engine's address is a loopback address."""
    return urlsplit(engine_url(address)).hostname in ("127.0.0.1", "localhost", "::1")
