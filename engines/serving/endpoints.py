"""Addresses of the engine and router servers to which this process sends requests, and what its requests carry: the API
key of the server, and the LoRA adapter that the engine must use (`--lora-publish adapter`).

A process that gets a server's address also gets the server's API key and calls `set_api_key`. From then on requests of
this process to that address have the key in the Authorization header; requests to other addresses do not.

A driver loads the adapter of each policy version of its run under a separate name, `<run>/<version>@<owner>-<driver>`:

    owner    identifies the run among runs of the same name in other stores, which may share the engines
    driver   random: a driver never uses an adapter that another driver has loaded, but sends the adapter again

Requests name the adapter, so engines need no pause at an update: a request keeps the adapter that it started with, and
later requests use the next one. Adapters that no request of this process uses are unloaded.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from penstock.storage.errors import EngineError
from penstock.storage.secrets import has_credentials, register_secret

BASE = "base"  # weight version of engines that have the weights of --hf-checkpoint; requests add adapters to them

_keys: dict[str, str] = {}  # URL of a server -> its API key
_lock = threading.Lock()  # guards the two below
_current: dict[str, str] = {}  # URL of an engine -> name of the adapter that new requests use
_num_requests: Counter[str] = Counter()  # name of an adapter -> requests in flight, on all engines


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


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapter_suffix(identity: str) -> str:
    """Return what a driver appends to a policy version to name the version's adapter, on all engines. `identity` is a
    string that differs between runs of the same name, for instance their store and time of creation."""
    return f"@{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{secrets.token_hex(4)}"


def version_of(name: str) -> str:
    """Return the policy version of an adapter, `<run>/<number>`."""
    return name.rpartition("@")[0]


def other_adapters(name: str, loaded: Iterable[str]) -> list[str]:
    """Return the adapters in `loaded` that belong to the same run as `name`, except `name` itself and later versions
    that the same driver has loaded and is about to use."""

    def parts(adapter: str) -> tuple[str, str, str, int]:
        version, _, suffix = adapter.rpartition("@")
        run, _, number = version.rpartition("/")
        owner, _, driver = suffix.partition("-")
        return run, owner, driver, int(number) if number.isdigit() else -1

    run, owner, driver, number = parts(name)
    others = [(adapter, parts(adapter)) for adapter in loaded if adapter != name]
    return [
        adapter
        for adapter, other in others
        if other[:2] == (run, owner) and not (other[2] == driver and other[3] > number)
    ]


def set_adapter(url: str, name: str | None) -> None:
    """Set the adapter that later requests of this process to the engine at `url` use; None: no adapter."""
    with _lock:
        if name is None:
            _current.pop(url, None)
        else:
            _current[url] = name


def adapter_of(url: str) -> str | None:
    """Return the adapter that requests of this process to the engine at `url` use, or None."""
    return _current.get(url)


@contextmanager
def requesting(url: str) -> Iterator[str | None]:
    """Yield the adapter that a request to the engine at `url` must name (None: no adapter). The block is the request:
    the adapter counts as in use inside it."""
    with _lock:
        name = _current.get(url)
        if name is not None:
            _num_requests[name] += 1
    try:
        yield name
    finally:
        if name is not None:
            with _lock:
                _num_requests[name] -= 1
                if not _num_requests[name]:
                    del _num_requests[name]


def is_requested(name: str) -> bool:
    """Return whether a request in flight of this process uses the adapter."""
    return name in _num_requests
