"""Asynchronous generation over several engines: who gets which request, time limits, retries.

What is asked and what becomes of the answers is the callers' business.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import aiohttp

FinishReason = Literal["stop", "length", "abort"]
NUM_TRIES = 4
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


class EngineClient:
    """Sends groups of samples to the least busy engine.

    An async context manager, or `await client.close()`. Belongs to the event loop it is first used in.
    """

    def __init__(self, urls: list[str], timeout: float = 600, num_tries: int = NUM_TRIES) -> None:
        if not urls:
            raise ValueError("no engine to generate with: start one")
        self.urls = list(urls)
        self.timeout = timeout
        self.num_tries = num_tries
        self._load = dict.fromkeys(self.urls, 0)  # samples in flight
        self._session: aiohttp.ClientSession | None = None

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
        """Sample `n` responses to one prompt, in one request.

        Args:
            input_ids: the prompt.
            sampling: SGLang's sampling parameters (`temperature`, `max_new_tokens`, ...).

        Raises:
            ValueError: the engine refuses the request, for instance because the prompt is too long.
            TimeoutError: no answer within `timeout` seconds.
            ConnectionError: no engine answers after `num_tries` tries.
        """
        body = {"input_ids": [input_ids] * n, "sampling_params": sampling, "return_logprob": True}
        tried: list[str] = []
        for attempt in range(self.num_tries):
            url = min(self.urls, key=lambda url: (tried.count(url), self._load[url], random.random()))
            self._load[url] += n
            try:
                answers = await self._post(url, "/generate", body)
                return [parse_generation(answer) for answer in answers]
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _Retriable) as error:
                tried.append(url)
                if attempt + 1 == self.num_tries:
                    tries = f"{self.num_tries} tries (the last one at {url}: {error})"
                    raise ConnectionError(f"no engine answered in {tries}: see the engines' logs") from error
                await asyncio.sleep(min(10.0, 0.25 * 4**attempt) * random.uniform(0.5, 1.5))
            finally:
                self._load[url] -= n
        raise AssertionError("unreachable")

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
        infos = await _gather([self._get(url, "/model_info") for url in self.urls])
        return [str(info["weight_version"]) for info in infos]

    async def _on_all(self, path: str, body: dict[str, Any]) -> list[Any]:
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
            timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=10)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session


class _Retriable(Exception):
    """An answer that another try may turn into a good one."""


def parse_generation(answer: dict[str, Any]) -> Generation:
    """One response of SGLang's JSON. Tokens come from the log-probs, so the two cannot disagree."""
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
    )


async def _gather(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*calls))
