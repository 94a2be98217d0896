"""Reward `remote_rm`: POST {prompt, response, label} to the server at `--rm-url`, which returns the reward as JSON.

Transient failures (connection error, timeout, status 408, 425, 429 or 5xx) are retried with exponential backoff up to
30 s; the backoff is jittered so that thousands of samples do not retry at the same moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp

from penstock.storage.samples.sample import Sample
from penstock.storage.secrets import redact

MAX_ATTEMPTS = 10
MAX_BACKOFF = 30.0  # seconds
REQUEST_TIMEOUT = 120.0  # seconds per attempt; --reward-timeout limits all attempts together
_TRANSIENT_STATUS = (408, 425, 429)
_session: aiohttp.ClientSession | None = None  # shared by all requests, because the process has one event loop


class _TransientError(Exception):
    """A failure of a request that is retried."""


async def remote_rm(args: Any, sample: Sample) -> Any:
    """Return the server's JSON response: a number or a dictionary.

    Args:
        args: has `rm_url` and `reward_timeout` (seconds for all attempts).
        sample: the sample to grade.

    Raises:
        RuntimeError: the server rejected the request, sent invalid JSON, or failed until retries or time ran out.
    """
    # Stop before --reward-timeout cancels this call: the timeout's message would not contain the server's error.
    deadline = time.monotonic() + 0.95 * args.reward_timeout
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return await _post(args.rm_url, body, min(REQUEST_TIMEOUT, deadline - time.monotonic()))
        except _TransientError as error:
            backoff = random.uniform(0.5, 1.0) * min(2.0 ** (attempt - 1), MAX_BACKOFF)
            if attempt == MAX_ATTEMPTS or time.monotonic() + backoff >= deadline:
                raise RuntimeError(
                    f"--rm-url {redact(args.rm_url)} failed {attempt} times, last with {error}: check the "
                    "reward server, or raise --reward-timeout"
                ) from None
            await asyncio.sleep(backoff)
    raise AssertionError("unreachable")


async def _post(url: str, body: dict[str, str], seconds: float) -> Any:
    global _session
    if _session is None:
        _session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))  # worker_process.py limits them
    try:
        async with _session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            if response.status >= 500 or response.status in _TRANSIENT_STATUS:
                raise _TransientError(f"status {response.status}")
            if response.status >= 400:
                text = (await response.text())[:200]
                raise RuntimeError(f"--rm-url {redact(url)} rejected the request with status {response.status}: {text}")
            return await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _TransientError(f"{type(error).__name__} {error}".strip()) from error
    except ValueError as error:
        raise RuntimeError(f"--rm-url {redact(url)} answered with invalid JSON: {error}") from error
