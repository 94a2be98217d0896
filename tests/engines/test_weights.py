"""Buckets and payloads of weights, and the calls of an update, without a real server."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_servers import SmallServer
from torch.multiprocessing import reductions

from penstock.engines.generation import EngineRefused, WeightTransport
from penstock.engines.sglang import weight_sender, weight_update
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weight_sender import EngineGroup, write_weights
from penstock.engines.sglang.weight_update import FlatBucket, WeightUpdate, split_into_buckets


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 4), (1,), (16, 2), (5,), (2, 2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    return [
        (f"layer.{i}", torch.randn(size, generator=generator).to(dtype))
        for i, (size, dtype) in enumerate(zip(sizes, dtypes))
    ]


@pytest.mark.parametrize("max_bytes", [1, 60, 10_000])
def test_buckets_keep_the_order_and_the_size_limit(max_bytes: int) -> None:
    named = tensors()
    cut = list(split_into_buckets(iter(named), max_bytes))
    assert [name for bucket, _ in cut for name, _ in bucket] == [name for name, _ in named]
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    for bucket, _ in cut:
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        assert size <= max_bytes or len(bucket) == 1


def test_a_payload_contains_the_tensors_bit_for_bit() -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    named = tensors()
    named[2] = ("layer.2", named[2][1].T)  # not contiguous
    named.append(("layer.fp8", torch.randn(6, 2).to(torch.float8_e4m3fn)))
    before = torch.multiprocessing.get_sharing_strategy()
    flat = FlatBucket(named)
    for _ in range(2):  # one for each receiver
        content = MultiprocessingSerializer.deserialize(flat.serialize())
        received = dict(FlattenedTensorBucket(**content).reconstruct_tensors())
        assert received.keys() == dict(named).keys()
        assert all(
            received[name].dtype == sent.dtype and torch.equal(received[name].float(), sent.float())
            for name, sent in named
        )
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_write_weights_writes_a_model_directory(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("old")
    write_weights(tmp_path / "out", iter(tensors()), source, shard_bytes=60)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert (tmp_path / "out/config.json").exists()
    assert len(set(index.values())) > 1
    for name, tensor in tensors():
        assert torch.equal(load_file(tmp_path / "out" / index[name])[name], tensor)


class UpdatedServer(SmallServer):
    """Also loads buckets, like SGLang of one release, and records all calls."""

    tensor_parallel = 2

    def __init__(self, release: str, refuse_bucket: int | None = None) -> None:
        super().__init__("default")
        self.release, self.refuse_bucket = release, refuse_bucket
        self.calls: list[str] = []
        self.flushes: list[bool] = []
        self.session_open = self.busy = False

    def _change(self, path: str, body: dict[str, Any]) -> None:
        self.calls.append(path)
        if path == "/begin_weight_update":
            assert body == {"selector": "target"}
            if self.session_open:
                raise ValueError("a weight-update session is already open")
        elif path == "/pause_generation":
            self.busy = self.busy and body["mode"] != "abort"
        elif path == "/release_memory_occupation":
            assert not self.busy
        elif path == "/continue_generation":
            assert self.allocated == {"weights", "kv_cache"}
        elif path == "/update_weights_from_tensor":
            self._load(body)
        if path in ("/begin_weight_update", "/end_weight_update"):
            self.session_open = path == "/begin_weight_update"
        super()._change(path, body)

    def _load(self, body: dict[str, Any]) -> None:
        older = self.release == "0.5.15.post1"
        assert "weights" in self.allocated
        assert body.get("selector") == (None if older else "target")
        assert body.get("disable_draft_model") == (True if older else None)
        assert "kv_cache" in self.allocated or not body["flush_cache"]
        assert body["load_format"] == "flattened_bucket"
        assert len(body["serialized_named_tensors"]) == 2  # one payload for each of its ranks
        self.flushes.append(body["flush_cache"])
        if len(self.flushes) == self.refuse_bucket:
            raise ValueError("shape mismatch")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[UpdatedServer]:
    engine = UpdatedServer(*request.param)
    yield engine
    engine.die()


@pytest.mark.parametrize("engine", [("0.5.21",), ("0.5.15.post1",), ("0.5.22.dev3",)], indirect=True, ids=str)
def test_an_update_makes_the_calls_of_each_release(engine: UpdatedServer) -> None:
    engine.session_open = engine.release != "0.5.15.post1"  # left by a trainer that died
    SGLangClient([engine.url]).update_weights(iter(tensors()), "run/7", WeightTransport(bucket_bytes=100))
    begin, end = ["/begin_weight_update", "/end_weight_update"], ["/end_weight_update"]
    if engine.release == "0.5.15.post1":
        begin, end = [], []
    assert engine.calls == [
        *("/pause_generation", "/update_weight_version"),
        *(begin + begin[:1]),
        *["/update_weights_from_tensor"] * len(engine.flushes),
        *(*end, "/update_weight_version", "/continue_generation"),
    ]
    assert engine.flushes == [False] * (len(engine.flushes) - 1) + [True]
    assert engine.version == "run/7"


@pytest.mark.parametrize("engine", [("0.5.21", 2)], indirect=True, ids=str)
def test_a_refused_bucket_does_not_set_the_version_and_generation_resumes(engine: UpdatedServer) -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"):
        SGLangClient([engine.url]).update_weights(iter(tensors()), "run/7", WeightTransport(bucket_bytes=1))
    assert engine.version == "updating:run/7"
    assert engine.calls[-2:] == ["/end_weight_update", "/continue_generation"]


@pytest.mark.parametrize("engine", [("0.5.21",)], indirect=True, ids=str)
def test_released_memory_is_resumed_in_the_order_that_sglang_survives(engine: UpdatedServer) -> None:
    client, engine.busy = SGLangClient([engine.url]), True
    client.release_memory()
    client.release_memory()
    assert engine.allocated == set() and engine.calls.count("/release_memory_occupation") == 1
    client.update_weights(iter(tensors()), "run/7", WeightTransport(bucket_bytes=100))
    assert engine.allocated == {"weights"} and engine.version == "loaded:run/7" and set(engine.flushes) == {False}
    assert "/continue_generation" not in engine.calls
    client.release_memory()  # the KV cache is still released
    assert engine.allocated == set()
    client.update_weights(iter(tensors()), "run/8", WeightTransport(bucket_bytes=100))
    client.resume_kv_cache()
    assert engine.allocated == {"weights", "kv_cache"} and engine.version == "run/8"
    assert engine.calls[-1] == "/continue_generation"


@pytest.mark.parametrize("engine", [("0.5.21", 2)], indirect=True, ids=str)
def test_an_update_that_fails_after_a_release_stays_paused_and_is_repeated(engine: UpdatedServer) -> None:
    client = SGLangClient([engine.url])
    client.release_memory()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        client.update_weights(iter(tensors()), "run/7", WeightTransport(bucket_bytes=1))
    client.resume_kv_cache()
    assert engine.version == "loading:run/7" and engine.allocated == {"weights"}
    client.update_weights(iter(tensors()), "run/7")
    client.resume_kv_cache()
    assert engine.version == "run/7" and engine.allocated == {"weights", "kv_cache"}


QUERY_KEY = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize(
    ("latent", "max_bytes"), [(QUERY_KEY, 1), (QUERY_KEY[::-1], 100), (QUERY_KEY[1:], 1), (QUERY_KEY, 10_000)], ids=str
)
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
    pickled, tries = weight_update.UuidPickler.dumps, []

    def dumps(content: object) -> memoryview:
        tries.append(content)
        if len(tries) < 3:
            raise RuntimeError(message)
        return pickled(content)

    monkeypatch.setattr(weight_update, "UuidPickler", SimpleNamespace(dumps=dumps))
    bucket = FlatBucket([("weight", torch.zeros(4))])
    if num_tries == 3:
        assert bucket.serialize()
    else:
        with pytest.raises(RuntimeError, match=message):
            bucket.serialize()
    assert len(tries) == num_tries


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make torch see two GPUs, and reduce a tensor on the second one as it does on CUDA. Returns their UUIDs."""

    def rebuild_cuda_tensor(*arguments: Any) -> tuple[Any, ...]:
        return arguments

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        storage = (torch.UntypedStorage, tensor.dtype)
        return reductions.rebuild_cuda_tensor, (
            *(torch.Tensor, tensor.shape, tensor.stride(), 0, *storage, 1, b"handle", tensor.nbytes, 512),
            *(False, b"counter", 7, b"event", True),
        )

    uuids = ["GPU-of-another-run", "GPU-of-the-trainer"]
    rebuild_cuda_tensor.__module__ = reductions.__name__
    rebuild_cuda_tensor.__qualname__ = "rebuild_cuda_tensor"
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setitem(ForkingPickler._extra_reducers, OnGpu, reduce_tensor)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    return uuids


def test_sglang_finds_the_gpu_of_a_handle_by_its_uuid(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's unpickler accepts the handle, and its rebuild function finds the GPU whatever its number there
    is; nothing else of torch's handle changes."""
    from sglang.srt.utils import MultiprocessingSerializer, patch_torch

    tensor = torch.zeros(2, 3, dtype=torch.bfloat16).as_subclass(OnGpu)
    expected = reductions.reduce_tensor(tensor)[1]
    received = MultiprocessingSerializer.deserialize(base64.b64encode(weight_update.UuidPickler.dumps(tensor)).decode())
    assert received == (*expected[:6], two_gpus[1], *expected[7:])
    two_gpus.reverse()  # the scheduler sees the GPUs in another order
    assert patch_torch._device_from_maybe_uuid(received[6]) == 0
    two_gpus.remove("GPU-of-the-trainer")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Exception, match="Invalid device_uuid"):
        patch_torch._device_from_maybe_uuid(received[6])


@pytest.mark.usefixtures("two_gpus")
def test_a_handle_for_routes_without_uuids_has_the_number_of_the_gpu() -> None:
    flat = FlatBucket([("weight", torch.zeros(4))])
    flat.flat = flat.flat.as_subclass(OnGpu)
    assert pickle.loads(base64.b64decode(flat.serialize(by_uuid=False)))["flattened_tensor"][6] == 1
    assert pickle.loads(base64.b64decode(flat.serialize()))["flattened_tensor"][6] == "GPU-of-the-trainer"


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
    monkeypatch.setattr(weight_sender, "TIMEOUT", timedelta(seconds=0.2))

    def refuse(url: str, route: str, body: dict[str, Any]) -> None:
        raise EngineRefused(f"{url}{route} answered HTTP 400")

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with pytest.raises(EngineRefused):
                EngineGroup({"http://engine": 1}, "127.0.0.1", torch.device("cpu"), pool.submit, refuse)
