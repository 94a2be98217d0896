"""Buckets and payloads of weights, and the calls of an update, without a real server."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_servers import SmallServer

from penstock.engines.generation import WeightTransport
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weight_sender import write_weights
from penstock.engines.sglang.weight_update import FlatBucket, split_into_buckets


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 4), (1,), (16, 2), (5,), (2, 2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    return [
        (f"layer.{i}", torch.randn(size, generator=generator).to(dtype))
        for i, (size, dtype) in enumerate(zip(sizes, dtypes))
    ]


@pytest.mark.parametrize("max_bytes", [1, 10, 60, 140, 10_000])
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
    before = torch.multiprocessing.get_sharing_strategy()
    flat = FlatBucket(named)
    for _ in range(2):  # one for each receiver
        content = MultiprocessingSerializer.deserialize(flat.serialize())
        received = dict(FlattenedTensorBucket(**content).reconstruct_tensors())
        assert received.keys() == dict(named).keys()
        assert all(received[name].dtype == sent.dtype and torch.equal(received[name], sent) for name, sent in named)
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


def test_an_update_over_disk_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'disk' needs"):
        SGLangClient(["http://x"]).update_weights([], "run/7", WeightTransport("disk"))


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


def test_sglang_refuses_to_unpickle_other_classes() -> None:
    """The reason for plain namespaces as metadata: SGLang's unpickler accepts few classes."""
    from sglang.srt.utils import MultiprocessingSerializer

    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        MultiprocessingSerializer.deserialize(MultiprocessingSerializer.serialize(Path("x"), output_str=True))
