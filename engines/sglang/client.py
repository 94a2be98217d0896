"""HTTP client of several SGLang servers: load balancing, timeouts, aborts, and retries after the death of an engine."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import numpy as np

from penstock.engines.generation import (
    OVER_MEMORY,
    EngineClient,
    EngineGone,
    EngineRefused,
    EngineUrls,
    Generation,
    PromptImage,
    Scores,
    TokenCounts,
    WeightTransport,
)
from penstock.engines.serving import endpoints
from penstock.engines.sglang import control
from penstock.storage.errors import EngineError
from penstock.storage.samples.routed_experts import ExpertsFormat

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engines.sglang.weight_sender import WeightSender

logger = logging.getLogger(__name__)
T = TypeVar("T")
NUM_TRIES = 8
MAX_BACKOFF = 5.0  # maximum backoff in seconds after failures of an engine (before jitter)
POLL_ENGINES = 0.2  # seconds between checks for an available engine while none is available
POLL_ABORTS = 0.1  # seconds between repeated abort calls, which are sent until no request is running
MAX_CONCURRENT_ABORTS = 64
ROUTING_KEY = "X-SMG-Routing-Key"  # HTTP header; the router's policy "manual" sends equal keys to the same engine
UNLOAD_TIMEOUT = 60.0  # seconds
_unloading = threading.Lock()  # held to unload adapters: otherwise two threads could unload the same adapter
RETRIED_STATUS = {429, 500, 502, 503, 504}


class SGLangClient(EngineClient):
    """An `EngineClient` that sends each request to the engine with the fewest samples in flight.

    Args:
        urls, timeout: see `EngineBackend.connect`. If `urls` is a function, a request waits while no engine is live,
            and is sent again if its engine has left the list.
        num_tries: maximum number of tries of a request. Tries that ended with a retryable HTTP status count; those that
            ended with a connection error count only if `urls` is a fixed list.
        experts, router: see `EngineBackend.connect`. All requests except generation are sent directly to the engines.
    """

    def __init__(
        self,
        urls: EngineUrls,
        timeout: float = 600,
        num_tries: int = NUM_TRIES,
        experts: ExpertsFormat | None = None,
        router: Callable[[], str | None] | None = None,
    ) -> None:
        if not callable(urls) and not urls:
            raise EngineError(
                "no engine is available for generation, because the list of engine addresses is empty: start an engine"
            )
        self._urls = urls
        self.timeout = timeout
        self.num_tries = num_tries
        self.experts = experts
        self.router = router
        self._load: dict[str, int] = {}  # URL -> samples in flight
        self._backoff: dict[str, tuple[int, float]] = {}  # URL -> (consecutive failures, time of the next try)
        self._sticky_sessions: dict[str, str] = {}  # session id -> URL of its engine
        self._running: dict[str, tuple[str, int]] = {}  # request id -> (URL that it was sent to, number of samples)
        self._aborted = False
        self._session: aiohttp.ClientSession | None = None
        self._weight_sender: WeightSender | None = None  # kept, because it holds process groups

    @property
    def urls(self) -> list[str]:
        return list(self._urls() if callable(self._urls) else self._urls)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate_each(
        self,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        session: str | None = None,
    ) -> list[Generation]:
        assert len(prompts) == len(samplings), f"{len(prompts)} prompts and {len(samplings)} sampling parameters"
        if not prompts:
            return []
        images = images or [()] * len(prompts)
        are_equal = all(sampling == samplings[0] for sampling in samplings)
        if self.router is not None and not are_equal:
            # The router accepts only one set of sampling parameters per request (sglang-router 0.3.2 answers 422 to a
            # list of them), so each prompt becomes a separate request; a common session sends them to the same engine.
            session = session or uuid.uuid4().hex
            calls = [
                self.generate_each([prompt], [sampling], images=[own_images], session=session)
                for prompt, sampling, own_images in zip(prompts, samplings, images, strict=True)
            ]
            return [generation for answer in await asyncio.gather(*calls) for generation in answer]
        sampling = samplings[0] if are_equal else samplings
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        if self.experts is not None:
            body["return_routed_experts"] = True
        if any(images):
            body["input_ids"] = [merge_image_tokens(*pair) for pair in zip(prompts, images, strict=True)]
            # The samples of a group have equal images.
            files = {image.data for own_images in images for image in own_images}
            encoded = {data: base64.b64encode(data).decode() for data in files}
            body["image_data"] = [[encoded[image.data] for image in own_images] for own_images in images]

        def parse(answer: dict[str, Any], prompt: list[int], adapter_version: str | None) -> Generation:
            # They differ if the engine's image processor gives an image another size, or if the engine tokenized the
            # text of the prompt again.
            if "image_data" in body and (num_used := answer["meta_info"]["prompt_tokens"]) != len(prompt):
                raise EngineError(
                    f"an engine made {num_used} tokens of a prompt with images, which has {len(prompt)}: give engines "
                    "that the run does not start the image processor settings of --hf-checkpoint, and do not set "
                    "SGLANG_MM_AVOID_RETOKENIZE=0"
                )
            generation = parse_generation(answer, self.experts, len(prompt), adapter_version)
            for version, _ in generation.weight_versions:
                if version.startswith(control.UPDATING):
                    raise _RetryableError(f"an engine generated with weights that were not complete ({version})")
            return generation

        generations = await self._request_with_retries(body, prompts, session, parse)
        return [Generation([], [], "abort", []) for _ in prompts] if generations is None else generations

    async def score(self, input_ids: list[int], top_k: int = 0) -> Scores:
        body = {
            "input_ids": [input_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"top_logprobs_num": top_k} if top_k else {}),
        }
        scores = await self._request_with_retries(
            body, [input_ids], None, lambda answer, ids, _: parse_scores(answer, ids, top_k)
        )
        assert scores, "this client was aborted"
        return scores[0]

    async def abort(self) -> None:
        self._aborted = True
        gate = asyncio.Semaphore(MAX_CONCURRENT_ABORTS)

        async def abort_sample(request: str, url: str, sample: str) -> None:
            async with gate:
                if request in self._running:
                    # If the engine has died, `_request_with_retries` notices it.
                    with suppress(aiohttp.ClientError, _RetryableError):
                        await self._post(url, "/abort_request", {"rid": sample})

        while self._running:
            calls = [
                abort_sample(request, url, f"{request}_{index}")  # SGLang appends the sample's index to the request id
                for request, (sent_to, n) in self._running.items()
                for index in range(n)
                for url in ([sent_to] if self.router is None else self.urls)
            ]
            await asyncio.gather(*calls)
            await asyncio.sleep(POLL_ABORTS)  # repeated: an engine ignores aborts of requests that have not arrived yet

    def prepare_weight_updates(self) -> None:
        import penstock.engines.sglang.weight_sender  # noqa: F401

    def update_weights(
        self, named: Iterable[tuple[str, Tensor]], version: str, transport: WeightTransport = OVER_MEMORY
    ) -> None:
        from penstock.engines.sglang.weight_sender import WeightSender  # local import, because it imports torch

        if self._weight_sender is None:
            self._weight_sender = WeightSender()
        self._weight_sender.update(self.urls, named, version, transport)

    def use_adapter(self, name: str) -> None:
        for url in self.urls:
            endpoints.set_adapter(url, name)
        unload_other_adapters(self.urls, name)

    def unload_adapters(self) -> None:
        for url in self.urls:
            if (name := endpoints.adapter_of(url)) is not None:
                endpoints.set_adapter(url, None)
                unload_other_adapters([url], name, also_current=True, wait=True)

    def weight_checksums(self) -> dict[str, list[dict[str, str]]]:
        urls = self.urls
        return dict(zip(urls, _call_for_each_url(urls, control.weight_checksums)))

    def overwrite_weights(self) -> None:
        _call_for_each_url(self.urls, control.overwrite_weights)

    def release_memory(self) -> None:
        _call_for_each_url(self.urls, control.release_gpu_memory)

    def resume_kv_cache(self) -> None:
        _call_for_each_url(self.urls, control.resume_kv_cache)

    generates_tokens = staticmethod(control.generates_tokens)

    def weight_version(self, url: str, timeout: float = 30) -> str:
        version, adapter = control.weight_version(url, timeout), endpoints.adapter_of(url)
        if adapter is None or not control.has_kv_cache(version):
            return version
        return endpoints.version_of(adapter) if adapter in control.loaded_adapters(url, timeout) else version

    def num_requests(self, url: str, timeout: float = 30) -> tuple[int, int] | None:
        try:
            return control.num_requests(url, timeout)
        except (EngineGone, EngineRefused, KeyError):  # an older release may not have the route or these numbers
            return None

    # ---- inside ------------------------------------------------------------------------------------------------------

    async def _request_with_retries(
        self,
        body: dict[str, Any],
        prompts: list[list[int]],
        session: str | None,
        parse: Callable[[dict[str, Any], list[int], str | None], T],
    ) -> list[T] | None:
        """Send a request, with retries. Return `parse(answer, token ids, adapter version)` for each prompt, or None if
        the client is aborted."""
        num_failures = 0
        async with asyncio.timeout(self.timeout):
            while url := await self._choose_engine(session):
                try:
                    answers, adapter_version = await self._send_once(url, body, session)
                    parsed = [parse(*pair, adapter_version) for pair in zip(answers, prompts, strict=True)]
                    self._backoff.pop(url, None)
                    return parsed
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _RetryableError) as error:
                    failures, until = self._backoff.get(url, (0, 0.0))
                    # Requests that fail together count as one failure, so failures during a backoff do not prolong it.
                    if until <= time.monotonic():
                        seconds = min(MAX_BACKOFF, 0.25 * 2**failures) * random.uniform(0.75, 1.25)
                        self._backoff[url] = (failures + 1, time.monotonic() + seconds)
                    num_failures += isinstance(error, _RetryableError) or not callable(self._urls)
                    if num_failures >= self.num_tries and not self._aborted:
                        raise ConnectionError(
                            f"a request failed in all {self.num_tries} tries (the last one at {url}: "
                            f"{error}): see the engines' logs"
                        ) from error
        return None

    async def _send_once(
        self, url: str, body: dict[str, Any], session: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Send a request once, counted in `_load` and listed in `_running`. Return one answer per prompt, and the
        policy version of the adapter that the request named."""
        request, n = uuid.uuid4().hex, len(body["input_ids"])
        self._load[url] = self._load.get(url, 0) + n
        self._running[request] = (url, n)
        headers = {ROUTING_KEY: session or request} if self.router else {}
        try:
            # The router chooses the engine later; any engine's adapter is right, because all have the same one. (In
            # streaming mode they may differ for a while, so --lora-publish adapter is refused there with a router.)
            with endpoints.requesting(url if self.router is None else next(iter(self.urls), "")) as adapter:
                own = {"rid": request} if adapter is None else {"rid": request, "lora_path": adapter}
                # A router that accepts no new requests (None) may still answer this one; after a restart it has a
                # new URL.
                answers = await _await_unless(
                    lambda: url not in self.urls if self.router is None else self.router() not in (url, None),
                    self._post(url, "/generate", {**body, **own}, headers),
                    url,
                )
        finally:
            self._load[url] -= n
            del self._running[request]
        return answers, None if adapter is None else endpoints.version_of(adapter)

    async def _choose_engine(self, session: str | None) -> str | None:
        """Wait until an engine that is not in backoff is available, and return its URL; with a router, wait for the
        router and return its URL. The engine of the session's earlier requests is preferred, otherwise the engine with
        the fewest samples in flight. Return None if the client is aborted."""
        while not self._aborted:
            urls = self.urls
            if self.router is not None:
                router = self.router()
                urls = [router] if router and urls else []
            now = time.monotonic()
            ready = [url for url in urls if self._backoff.get(url, (0, 0.0))[1] <= now]
            if ready:
                least_busy = min(ready, key=lambda url: (self._load.get(url, 0), random.random()))
                if session is None or self.router:
                    return least_busy
                if self._sticky_sessions.setdefault(session, least_busy) not in ready:
                    self._sticky_sessions[session] = least_busy
                return self._sticky_sessions[session]
            next_try = min((self._backoff[url][1] - now for url in urls), default=POLL_ENGINES)
            await asyncio.sleep(min(POLL_ENGINES, max(0.01, next_try)))
        return None

    async def _post(self, url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """Send a POST request and return the response: parsed JSON or text."""
        if self._session is None:
            # aiohttp sets no limits: the caller limits the number of requests, `_request_with_retries` their duration.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        headers = {**endpoints.auth_headers(url), **(headers or {})}
        async with self._session.post(url + path, json=body, headers=headers) as response:
            text = await response.text()
            lost_adapter = "lora_path" in body and response.status == 400 and "LoRA adapter" in text
            if response.status in RETRIED_STATUS or lost_adapter:
                raise _RetryableError(f"{url}{path} answered HTTP {response.status}: {text[:300]}")
            if response.status >= 400:
                raise EngineError(f"{url}{path} rejected the request (HTTP {response.status}): {text[:300]}")
            return await response.json() if response.content_type == "application/json" and text else text


class _RetryableError(Exception):
    """An engine answered with an HTTP status in RETRIED_STATUS, has unloaded the adapter of the request, or generated
    after a weight update that failed halfway; a retry may succeed."""


async def _await_unless(is_gone: Callable[[], bool], call: Coroutine[Any, Any, Any], url: str) -> Any:
    """Await the request `call` to the server at `url`, but raise ClientConnectionError as soon as `is_gone` returns
    True: a server on a lost machine would never answer."""
    request = asyncio.create_task(call)
    try:
        while not (await asyncio.wait({request}, timeout=1.0))[0]:
            if is_gone():
                raise aiohttp.ClientConnectionError(f"the server at {url} died; it is being restarted")
        return request.result()
    finally:
        request.cancel()


def unload_other_adapters(urls: list[str], name: str, *, also_current: bool = False, wait: bool = False) -> None:
    """Unload from each server, in threads, the adapters of the same run as `name` that no request of this process uses.
    The adapter `name` itself is unloaded only with `also_current`. With `wait`, return when all threads have ended.
    Adapters in use, and those of a server that does not answer, stay loaded until the next call."""

    def unload(url: str) -> None:
        try:
            with _unloading:
                loaded = control.loaded_adapters(url)
                others = endpoints.other_adapters(name, loaded) + [name] * (also_current and name in loaded)
                for adapter in others:
                    if not endpoints.is_requested(adapter) and endpoints.adapter_of(url) != adapter:
                        # The server refuses new requests for the adapter at once, but answers only when no request uses
                        # it; until then it loads no other adapter.
                        control.call_server(url, "/unload_lora_adapter", {"lora_name": adapter}, UNLOAD_TIMEOUT)
        except (EngineGone, EngineRefused) as error:
            logger.warning("old adapters of %s stay loaded (%s)", url, error)

    threads = [threading.Thread(target=unload, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads if wait else ():
        thread.join()


def _call_for_each_url(urls: list[str], call: Callable[[str], T]) -> list[T]:
    """Call a function for all servers at once, wait for all, and return the results or raise the first error."""
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        return list(pool.map(call, urls))


def merge_image_tokens(input_ids: list[int], images: Sequence[PromptImage]) -> list[int]:
    """Return a prompt in which the tokens of each image are merged into one; SGLang expands it again."""
    merged, end = [], 0
    for image in images:
        merged += input_ids[end : image.start + 1]
        end = image.start + image.num_tokens
    return merged + input_ids[end:]


def parse_scores(answer: dict[str, Any], input_ids: list[int], top_k: int = 0) -> Scores:
    """Parse the log-probs of the prompt in a response of SGLang's /generate route; 0 for the first token."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        scored = [entry[1] for entry in entries]
        # In place of the last id of the vocabulary SGLang reports the id 0, with the right log-prob.
        last = max(input_ids)
        if len(scored) != len(input_ids) or any(a != b and (a, b) != (0, last) for a, b in zip(scored, input_ids)):
            raise ValueError(f"log-probs of {len(entries)} other tokens")
        logprobs = [0.0, *(float(entry[0]) for entry in entries[1:])]
        tops = answer["meta_info"]["input_top_logprobs"] if top_k else []
        if top_k and [len(top or ()) for top in tops[1:]] != [top_k] * (len(input_ids) - 1):
            raise ValueError(f"not the {top_k} most probable tokens at each position")
        pairs = [pair for top in tops[1:] for pair in sorted(top, key=lambda entry: -entry[0])]
        nothing = [0] * top_k  # for the first token
        return Scores(
            logprobs, nothing + [int(pair[1]) for pair in pairs], [0.0] * top_k + [float(pair[0]) for pair in pairs]
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"the server answered without the log-probs of the {len(input_ids)} given tokens ({type(error).__name__}: "
            f"{str(error)[:100]}): give the address of an engine whose model has the same tokenizer"
        ) from error


def parse_generation(
    answer: dict[str, Any],
    experts: ExpertsFormat | None = None,
    num_prompt_tokens: int = 0,
    adapter_version: str | None = None,
) -> Generation:
    """Parse one response of SGLang's /generate route. `experts`: format of the routed experts, which the result then
    has for prompt and response tokens. `adapter_version`: policy version of the adapter that the request named, because
    SGLang reports only the version of the base weights."""
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = [int(pair[1]) for pair in pairs]
    assert token_ids == list(answer.get("output_ids") or []), (
        f"the tokens in SGLang's output_ids and output_token_logprobs disagree: {answer}"
    )
    spans: list[dict[str, Any]] = meta.get("weight_versions", []) if adapter_version is None else []
    if not spans:  # SGLang before 0.5.21 reports only the version of the last token
        spans = [{"version": adapter_version or meta["weight_version"], "start": 0, "end": len(token_ids)}]
    reason = (meta.get("finish_reason") or {}).get("type")
    assert reason in ("stop", "length", "abort"), f"SGLang returned the unknown finish reason {reason!r}"
    routed_experts = None
    if experts is not None and reason != "abort":
        encoded = meta.get("routed_experts")
        if encoded is None:
            raise RuntimeError(
                "an engine returned no routed experts: restart it with --sglang-enable-return-routed-experts (an "
                "external engine with --enable-return-routed-experts)"
            )
        try:  # [tokens, layers, top_k] int32, dense layers included
            routed = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
            routed_experts = experts.encode(routed, num_prompt_tokens + len(token_ids) - 1)
        except ValueError as error:
            raise RuntimeError(str(error)) from None  # not a ValueError, which callers understand as a bad prompt
    return Generation(
        token_ids=token_ids,
        logprobs=[math.nan if pair[0] is None else float(pair[0]) for pair in pairs],  # JSON has no NaN: null
        finish_reason=reason,
        weight_versions=[
            (str(span["version"]), span["end"] - span["start"]) for span in spans if span["end"] > span["start"]
        ],
        counts=TokenCounts(
            prompt=num_prompt_tokens,
            cached=int(meta.get("cached_tokens") or 0),
            verifications=int(meta.get("spec_verify_ct") or 0),
            proposed=int(meta.get("spec_num_proposed_drafts") or 0),
            accepted=int(meta.get("spec_num_correct_drafts") or 0),
        ),
        routed_experts=routed_experts,
    )
