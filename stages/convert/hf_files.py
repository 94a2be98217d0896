"""The weights of Hugging Face directories, read row by row.

The safetensors format is a JSON header (name -> dtype, shape, place) and raw bytes, so shapes cost no reading, and rows are read
where they lie. Weights that are quantised in fp8 blocks are bf16 to everybody else. Which names there are is for `storage.layouts`,
writing is `hf_writer`'s, what lies beside the weights `hf_assets`'.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from stages.convert.fp8 import dequantise, scale_shape
from stages.convert.headers import Place, block_size, stored_tensors, weight_files
from stages.convert.source_check import SCALE
from storage.errors import ModelError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
CHUNK = 1 << 20  # bytes in a piece: one that is hashed and written stays in the core's cache
AHEAD = 2 << 30  # bytes that the disk is asked for in advance
HELD = 16 << 20  # bytes of a file that stay mapped behind a reader


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one index of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class HFWeights:
    """The weights of a Hugging Face directory, read when asked for. Threads may share it. A context manager: files stay open inside.

    Args:
        directory: with config.json.
        files: to read; by default those of the model.

    Raises:
        ModelError: no safetensors, a damaged file, or numbers that Penstock does not read.
    """

    def __init__(self, directory: str | Path, files: list[Path] | None = None) -> None:
        self.directory = Path(directory)
        block = block_size(self.directory)
        self.block = block or (1, 1)
        self.files = weight_files(self.directory) if files is None else files
        stored = stored_tensors(self.directory, self.files)
        self.places = {name: tensor.place for name, tensor in stored.items()}
        self.info = {  # as others see it: bf16 where fp8 is stored, without the scales
            name: TensorInfo(DTYPES.get(tensor.place.dtype, torch.bfloat16), tensor.shape) for name, tensor in stored.items()
        }
        self._scales = self._take_scales(block)
        self._open: dict[Path, mmap.mmap] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()  # a map lives as long as somebody looks at a piece of it

    @property
    def is_quantised(self) -> bool:
        """Whether some of it is stored in fp8."""
        return bool(self._scales)

    def fetch(self, name: str, num_rows: int | None = None) -> Tensor:
        """Return one tensor, or its first rows."""
        info = self.info[name]
        if num_rows is None or not info.shape:
            return _filled(info, self.rows(name))
        return _filled(TensorInfo(info.dtype, (num_rows, *info.shape[1:])), self.rows(name, 0, num_rows))

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """The bytes of the rows `start` to `stop` (default: all), piece by piece."""
        info, place = self.info[name], self.places[name]
        if not info.shape:
            return self._bytes(place, 0, info.num_bytes)
        stop = info.shape[0] if stop is None else stop
        if name not in self._scales:
            return self._bytes(place, start * info.row_bytes, (stop - start) * info.row_bytes)
        return self._dequantised(name, start, stop)

    def _dequantised(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        place, columns = self.places[name], self.info[name].shape[1]
        info, scales_place = self._scales[name]
        scales = _filled(info, self._bytes(scales_place, 0, info.num_bytes))
        step = max(1, CHUNK // columns // self.block[0]) * self.block[0]
        for first in range(start, stop, step):
            num_rows = min(step, stop - first)
            raw = bytearray().join(self._bytes(place, first * columns, num_rows * columns))
            weight = torch.frombuffer(raw, dtype=torch.float8_e4m3fn).view(num_rows, columns)
            yield memoryview(_as_bytes(dequantise(weight, scales, first, self.block)))

    def read_ahead(self) -> None:
        """Let the disk begin with the first files while something else is done."""

        def ask() -> None:
            for path in self.files[: max(1, AHEAD // max(1, self.files[0].stat().st_size))]:
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

        threading.Thread(target=ask, name="read ahead", daemon=True).start()

    def hash(self, path: Path) -> str:
        """xxh3-128 of a weight file, hex; as `storage.disk.hash_file`, without a copy."""
        digest = xxhash.xxh3_128()
        for piece in self._stretch(path, 0, path.stat().st_size):
            digest.update(piece)
        return digest.hexdigest()

    def _bytes(self, place: Place, start: int, num_bytes: int) -> Iterator[memoryview]:
        """A stretch of a tensor's stored bytes."""
        return self._stretch(place.path, place.start + start, num_bytes)

    def _stretch(self, path: Path, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Pieces of a file, as it lies in memory already: nothing is copied, and what was read is let go of."""
        memory, end = self._mapped(path), start + num_bytes
        view = memoryview(memory)
        for low in range(start, end, HELD):
            high = min(low + HELD, end)
            for at in range(low, high, CHUNK):
                yield view[at : min(at + CHUNK, high)]
            first, last = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:  # of this process's memory only: who reads it again finds it in the page cache
                memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _mapped(self, path: Path) -> mmap.mmap:
        with self._opening:
            if path not in self._open:
                with open(path, "rb") as file:
                    self._open[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            return self._open[path]

    def _take_scales(self, block: tuple[int, int] | None) -> dict[str, tuple[TensorInfo, Place]]:
        """Make quantised weights and their scales one thing: weight -> its scales. Refuse what is stored in any other way."""
        quantised = [name for name, place in self.places.items() if place.dtype not in DTYPES]
        for name in quantised:
            path, shape, scales = self.places[name].path, self.info[name].shape, self.info.get(name + SCALE)
            if self.places[name].dtype != "F8_E4M3" or scales is None or len(shape) != 2 or block is None:
                raise ModelError(
                    f"{path}: {name} is stored as {self.places[name].dtype}, needed {', '.join(DTYPES)}, or F8_E4M3 in blocks (with "
                    f"{name + SCALE}, and weight_block_size in config.json): use an unquantised checkpoint"
                )
            if scales.shape != scale_shape(shape, block):
                raise ModelError(
                    f"{path}: {name + SCALE} has shape {list(scales.shape)}, but {list(shape)} in blocks of {list(block)} needs "
                    f"{list(scale_shape(shape, block))}: correct weight_block_size in config.json"
                )
        return {name: (self.info.pop(name + SCALE), self.places[name + SCALE]) for name in quantised}


def _filled(info: TensorInfo, pieces: Iterator[memoryview]) -> Tensor:
    out = torch.empty(info.shape, dtype=info.dtype)
    target, at = memoryview(_as_bytes(out)), 0
    for piece in pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)
    assert at == info.num_bytes, f"{at} bytes came for {info}"
    return out


def _as_bytes(tensor: Tensor) -> Any:
    """[bytes] a contiguous tensor's memory, as numpy has it."""
    return tensor.view(-1).view(torch.uint8).numpy()
