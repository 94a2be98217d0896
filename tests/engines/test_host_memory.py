"""Hashes of tensors, computed in chunks of host memory, equal those of the whole bytes."""

import pytest
import torch
import xxhash
from torch import Tensor


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_hash_equals_hash_of_all_bytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engines.megatron import host_memory

    monkeypatch.setattr(host_memory, "CHUNK", 64)
    monkeypatch.setattr(host_memory, "PINNED", 96)
    matrix = torch.randn(41, 23, device=device)
    tensors: list[tuple[str, Tensor]] = [
        ("several", matrix.bfloat16()),
        ("transposed", matrix.T),
        ("rows", matrix[3:5]),
        ("scalar", torch.tensor(2.5, device=device)),
        ("empty", matrix[:0]),
        ("several", matrix[1].double()),
        ("one chunk", torch.arange(96, dtype=torch.uint8, device=device)),
    ]
    expected: dict[str, xxhash.xxh3_64] = {}
    for name, tensor in tensors:
        data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        expected.setdefault(name, xxhash.xxh3_64()).update(data)
    assert host_memory.hash_tensors(tensors) == {name: digest.hexdigest() for name, digest in expected.items()}


def test_hashing_keeps_a_storage_resizable() -> None:
    from penstock.engines.megatron.host_memory import hash_tensors

    tensor = torch.ones(8)
    hash_tensors([("t", tensor)])
    assert tensor.untyped_storage().resize_(0).size() == 0
