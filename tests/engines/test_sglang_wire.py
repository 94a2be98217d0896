"""Details of weight updates: buckets, retries, engines that fail, and engines whose memory is released."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_servers import SmallServer
from torch.multiprocessing import reductions

from penstock.engines.generation import EngineRefused
from penstock.engines.sglang import weight_sender, weight_update
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weight_sender import EngineGroup
from penstock.engines.sglang.weight_update import FlatBucket, WeightUpdate, split_into_buckets

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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_sglang_finds_the_gpu_of_a_handle_by_its_uuid(
    shape: tuple[int, ...], dtype: torch.dtype, two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's unpickler accepts the handle, and its rebuild function finds the GPU whatever its number there
    is; nothing else of torch's handle changes."""
    from sglang.srt.utils import MultiprocessingSerializer, patch_torch

    tensor = torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)
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


READER = """
import sys, torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
content = MultiprocessingSerializer.deserialize(sys.stdin.read())
print(content["flattened_tensor"].double().sum().item(), [entry.name for entry in content["metadata"]])
"""


@pytest.mark.gpu
def test_another_process_opens_a_bucket_on_a_gpu() -> None:
    flat = FlatBucket([("weight", torch.arange(999, device="cuda") % 100)])
    result = subprocess.run([sys.executable, "-c", READER], input=flat.serialize(), capture_output=True, text=True)
    assert result.stdout.split("\n")[-2] == f"{flat.flat.double().sum().item()} ['weight']", result.stderr[-2000:]


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
