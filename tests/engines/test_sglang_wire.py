"""Details of weight updates: buckets, retries, engines that fail, and engines whose memory is released."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_servers import SmallServer

from penstock.engines.generation import EngineRefused
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weights import group, payload
from penstock.engines.sglang.weights.group import EngineGroup
from penstock.engines.sglang.weights.payload import FlatBucket
from penstock.engines.sglang.weights.update import WeightUpdate
from penstock.engines.weights.buckets import split_into_buckets

QUERY_KEY = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("max_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("latent", [QUERY_KEY, QUERY_KEY[::-1], QUERY_KEY[1:]], ids=" ".join)
def test_fused_tensors_stay_in_one_bucket(latent: tuple[str, ...], max_bytes: int) -> None:
    """Every tensor comes once, whatever comes between the two of a layer, also if there is only one of them."""
    between = "input_layernorm"
    names = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in (latent[0], between, *latent[1:])]
    cut = [
        [name for name, _ in bucket]
        for bucket, _ in split_into_buckets(((name, torch.zeros(8)) for name in names), max_bytes)
    ]
    assert sorted(name for bucket in cut for name in bucket) == sorted(names)
    for bucket in cut:
        assert 32 * len(bucket) <= max_bytes or len(bucket) <= len(latent)
        for number in range(3):
            assert sum(f"layers.{number}." in name and between not in name for name in bucket) in (0, len(latent))


@pytest.mark.parametrize(
    "message, num_tries", [("Shared memory manager connection has timed out", 3), ("something else", 1)]
)
def test_a_slow_shared_memory_manager_is_retried(message: str, num_tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives its daemon a second to answer; other errors are raised at once."""
    pickled, tries = payload.ForkingPickler.dumps, []

    def dumps(content: object) -> memoryview:
        tries.append(content)
        if len(tries) < 3:
            raise RuntimeError(message)
        return pickled(content)

    monkeypatch.setattr(payload, "ForkingPickler", SimpleNamespace(dumps=dumps))
    bucket = FlatBucket([("weight", torch.zeros(4))])
    if num_tries == 3:
        assert bucket.serialize()
    else:
        with pytest.raises(RuntimeError, match=message):
            bucket.serialize()
    assert len(tries) == num_tries


@pytest.fixture
def servers() -> Iterator[list[SmallServer]]:
    servers = [SmallServer(), SmallServer()]
    yield servers
    for server in servers:
        server.die()


def test_weights_are_resumed_once_if_another_engine_refuses(servers: list[SmallServer]) -> None:
    """The first try resumes the weights of one engine only; SGLang would die if the second try resumed them again."""
    client = SGLangClient([server.url for server in servers])
    client.release_memory()
    servers[1].refuses_resume = True
    with pytest.raises(EngineRefused):
        WeightUpdate(client.urls, "run/1").__enter__()
    assert [server.version for server in servers] == ["loading:run/1", "released"]
    servers[1].refuses_resume = False
    with WeightUpdate(client.urls, "run/1"):
        assert [server.version for server in servers] == ["loading:run/1"] * 2
    client.resume_kv_cache()
    assert [(server.version, server.paused) for server in servers] == [("run/1", False)] * 2


def test_engine_with_released_memory_is_healthy(servers: list[SmallServer]) -> None:
    """It is paused, so it generates no token for a health check; a paused engine with a KV cache is not healthy."""
    released, paused = servers
    client = SGLangClient([released.url])
    client.release_memory()
    paused.paused = True
    assert client.generates_tokens(released.url) and not client.generates_tokens(paused.url)
    with WeightUpdate(client.urls, "run/1"):
        assert client.generates_tokens(released.url)
    assert client.generates_tokens(released.url)
    released.dead = True
    assert not client.generates_tokens(released.url)


@pytest.mark.parametrize("lazy", ["0", "1"])  # lazy: connect at the first broadcast, as NCCL does
def test_failed_join_is_raised_and_frees_the_name_of_the_group(lazy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    monkeypatch.setattr(group, "TIMEOUT", timedelta(seconds=0.2))

    def refuse(url: str, route: str, body: dict[str, Any]) -> None:
        raise EngineRefused(f"{url}{route} answered HTTP 400")

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with pytest.raises(EngineRefused):
                EngineGroup({"http://engine": 1}, "127.0.0.1", torch.device("cpu"), pool.submit, refuse)
