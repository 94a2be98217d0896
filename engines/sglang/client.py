"""Asynchronous generation over several engines: who gets which request, time limits, and sending again what a dead engine took along.

Which engines live is somebody else's knowledge (`engines/sglang/supervisor.py`), what is asked and what becomes of the answers the
callers'.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import aiohttp
import numpy as np

from storage.routed_experts import ExpertsFormat

FinishReason = Literal["stop", "length", "abort"]
Engines = Callable[[], Sequence[str]] | Sequence[str]
NUM_TRIES = 8
LONGEST_REST = 5.0  # seconds until an engine that failed is tried again
LOOK_EVERY = 0.2  # seconds between looks at the list of engines while there is none
RETRIED_STATUS = {429, 500, 502, 503, 504}


@dataclass(slots=True)
class Generation:
    """One sampled response, exactly as the engine made it."""

    token_ids: list[int]  # [R], the end token included if there is one
    logprobs: list[float]  # [R], of the sampled tokens under the sampling temperature
    finish_reason: FinishReason
    weight_version: str  # of the last token
    first_weight_version: str  # of the first token; another one if weights were published in between
    cached_tokens: int  # of the prompt, found in the radix cache
    routed_experts: bytes | None = (
        None  # of all tokens but the last one, prompt included (storage/routed_experts.py); None: not asked for
    )


class EngineClient:
    """Sends groups of samples to the least busy engine.

    An async context manager, or `await client.close()`. Belongs to the event loop it is first used in.

    Args:
        engines: addresses; or a function that gives those of the engines alive right now, and raises when there is no hope of one.
            With a function requests wait for an engine to come back, and leave one that is no longer named.
        timeout: seconds that a request may take, waiting included.
        num_tries: how often one request is sent to engines that answer it with an error; and, where nobody replaces the dead, to
            engines that do not answer.
        experts: of the model; ask the engines to return which of them they chose.
    """

    def __init__(
        self, engines: Engines, timeout: float = 600, num_tries: int = NUM_TRIES, experts: ExpertsFormat | None = None
    ) -> None:
        if not callable(engines) and not engines:
            raise ValueError("no engine to generate with: start one")
        self._engines = engines
        self.timeout = timeout
        self.num_tries = num_tries
        self.experts = experts
        self._load: dict[str, int] = {}  # samples in flight
        self._resting: dict[str, tuple[int, float]] = {}  # engine that failed -> how often in a row, until when it rests
        self._session: aiohttp.ClientSession | None = None

    @property
    def urls(self) -> list[str]:
        """The engines alive right now."""
        return list(self._engines() if callable(self._engines) else self._engines)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests in flight are aborted by the engines."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], n: int = 1) -> list[Generation]:
        """Sample `n` responses to one prompt, in one request. If its engine dies it is sent again, to another one or a new one.

        Args:
            input_ids: the prompt.
            sampling: SGLang's sampling parameters (`temperature`, `max_new_tokens`, ...).

        Raises:
            ValueError: the engine refuses the request, for instance because the prompt is too long.
            TimeoutError: no answer within `timeout` seconds.
            ConnectionError: `num_tries` errors.
            RuntimeError: the engine does not return the experts it was asked for, or not those of this model.
        """
        body = {"input_ids": [input_ids] * n, "sampling_params": sampling, "return_logprob": True}
        if self.experts is not None:
            body["return_routed_experts"] = True
        num_failures = 0
        async with asyncio.timeout(self.timeout):
            while True:
                url = await self._least_busy()
                self._load[url] = self._load.get(url, 0) + n
                try:
                    answers = await self._while_listed(url, self._post(url, "/generate", body))
                    self._resting.pop(url, None)
                    return [parse_generation(answer, self.experts, len(input_ids)) for answer in answers]
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _Retriable) as error:
                    self._rest(url)
                    num_failures += isinstance(error, _Retriable) or not callable(self._engines)
                    if num_failures == self.num_tries:
                        tries = f"{self.num_tries} tries (the last one at {url}: {error})"
                        raise ConnectionError(f"no engine answered in {tries}: see the engines' logs") from error
                finally:
                    self._load[url] -= n

    async def _least_busy(self) -> str:
        """The engine with the fewest samples in flight of those that have not just failed; waits until there is one."""
        while True:
            now = time.monotonic()
            urls = self.urls
            ready = [url for url in urls if self._resting.get(url, (0, 0.0))[1] <= now]
            if ready:
                return min(ready, key=lambda url: (self._load.get(url, 0), random.random()))
            wakes = min((self._resting[url][1] - now for url in urls), default=LOOK_EVERY)
            await asyncio.sleep(min(LOOK_EVERY, max(0.01, wakes)))

    def _rest(self, url: str) -> None:
        """Leave an engine alone for a while, longer each time. A whole wave of requests that fail together counts once."""
        num_failures, until = self._resting.get(url, (0, 0.0))
        if until <= time.monotonic():
            seconds = min(LONGEST_REST, 0.25 * 2**num_failures) * random.uniform(0.75, 1.25)
            self._resting[url] = (num_failures + 1, time.monotonic() + seconds)

    async def _while_listed(self, url: str, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer, unless the engine is no longer named while we wait: that of a lost machine would never come."""
        request = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({request}, timeout=1.0))[0]:
                if url not in self.urls:
                    raise aiohttp.ClientConnectionError(f"{url} is being replaced")
            return request.result()
        finally:
            request.cancel()

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Pause all engines. "retract" puts running requests back into the queue, so that the cache can be flushed."""
        await self._on_all("/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        """End a pause."""
        await self._on_all("/continue_generation", {})

    async def abort_all(self) -> None:
        """End every running request; it returns with what it has and the finish reason "abort"."""
        await self._on_all("/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Nothing may be running."""
        await self._on_all("/flush_cache", {})

    async def weight_versions(self) -> list[str]:
        """What each engine serves."""
        async with asyncio.timeout(self.timeout):
            infos = await _gather([self._get(url, "/model_info") for url in self.urls])
        return [str(info["weight_version"]) for info in infos]

    async def _on_all(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with asyncio.timeout(self.timeout):
            return await _gather([self._post(url, path, body) for url in self.urls])

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        async with self._connections().post(url + path, json=body) as response:
            return await self._read(response, url + path)

    async def _get(self, url: str, path: str) -> Any:
        async with self._connections().get(url + path) as response:
            return await self._read(response, url + path)

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> Any:
        text = await response.text()
        if response.status in RETRIED_STATUS:
            raise _Retriable(f"{where} answered {response.status}: {text[:300]}")
        if response.status >= 400:
            raise ValueError(f"{where} refused the request ({response.status}): {text[:300]}")
        return await response.json() if response.content_type == "application/json" and text else text

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Without a limit of aiohttp's own: how much is in flight is the caller's to bound.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the whole is limited in `generate`
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session


class _Retriable(Exception):
    """An answer that another try may turn into a good one."""


def parse_generation(answer: dict[str, Any], experts: ExpertsFormat | None = None, num_prompt_tokens: int = 0) -> Generation:
    """One response of SGLang's JSON. Tokens come from the log-probs, so the two cannot disagree.

    Args:
        answer: as it came.
        experts: of the model, if it was to return its choice of them.
        num_prompt_tokens: which the choice includes.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = [int(pair[1]) for pair in pairs]
    assert token_ids == list(answer.get("output_ids") or []), f"SGLang's output_ids and output_token_logprobs disagree: {answer}"
    spans = meta.get("weight_versions") or []
    version = str(meta["weight_version"])
    reason = (meta.get("finish_reason") or {}).get("type")
    assert reason in ("stop", "length", "abort"), f"SGLang's finish reason {reason!r} is unknown to us"
    return Generation(
        token_ids=token_ids,
        logprobs=[float(pair[0]) for pair in pairs],
        finish_reason=reason,
        weight_version=version,
        first_weight_version=str(spans[0]["version"]) if spans else version,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=None
        if experts is None or reason == "abort"
        else _routed_experts(meta, experts, num_prompt_tokens + len(token_ids) - 1),
    )


def _routed_experts(meta: dict[str, Any], experts: ExpertsFormat, num_tokens: int) -> bytes:
    """SGLang's base64 of int32 for every layer, dense ones too, made as small as it is kept."""
    if meta.get("routed_experts") is None:
        raise RuntimeError("an engine returned no routed experts: start it with --sglang-enable-return-routed-experts")
    try:
        return experts.encode(np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32), num_tokens)
    except ValueError as error:
        raise RuntimeError(str(error)) from None  # of every prompt, not of this one


async def _gather(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*calls))
