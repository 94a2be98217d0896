"""What every generation engine promises (`EngineClient`), checked for the scripted engine and for SGLang."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import hf_model, logprob_error

from penstock.engines.backends import BACKENDS, EngineBackend, connect, engine_backend
from penstock.engines.generation import EngineClient, EngineGone, Generation, WeightTransport
from tests.rollout.scripted_engine import SlowClient

PROMPT = [2, 9, 12, 16, 14, 21, 1, 3]
LENGTH = 200
TOLERANCE = 0.05 if torch.cuda.is_available() else 1e-4  # bf16, fp32; two of the random models differ by 0.9
SAMPLING = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}
Named = Iterator[tuple[str, torch.Tensor]]


class ScriptedFleet:
    """Clients of the scripted engine; it needs no server."""

    def logprob_error(self, generations: list[Generation]) -> float:
        return 0.0  # its log-probs are not a model's

    def client(self) -> EngineClient:
        client = SlowClient(["http://scripted"])
        client.chance, client.longest, client.pause_seconds = random.Random(1), 10**6, 0.002
        return client

    def weights(self) -> Named:
        return iter([(f"layer.{i}", torch.full((4,), float(i))) for i in range(5)])


class SGLangFleet:
    """Clients of a real SGLang server."""

    def __init__(self, urls: list[str], model: Path) -> None:
        self.urls, self.model = urls, model

    def client(self) -> EngineClient:
        return connect(self.urls, 120)

    def logprob_error(self, generations: list[Generation]) -> float:
        model = hf_model(self.model)
        return max(logprob_error(model, PROMPT, generation) for generation in generations)

    def weights(self) -> Named:
        from safetensors.torch import load_file

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return iter(load_file(self.model / "model.safetensors", device=device).items())


Fleet = ScriptedFleet | SGLangFleet


@pytest.fixture(params=["scripted", pytest.param("sglang", marks=pytest.mark.integration)])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    if request.param == "scripted":
        return ScriptedFleet()
    return SGLangFleet(request.getfixturevalue("engine_pool").urls, request.getfixturevalue("tiny_model"))


def run(client: EngineClient, use: Callable[[], Awaitable[Any]]) -> Any:
    """Run `use` in a new event loop, in which the client is entered."""

    async def main() -> Any:
        async with client:
            return await use()

    return asyncio.run(main())


def test_a_generation_has_its_tokens_their_logprobs_and_the_published_version(fleet: Fleet) -> None:
    client = fleet.client()
    client.update_weights(fleet.weights(), "contract/1")
    [url] = client.urls
    assert client.generates_tokens(url) and client.weight_version(url) == "contract/1"

    async def use() -> Any:
        each = [SAMPLING | {"max_new_tokens": length} for length in (1, 7)]
        return await asyncio.gather(client.generate(PROMPT, SAMPLING, n=3), client.generate_each([PROMPT] * 2, each))

    same, each = run(client, use)
    assert [len(g.token_ids) for g in same] == [LENGTH] * 3 and [len(g.token_ids) for g in each] == [1, 7]
    for generation in [*same, *each]:
        assert len(generation.logprobs) == len(generation.token_ids) and max(generation.logprobs) <= 0
        assert generation.finish_reason == "length"
        assert generation.weight_versions == [("contract/1", len(generation.token_ids))]


def test_requests_in_flight_survive_a_weight_update(fleet: Fleet) -> None:
    client = fleet.client()
    client.update_weights(fleet.weights(), "contract/2")

    async def use() -> Any:
        running = asyncio.create_task(client.generate(PROMPT, SAMPLING, n=4))
        await asyncio.sleep(0.15)
        await asyncio.to_thread(client.update_weights, fleet.weights(), "contract/3")
        return await running

    generations = run(client, use)
    assert [len(g.token_ids) for g in generations] == [LENGTH] * 4
    versions = {tuple(version for version, _ in g.weight_versions) for g in generations}
    expected = ("contract/2", "contract/3")
    assert versions == {expected} or (isinstance(fleet, ScriptedFleet) and expected in versions)  # it may be faster
    assert {sum(num for _, num in g.weight_versions) for g in generations} == {LENGTH}
    assert fleet.logprob_error(generations) < TOLERANCE


def test_requests_in_flight_are_counted_or_none(fleet: Fleet) -> None:
    client = fleet.client()
    client.update_weights(fleet.weights(), "contract/4")
    seen = []

    async def use() -> Any:
        running = asyncio.create_task(client.generate(PROMPT, SAMPLING, n=4))
        while not running.done():
            seen.append(await asyncio.to_thread(client.num_requests, client.urls[0]))
            await asyncio.sleep(0.01)

    run(client, use)
    if isinstance(fleet, ScriptedFleet):
        assert set(seen) == {None}
    else:
        assert (4, 0) in seen


def test_abort_ends_only_the_requests_of_its_client(fleet: Fleet) -> None:
    client, other = fleet.client(), fleet.client()
    client.update_weights(fleet.weights(), "contract/3")
    samplings = [SAMPLING, SAMPLING | {"temperature": 0.5}]

    async def use() -> Any:
        async with other:
            others = asyncio.create_task(other.generate(PROMPT, SAMPLING))
            # more than the cache of a small engine holds: some wait in its queue
            groups = [client.generate_each([PROMPT, PROMPT[:4]], samplings) for _ in range(60)]
            running = [asyncio.create_task(group) for group in groups]
            await asyncio.sleep(0.3)
            await client.abort()
            stopped = [generation for task in running for generation in await task]
            return stopped, await client.generate(PROMPT, SAMPLING), await others

    stopped, [late], [finished] = run(client, use)
    aborted = [g for g in stopped if g.finish_reason == "abort"]
    assert aborted and 0 < max(len(g.token_ids) for g in aborted) < LENGTH
    assert {version for g in stopped for version, _ in g.weight_versions} == {"contract/3"}
    assert fleet.logprob_error([g for g in stopped[::2] if g.token_ids]) < TOLERANCE
    assert {g.finish_reason for g in stopped} <= {"abort", "length"}  # a fast engine has finished some
    assert (late.token_ids, late.finish_reason, late.weight_versions) == ([], "abort", [])
    assert (len(finished.token_ids), finished.finish_reason) == (LENGTH, "length")


def test_an_update_that_fails_halfway_does_not_set_the_version(fleet: Fleet) -> None:
    client = fleet.client()

    def broken() -> Named:
        weights = fleet.weights()
        yield next(weights)
        yield next(weights)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        client.update_weights(broken(), "contract/4", WeightTransport(bucket_bytes=1))
    [url] = client.urls
    assert client.weight_version(url) == "updating:contract/4" and client.generates_tokens(url)
    client.update_weights(fleet.weights(), "contract/4")
    assert client.weight_version(url) == "contract/4"


def test_an_engine_with_released_memory_generates_after_weights_and_cache_are_back(fleet: Fleet) -> None:
    client = fleet.client()
    [url] = client.urls
    client.update_weights(fleet.weights(), "contract/5")
    for version in ("contract/5", "contract/6"):
        client.resume_kv_cache()  # nothing is released: no effect
        assert client.weight_version(url) == "contract/5"
        for _ in range(2):
            client.release_memory()
            assert client.weight_version(url) == "released" and client.generates_tokens(url)
        client.update_weights(fleet.weights(), version)
        assert client.weight_version(url) == f"loaded:{version}"
        if version == "contract/5":  # released again before the cache is back
            client.release_memory()
            client.update_weights(fleet.weights(), version)
        client.resume_kv_cache()
        assert client.weight_version(url) == version
    [generation] = run(client, lambda: client.generate(PROMPT, SAMPLING | {"max_new_tokens": 4}))
    assert (len(generation.token_ids), generation.weight_versions) == (4, [("contract/6", 4)])


def test_checksums_are_those_of_the_loaded_tensors(fleet: Fleet) -> None:
    client = fleet.client()
    [url] = client.urls
    client.update_weights(fleet.weights(), "contract/7")
    [before] = client.weight_checksums()[url]
    client.overwrite_weights()
    assert client.weight_version(url) == "overwritten"
    [overwritten] = client.weight_checksums()[url]
    assert before and not [name for name in before if before[name] == overwritten[name]]
    client.update_weights(fleet.weights(), "contract/7")
    assert client.weight_checksums()[url] == [before] and client.weight_version(url) == "contract/7"


def test_an_engine_without_cache_stays_paused_after_its_weights_are_overwritten(fleet: Fleet) -> None:
    client = fleet.client()
    [url] = client.urls
    client.release_memory()
    client.update_weights(fleet.weights(), "contract/8")
    client.overwrite_weights()
    client.resume_kv_cache()
    assert client.weight_version(url) == "loading:overwritten"
    client.update_weights(fleet.weights(), "contract/8")
    client.resume_kv_cache()
    assert client.weight_version(url) == "contract/8"


def test_an_address_without_an_engine_is_unhealthy_and_has_no_version(fleet: Fleet) -> None:
    client = fleet.client()
    assert not client.generates_tokens("http://127.0.0.1:9", timeout=2)
    with pytest.raises(EngineGone, match=r"127\.0\.0\.1:9"):
        client.weight_version("http://127.0.0.1:9", timeout=2)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_complete(name: str) -> None:
    backend = engine_backend(name)
    assert isinstance(backend, EngineBackend) and isinstance(backend.connect(["http://engine"]), EngineClient)
    assert not getattr(backend.server_class, "__abstractmethods__", None)


def test_stages_and_flows_use_only_the_interface() -> None:
    root = Path(__file__).parents[2]
    sources = [path for package in ("stages", "flows") for path in (root / package).rglob("*.py")]
    assert not [path for path in sources if "penstock.engines.sglang" in path.read_text(encoding="utf-8")]
    texts = [path.read_text(encoding="utf-8") for path in (root / "stages/train").rglob("*.py")]
    modules = {name for text in texts for name in re.findall(r"penstock\.engines\.megatron[.\w]*", text)}
    assert modules == {"penstock.engines.megatron.megatron_options"}  # the type of [train.megatron]
