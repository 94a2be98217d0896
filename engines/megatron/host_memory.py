"""Read the bytes of tensors in host memory, without copies of whole tensors, and hash tensors in threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from penstock.storage.disk import map_in_threads

NUM_THREADS = min(8, os.cpu_count() or 1)  # for hashing and for writing; both release the GIL
CHUNK = 1 << 20  # bytes of a chunk of a tensor in host memory: it stays in the CPU cache while it is hashed and written
PINNED = 16 << 20  # bytes of a pinned buffer for tensors on a GPU; torch keeps the buffers for later calls


def host_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in chunks, each of which is valid until the next chunk is requested. A tensor on a
    GPU is copied through two pinned buffers: one is filled while the caller uses the other. Thread-safe."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not len(flat):
        return
    if flat.device.type == "cpu":
        memory = _memory(flat)
        for start in range(0, len(memory), CHUNK):
            yield memory[start : start + CHUNK]
        return
    stream = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    parts = flat.split(PINNED)
    buffers = [torch.empty(len(parts[0]), dtype=torch.uint8, pin_memory=True) for _ in parts[:2]]
    copied = [torch.cuda.Event() for _ in buffers]
    for index in range(len(parts) + 1):
        if index < len(parts):
            with torch.cuda.stream(stream):
                buffers[index % 2][: len(parts[index])].copy_(parts[index], non_blocking=True)
                copied[index % 2].record(stream)
        if index > 0:
            copied[(index - 1) % 2].synchronize()
            yield _memory(buffers[(index - 1) % 2])[: len(parts[index - 1])]


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return name -> xxh3-64 hash of all tensors with this name, in the given order. Names are hashed in threads."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors:
        groups.setdefault(name, []).append(tensor)

    def hash_group(group: list[Tensor]) -> str:
        digest = xxhash.xxh3_64()
        for chunk in (chunk for tensor in group for chunk in host_chunks(tensor)):
            digest.update(chunk)
        return digest.hexdigest()

    return dict(zip(groups, map_in_threads(hash_group, groups.values(), NUM_THREADS), strict=True))


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the CPU, valid as long as the tensor. A NumPy view would forbid
    resizing the tensor's storage, and `residency.py` frees memory by resizing."""
    return memoryview((ctypes.c_ubyte * len(tensor)).from_address(tensor.data_ptr())).cast("B")
