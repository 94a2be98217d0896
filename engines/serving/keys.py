"""API keys of the engine and router servers to which this process sends requests.

A process that gets a server's address also gets the server's API key and calls `set_api_key`. From then on requests of
this process to that address have the key in the Authorization header; requests to other addresses do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.storage.secrets import register_secret

_keys: dict[str, str] = {}  # URL of a server -> its API key


def set_api_key(url: str, key: str | None) -> None:
    """Set the API key that this process sends with every request to the server at `url`; None: send no key."""
    if key:
        _keys[url] = register_secret(key)
    else:
        _keys.pop(url, None)


def set_api_keys(keys: Mapping[str, str]) -> None:
    """Set the API keys of several servers, as `set_api_key` does.

    Args:
        keys: URL of a server -> its API key.
    """
    for url, key in keys.items():
        set_api_key(url, key)


def known_api_keys(urls: Iterable[str]) -> dict[str, str]:
    """Return URL -> API key for the servers at these URLs whose key this process knows."""
    return {url: _keys[url] for url in urls if url in _keys}


def auth_headers(url: str) -> dict[str, str]:
    """Return the HTTP authorization header for requests to the server at `url`; {} if no key is known."""
    return {"Authorization": f"Bearer {_keys[url]}"} if url in _keys else {}
