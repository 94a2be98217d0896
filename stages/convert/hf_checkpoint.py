"""Weights of Hugging Face directories in safetensors files: read by rows, and written tensor by tensor.

A file's header has the dtype, shape and offsets of every tensor: shapes are known without reading tensors, and the
header can be written before the tensors. Block-quantized fp8 weights are read as bf16.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from penstock.engines.megatron.host_memory import host_chunks
from penstock.engines.weights.fp8_blocks import dequantize, scale_shape
from penstock.engines.weights.hf_headers import (
    INDEX,
    SCALE,
    TensorLocation,
    block_size,
    refuse_dtype,
    stored_tensors,
    unstack_experts,
    weight_files,
)
from penstock.storage.disk import hash_file, write_back
from penstock.storage.errors import ModelError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
CHUNK = 1 << 20  # bytes; a chunk stays in the CPU cache while it is hashed and written
READ_AHEAD = 2 << 30  # bytes of weight files that are prefetched
RESIDENT = 16 << 20  # bytes of a mapped file that are read before their pages are released
NamedTensor = tuple[str, "TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one row (one index of the first axis)."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class HFWeights(AbstractContextManager["HFWeights", None]):
    """The weights of a Hugging Face directory, or of some of its weight files (`files`), read on demand. Thread-safe.
    Use it as a context manager, because it keeps files open."""

    def __init__(self, directory: str | Path, files: list[Path] | None = None) -> None:
        self.directory = Path(directory)
        block = block_size(self.directory)
        self.block = block or (1, 1)
        self.files = weight_files(self.directory) if files is None else files
        stored = unstack_experts(stored_tensors(self.directory, self.files))
        self.locations = {name: tensor.location for name, tensor in stored.items()}
        self.info = {  # fp8 weights are listed as bf16, their scales are not listed
            name: TensorInfo(DTYPES.get(tensor.location.dtype, torch.bfloat16), tensor.shape)
            for name, tensor in stored.items()
        }
        self._scales = self._pop_fp8_scales(block)
        self._open: dict[Path, mmap.mmap] = {}
        self._opening = threading.Lock()

    def __exit__(self, *exception: object) -> None:
        self._open.clear()  # a file is unmapped when no memoryview refers to it

    def fetch(self, name: str, num_rows: int | None = None) -> Tensor:
        """Return a tensor, or only its first `num_rows` rows."""
        info = self.info[name]
        if num_rows is not None and info.shape:
            info = TensorInfo(info.dtype, (num_rows, *info.shape[1:]))
        return _tensor_from_chunks(info, self.read_rows(name, 0, num_rows))

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes of the rows [start, stop) of a tensor in chunks. Default: all rows."""
        info, location = self.info[name], self.locations[name]
        if not info.shape:
            return self._tensor_chunks(location, 0, info.num_bytes)
        stop = info.shape[0] if stop is None else stop
        if location.columns is not None:
            return self._transposed_chunk(name, start, stop)
        if name not in self._scales:
            return self._tensor_chunks(location, start * info.row_bytes, (stop - start) * info.row_bytes)
        return self._dequantized_chunks(name, start, stop)

    def _transposed_chunk(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield rows of a weight that the file has as columns of a matrix, in one chunk."""
        info, location = self.info[name], self.locations[name]
        assert location.columns is not None
        first, width = location.columns
        matrix = TensorInfo(info.dtype, (info.shape[1], width))
        stored = _tensor_from_chunks(matrix, self._tensor_chunks(location, 0, matrix.num_bytes))
        yield memoryview(_as_bytes(stored[:, first + start : first + stop].T.contiguous()))

    def _dequantized_chunks(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield rows of an fp8 weight as bytes of bf16 values."""
        location, columns = self.locations[name], self.info[name].shape[1]
        info, scales_location = self._scales[name]
        scales = _tensor_from_chunks(info, self._tensor_chunks(scales_location, 0, info.num_bytes))
        step = max(1, CHUNK // columns // self.block[0]) * self.block[0]
        for first in range(start, stop, step):
            num_rows = min(step, stop - first)
            raw = bytearray().join(self._tensor_chunks(location, first * columns, num_rows * columns))
            weight = torch.frombuffer(raw, dtype=torch.float8_e4m3fn).view(num_rows, columns)
            yield memoryview(_as_bytes(dequantize(weight, scales, first, self.block)))

    def read_ahead(self) -> None:
        """Let the kernel prefetch the first files (up to READ_AHEAD bytes) into the page cache, in the background."""

        def advise() -> None:
            for path in self.files[: max(1, READ_AHEAD // max(1, self.files[0].stat().st_size))]:
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

        threading.Thread(target=advise, name="read ahead", daemon=True).start()

    def _tensor_chunks(self, location: TensorLocation, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield a byte range of a tensor in chunks of the mapped file, and release the pages that were read."""
        with self._opening:
            if location.path not in self._open:
                with open(location.path, "rb") as file:
                    self._open[location.path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            memory = self._open[location.path]
        start += location.start
        end, view = start + num_bytes, memoryview(memory)
        for low in range(start, end, RESIDENT):
            high = min(low + RESIDENT, end)
            for at in range(low, high, CHUNK):
                yield view[at : min(at + CHUNK, high)]
            first, last = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:  # frees this process's memory; the pages stay in the page cache
                memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _pop_fp8_scales(self, block: tuple[int, int] | None) -> dict[str, tuple[TensorInfo, TensorLocation]]:
        """Remove the scales of fp8 weights from `info`, and return their dtype, shape and location by weight name.
        Raises ModelError for any quantization except block-quantized fp8."""
        quantized = [name for name, location in self.locations.items() if location.dtype not in DTYPES]
        for name in quantized:
            location, shape, scales = self.locations[name], self.info[name].shape, self.info.get(name + SCALE)
            if location.dtype != "F8_E4M3" or scales is None or len(shape) != 2 or block is None:
                refuse_dtype(location, name)
            if scales.shape != scale_shape(shape, block):
                raise ModelError(
                    f"{location.path}: {name + SCALE} has shape {list(scales.shape)}, but a weight of shape "
                    f"{list(shape)} in blocks of {list(block)} needs scales of shape "
                    f"{list(scale_shape(shape, block))}: correct weight_block_size in config.json"
                )
        return {name: (self.info.pop(name + SCALE), self.locations[name + SCALE]) for name in quantized}


def _tensor_from_chunks(info: TensorInfo, pieces: Iterator[memoryview]) -> Tensor:
    """Return a tensor whose bytes are the concatenated pieces."""
    out = torch.empty(info.shape, dtype=info.dtype)
    target, at = memoryview(_as_bytes(out)), 0
    for piece in pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)
    assert at == info.num_bytes, f"read {at} bytes of a tensor, expected {info.num_bytes}"
    return out


def _as_bytes(tensor: Tensor) -> Any:
    """Return a contiguous tensor's memory as a numpy array of bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


# ---- writing ---------------------------------------------------------------------------------------------------------

EXPERT_WEIGHT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stack_expert(tensors: Sequence[tuple[str, Tensor]]) -> Sequence[tuple[str, Tensor]]:
    """Return the Hugging Face tensors of one Megatron parameter as files with stacked experts have them: those of an
    expert are joined and transposed, and named "NAME[I]", the I-th part of the tensor NAME. Inverse of
    `hf_headers.unstack_experts`."""
    match = EXPERT_WEIGHT.fullmatch(tensors[0][0])
    if match is None:
        return tensors
    name = "down_proj" if match[3] == "down" else "gate_up_proj"
    joined = torch.cat([tensor for _, tensor in tensors]).T.contiguous()
    return [(f"{match[1]}.{name}[{match[2]}]", joined)]


def name_in_file(name: str) -> str:
    """Return the name of the file's tensor that contains the planned tensor `name`, which may be a part of it."""
    return name.partition("[")[0]


@dataclass(frozen=True)
class Shard:
    """A planned safetensors file."""

    file: str
    groups: list[list[NamedTensor]]  # tensors that are produced together, in file order

    @property
    def tensors(self) -> list[NamedTensor]:
        """Name, dtype and shape of the file's tensors, in order."""
        return [named for group in self.groups for named in group]

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for _, info in self.tensors)


def plan_shards(groups: Sequence[list[NamedTensor]], shard_bytes: int) -> list[Shard]:
    """Distribute groups of tensors over files, in order. A file has at most `shard_bytes` bytes of tensors, or consists
    of one larger group, or ends with the remaining parts of a stacked tensor (`stack_expert`)."""
    parts: list[list[list[NamedTensor]]] = [[]]
    filled, last = 0, ""
    for group in groups:
        size, name = sum(info.num_bytes for _, info in group), group[0][0]
        continues_stack = name != name_in_file(name) == last
        if parts[-1] and filled + size > shard_bytes and not continues_stack:
            parts.append([])
            filled = 0
        last = name_in_file(name)
        parts[-1].append(group)
        filled += size
    count = len(parts)
    names = (
        [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    )
    return [Shard(name, part) for name, part in zip(names, parts, strict=True)]


class ShardFile(AbstractContextManager["ShardFile", None]):
    """A safetensors file to which the tensors of a shard are written, in any order. Used as a context manager."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._missing: dict[str, tuple[TensorInfo, int]] = {}  # tensors that are not written yet, with their offsets
        end = 0
        for name, info in shard.tensors:
            self._missing[name] = (info, end)
            start, shape, whole = end, list(info.shape), name_in_file(name)
            end += info.num_bytes
            if whole != name:  # a part, which directly follows the part before
                before = entries.get(whole, {"shape": [0], "data_offsets": [start]})
                start, shape = before["data_offsets"][0], [before["shape"][0] + 1, *shape]
            entries[whole] = {"dtype": CODES[info.dtype], "shape": shape, "data_offsets": [start, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the format requires that tensors are aligned
        header = struct.pack("<Q", len(header)) + header
        self._start, self._end = len(header), len(header) + end
        self._digest, self._num_hashed = xxhash.xxh3_128(header), len(header)
        self._file = open(path, "wb")  # noqa: SIM115, closed by __exit__
        self._file.write(header)
        self._written_back = 0  # file position up to which the kernel was told to write to the disk

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        assert exception or not self._missing, f"{self.path.name} lacks the planned tensors {list(self._missing)[:3]}"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the shard, which may be on a GPU."""
        info, offset = self._missing.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), (
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, but the plan of the file has {info}"
        )
        start = self._start + offset
        is_next = start == self._num_hashed
        if self._file.tell() != start:
            self._file.seek(start)
            self._written_back = start
        for chunk in host_chunks(tensor):
            self._file.write(chunk)
            if is_next:
                self._digest.update(chunk)
            self._written_back = write_back(self._file, self._written_back, self._file.tell())
        self._num_hashed += info.num_bytes if is_next else 0

    def hash(self) -> str:
        """Return the xxh3-128 of the closed file. The file is read for this only if its tensors were not written in the
        order of the file."""
        return self._digest.hexdigest() if self._num_hashed == self._end else hash_file(self.path)


def write_shard(path: Path, shard: Shard, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write the safetensors file that `shard` plans, and return its xxh3-128 hash. `tensors` yields (name, tensor), in
    any order."""
    with ShardFile(path, shard) as file:
        for name, tensor in tensors:
            file.write(name, tensor)
    return file.hash()


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """Write `model.safetensors.index.json`, which names the file of every tensor, unless there is only one file."""
    if len(shards) > 1:
        weight_map = {name_in_file(name): shard.file for shard in shards for name, _ in shard.tensors}
        index = {
            "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
