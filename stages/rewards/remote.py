"""Reward: what a server answers. POST {prompt, response, label} to `--rm-url`; the JSON answer is a number or a dictionary.

A request that fails for a reason that may pass (no connection, no answer in time, 408, 425, 429, 5xx) is tried again, after a pause
that doubles up to 30 s and is drawn at random, so that thousands of samples do not come back at the same moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp

from storage.sample import Sample
from storage.secrets import redact

ATTEMPTS = 10
LONGEST_PAUSE = 30.0  # seconds
REQUEST_TIMEOUT = 120.0  # seconds of one attempt; --reward-timeout bounds them all together
_MAY_PASS = (408, 425, 429)
_session: aiohttp.ClientSession | None = None  # of this process's only event loop


class _Passing(Exception):
    """A failure that may pass."""


async def remote_rm(args: Any, sample: Sample) -> Any:
    """The server's JSON.

    Args:
        args: needs `rm_url` and `reward_timeout` (seconds for all attempts).
        sample: what is graded.

    Raises:
        RuntimeError: the server refuses, or still fails when attempts or time are used up; with its own words.
    """
    deadline = (
        time.monotonic() + 0.95 * args.reward_timeout
    )  # before the sample's own limit, which would not say what the server said
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await _post(args.rm_url, body, min(REQUEST_TIMEOUT, deadline - time.monotonic()))
        except _Passing as error:
            pause = random.uniform(0.5, 1.0) * min(2.0 ** (attempt - 1), LONGEST_PAUSE)
            if attempt == ATTEMPTS or time.monotonic() + pause >= deadline:
                raise RuntimeError(f"--rm-url {redact(args.rm_url)} still fails at attempt {attempt}, with {error}") from None
            await asyncio.sleep(pause)
    raise AssertionError("unreachable")


async def _post(url: str, body: dict[str, str], seconds: float) -> Any:
    global _session
    if _session is None:
        _session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))  # the worker bounds what is in flight
    try:
        async with _session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
            if answer.status >= 500 or answer.status in _MAY_PASS:
                raise _Passing(f"status {answer.status}")
            if answer.status >= 400:
                raise RuntimeError(f"--rm-url {redact(url)} refuses with status {answer.status}: {(await answer.text())[:200]}")
            return await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _Passing(f"{type(error).__name__} {error}".strip()) from error
    except ValueError as error:
        raise RuntimeError(f"--rm-url {redact(url)} answers what is no JSON: {error}") from error
