"""Blocking calls to one running SGLang server: what it is, which weights it serves, pause and continue. Standard library only.

Every server has a key (server.py). Whoever learns a server's address from its owner learns its key too and says so here (`use_key`); from then
on all requests of this process to that address carry it, and no other request does.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any

from storage.secrets import protect

_keys: dict[str, str] = {}  # of this process: address of a server -> its key


class ServerGone(ConnectionError):
    """Nobody answers at the server's address, or it hung up in the middle of a call."""


def use_key(url: str, key: str | None) -> None:
    """Send this key with every request of this process to the server at `url`; None sends none."""
    if key:
        _keys[url] = protect(key)
    else:
        _keys.pop(url, None)


def use_keys(keys: Mapping[str, str]) -> None:
    """Do the same for several servers: address -> key."""
    for url, key in keys.items():
        use_key(url, key)


def keys_of(urls: Iterable[str]) -> dict[str, str]:
    """Return the keys of those servers that have one: address -> key."""
    return {url: _keys[url] for url in urls if url in _keys}


def headers(url: str) -> dict[str, str]:
    """Return the HTTP header with the key of the server at `url`; empty if it has none."""
    return {"Authorization": f"Bearer {_keys[url]}"} if url in _keys else {}


def call(
    url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60, method: str | None = None
) -> dict[str, Any]:
    """GET `path`, or POST `body` to it, or what `method` says. Returns the JSON answer, `{}` for an answer without any.

    Raises:
        ServerGone: no answer.
        RuntimeError: an answer with an error status.
    """
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers(url)}
    request = urllib.request.Request(url + path, data=data, headers=sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        hint = " (the server has another key: --sglang-api-key)" if error.code == 401 else ""
        raise RuntimeError(f"{url}{path} answered {error.code}{hint}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
        raise ServerGone(f"{url}{path} did not answer within {timeout:.0f} s or hung up: {error}") from error
    return json.loads(text) if text.strip().startswith(b"{") else {}


def is_ready(url: str, timeout: float = 10) -> bool:
    """Whether the server has loaded its model and answers. With a real generation inside: takes a second."""
    try:
        call(url, "/health", timeout=timeout)
    except (ServerGone, RuntimeError):
        return False
    return True


def generates(url: str, timeout: float = 30) -> bool:
    """Whether tokens come out: of what runs there or, if nothing does, of one token made for this question. Takes a second.

    SGLang looks for any sign of its scheduler for up to 20 s (SGLANG_HEALTH_CHECK_TIMEOUT), so a busy server is not asked to do more.
    """
    try:
        call(url, "/health_generate", timeout=timeout)
    except (ServerGone, RuntimeError):
        return False
    return True


def weight_version(url: str, timeout: float = 30) -> str:
    """The version of the weights that the server reports with every answer ("default" before any publish).

    `/model_info` has it in every SGLang from 0.5.15.post1; `/server_info` shows the start-up value for ever in 0.5.21.
    """
    return str(call(url, "/model_info", timeout=timeout)["weight_version"])


def server_facts(url: str, timeout: float = 30) -> tuple[tuple[int, ...], int]:
    """SGLang's release, as far as it is numbers, and its tensor-parallel size."""
    info = call(url, "/server_info", timeout=timeout)
    numbers = []
    for part in str(info["version"]).split(".")[:3]:
        numbers.append(int("".join(c for c in part if c.isdigit()) or 0))
    return tuple(numbers), int(info["tp_size"])


def pause(url: str, mode: str = "retract", timeout: float = 120) -> None:
    """Stop generating. "retract" puts running requests back into the queue: none is lost, and the cache can be flushed."""
    call(url, "/pause_generation", {"mode": mode}, timeout)


def go_on(url: str, timeout: float = 60) -> None:
    """End a pause."""
    call(url, "/continue_generation", {}, timeout)
