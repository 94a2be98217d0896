"""Asynchronous generation over several engines: who gets which request, time limits, ending requests early, and sending again what a
dead engine took along.

Which engines live is somebody else's knowledge (`engines/sglang/supervisor.py`), what is asked and what becomes of the answers the
callers'.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal

import aiohttp

from engines.sglang import control
from engines.sglang.generation import Generation, parse_generation
from storage.errors import EngineError
from storage.routed_experts import ExpertsFormat

Engines = Callable[[], Sequence[str]] | Sequence[str]
NUM_TRIES = 8
LONGEST_REST = 5.0  # seconds until an engine that failed is tried again
LOOK_EVERY = 0.2  # seconds between looks at the list of engines while there is none
ABORT_EVERY = 0.1  # seconds between looks whether all aborted requests have ended
ABORTS_AT_ONCE = 64
ROUTING_KEY = "X-SMG-Routing-Key"  # requests with the same one go to the same engine, if the router's policy is "manual"
RETRIED_STATUS = {429, 500, 502, 503, 504}


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
        router: gives the address of the router that requests go through, none while it is away. It says which engine gets which
            request; everything else goes straight to the engines.
    """

    def __init__(
        self,
        engines: Engines,
        timeout: float = 600,
        num_tries: int = NUM_TRIES,
        experts: ExpertsFormat | None = None,
        router: Callable[[], str | None] | None = None,
    ) -> None:
        if not callable(engines) and not engines:
            raise EngineError("no engine is available for generation: start one")
        self._engines = engines
        self.timeout = timeout
        self.num_tries = num_tries
        self.experts = experts
        self.router = router
        self._load: dict[str, int] = {}  # samples in flight
        self._resting: dict[str, tuple[int, float]] = {}  # engine that failed -> how often in a row, until when it rests
        self._homes: dict[str, str] = {}  # session -> its engine
        self._running: dict[str, tuple[str, int]] = {}  # id of a request -> where it was sent, its number of samples
        self._aborted = False
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

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int = 1, *, session: str | None = None
    ) -> list[Generation]:
        """Sample `n` responses to one prompt, in one request. If its engine dies it is sent again, to another one or a new one.

        Args:
            input_ids: the prompt.
            sampling: SGLang's sampling parameters (`temperature`, `max_new_tokens`, ...).
            session: a name; requests with the same one go to the same engine while it lives, which has their common beginning cached.

        Raises:
            EngineError: the engine refuses the request, for instance because the prompt is too long.
            TimeoutError: no answer within `timeout` seconds.
            ConnectionError: `num_tries` errors.
            RuntimeError: the engine does not return the experts it was asked for, or not those of this model.
        """
        return await self._ask([input_ids] * n, sampling, session)

    async def generate_each(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], *, session: str | None = None
    ) -> list[Generation]:
        """One response to each of several prompts, in one request, each with sampling parameters of its own. Otherwise as `generate`."""
        assert len(prompts) == len(samplings), f"{len(prompts)} prompts and {len(samplings)} sampling parameters"
        if not prompts:
            return []
        if self.router is None:
            return await self._ask(prompts, samplings, session)
        if all(sampling == samplings[0] for sampling in samplings):
            return await self._ask(prompts, samplings[0], session)
        # The router reads one set of sampling parameters a request (sglang-router 0.3.2 answers 422 to a list): a request each, and all
        # of them to the same engine.
        session = session or uuid.uuid4().hex
        answers = await _gather([self._ask([ids], sampling, session) for ids, sampling in zip(prompts, samplings)])
        return [generation for answer in answers for generation in answer]

    async def abort(self) -> None:
        """End every request of this client and send no more; returns when none is left. Requests of other clients go on.

        All of them, and all that are made later, return with the finish reason "abort" and the tokens that they have; what was never
        sent has none, and the weight version "".
        """
        self._aborted = True
        while self._running:
            await self._abort_running()
            await asyncio.sleep(ABORT_EVERY)  # and once more, for an engine passes over a request that has not reached it yet

    async def _abort_running(self) -> None:
        gate = asyncio.Semaphore(ABORTS_AT_ONCE)

        async def one(request: str, url: str, sample: str) -> None:
            async with gate:
                if request in self._running:
                    with suppress(aiohttp.ClientError, _Retriable):  # the request itself learns what has become of its engine
                        await self._post(url, "/abort_request", {"rid": sample})

        await _gather(
            [
                one(request, url, f"{request}_{index}")  # how SGLang calls the samples of a request
                for request, (sent_to, n) in self._running.items()
                for index in range(n)
                for url in ([sent_to] if self.router is None else self.urls)
            ]
        )

    async def _ask(
        self, prompts: list[list[int]], sampling: dict[str, Any] | list[dict[str, Any]], session: str | None
    ) -> list[Generation]:
        """One request until it is answered, or until the client is aborted."""
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        if self.experts is not None:
            body["return_routed_experts"] = True
        num_failures = 0
        async with asyncio.timeout(self.timeout):
            while url := await self._address(session):
                try:
                    answers = await self._sent(url, body, session)
                    self._resting.pop(url, None)
                    return [
                        parse_generation(answer, self.experts, len(ids)) for answer, ids in zip(answers, prompts, strict=True)
                    ]
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _Retriable) as error:
                    self._rest(url)
                    num_failures += isinstance(error, _Retriable) or not callable(self._engines)
                    if num_failures >= self.num_tries and not self._aborted:
                        tries = f"{self.num_tries} tries (the last one at {url}: {error})"
                        raise ConnectionError(f"no engine answered in {tries}: see the engines' logs") from error
        return [Generation([], [], "abort", "", "", 0) for _ in prompts]

    async def _sent(self, url: str, body: dict[str, Any], session: str | None) -> Any:
        """The answers to a request that is counted as the engine's, and known by its id, as long as it runs."""
        request, n = uuid.uuid4().hex, len(body["input_ids"])
        self._load[url] = self._load.get(url, 0) + n
        self._running[request] = (url, n)
        headers = {ROUTING_KEY: session or request} if self.router else {}
        try:
            return await self._while_listed(url, self._post(url, "/generate", {**body, "rid": request}, headers))
        finally:
            self._load[url] -= n
            del self._running[request]

    async def _address(self, session: str | None) -> str | None:
        """Where a request goes: to the session's engine, or to the one with the fewest samples in flight, of those that have not just
        failed. Waits until there is one. None when the client is aborted."""
        while not self._aborted:
            now = time.monotonic()
            addresses = self._addresses()
            ready = [url for url in addresses if self._resting.get(url, (0, 0.0))[1] <= now]
            if ready:
                least_busy = min(ready, key=lambda url: (self._load.get(url, 0), random.random()))
                if session is None or self.router:
                    return least_busy
                if self._homes.setdefault(session, least_busy) not in ready:
                    self._homes[session] = least_busy
                return self._homes[session]
            wakes = min((self._resting[url][1] - now for url in addresses), default=LOOK_EVERY)
            await asyncio.sleep(min(LOOK_EVERY, max(0.01, wakes)))
        return None

    def _addresses(self) -> list[str]:
        """Of the engines alive, or of the router in front of them."""
        urls = self.urls
        if self.router is None:
            return urls
        router = self.router()
        return [router] if router and urls else []

    def _replaced(self, url: str) -> bool:
        """Whether no answer can be hoped for from there any more. Of a router that is away for a moment it can."""
        return url not in self.urls if self.router is None else self.router() not in (url, None)

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
                if self._replaced(url):
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

    async def _post(self, url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        async with self._connections().post(
            url + path, json=body, headers={**control.headers(url), **(headers or {})}
        ) as response:
            return await self._read(response, url + path)

    async def _get(self, url: str, path: str) -> Any:
        async with self._connections().get(url + path, headers=control.headers(url)) as response:
            return await self._read(response, url + path)

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> Any:
        text = await response.text()
        if response.status in RETRIED_STATUS:
            raise _Retriable(f"{where} answered {response.status}: {text[:300]}")
        if response.status >= 400:
            raise EngineError(f"{where} refused the request ({response.status}): {text[:300]}")
        return await response.json() if response.content_type == "application/json" and text else text

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Without a limit of aiohttp's own: how much is in flight is the caller's to bound.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the whole is limited in `generate`
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session


class _Retriable(Exception):
    """An answer that another try may turn into a good one."""


async def _gather(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*calls))
