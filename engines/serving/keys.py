"""API keys of the servers to which this process sends requests. Every server has an API key (see `server.py`).

A process that gets a server's address also gets the server's API key and calls `set_api_key`. From then on requests of
this process to that address have the key in the Authorization header; requests to other addresses do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.storage.secrets import protect

_keys: dict[str, str] = {}  # URL of a server -> its API key


def set_api_key(url: str, key: str | None) -> None:
    """Send `key` with every request of this process to the server at `url`. None: send no key."""
    if key:
        _keys[url] = protect(key)
    else:
        _keys.pop(url, None)


def set_api_keys(keys: Mapping[str, str]) -> None:
    """Call `set_api_key` for several servers.

    Args:
        keys: URL of a server -> its API key.
    """
    for url, key in keys.items():
        set_api_key(url, key)


def known_api_keys(urls: Iterable[str]) -> dict[str, str]:
    """Return the API keys of these servers as a dictionary URL -> key; servers without a known key are left out."""
    return {url: _keys[url] for url in urls if url in _keys}


def auth_headers(url: str) -> dict[str, str]:
    """Return the HTTP authorization header for requests to the server at `url`; empty if no key is known."""
    return {"Authorization": f"Bearer {_keys[url]}"} if url in _keys else {}
