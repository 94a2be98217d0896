"""Write the files of torch_dist checkpoints at the speed of the disk: in parallel, from the tensors' own memory or from
pinned buffers, and hashed while they are written.

The files have the format of torch.distributed.checkpoint: one archive of `torch.save` for each tensor. torch's own
writer computes a CRC that no reader checks, copies tensors on a GPU through unpinned memory, and copies every tensor
that does not fill its storage. Here torch writes only the archive around a tensor, not its bytes.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.engines.megatron.host_memory import NUM_THREADS, host_chunks
from penstock.storage.disk import map_in_threads, write_back


class ParallelWriter(dcp.FileSystemWriter):
    """torch's writer of a checkpoint directory, except that NUM_THREADS threads write and sync this rank's files.
    Weights and optimizer states are in separate files. `hashes`: file name -> xxh3-128."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self.hashes: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all tensors and objects of this rank."""
        weights: list[WriteItem] = []
        others: list[WriteItem] = []
        for item in plan.items:
            (weights if item.tensor_data and is_weight(item.index.fqn) else others).append(item)
        parts = [part for group in (others, weights) for part in _split_evenly(group, NUM_THREADS)]
        files = [(f"{plan.storage_data.prefix}{index}.distcp", items) for index, items in enumerate(parts)]
        written = map_in_threads(lambda file: self._write_file(*file, planner), files, NUM_THREADS)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        with open(Path(self.path) / name, "wb") as file:
            out = ArchiveFile(file)
            for item in items:
                data, start = planner.resolve_data(item), out.length
                if isinstance(data, torch.Tensor):
                    out.save(data.shape, data.dtype, host_chunks(data))
                else:
                    out.write(data.getbuffer())
                length = out.length - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        self.hashes[name] = out.digest.hexdigest()
        return results


def is_weight(key: str) -> bool:
    """Return whether the tensor with this key in a checkpoint is a weight of the model, not optimizer state."""
    return not key.startswith("optimizer.")


class ArchiveFile:
    """A file of archives of `torch.save`, one for each tensor, with the hash of the file. `torch.save` is called with
    an uninitialized placeholder; when it writes the placeholder's bytes, the tensor's content is written instead, and
    everything else is written unchanged. The placeholder's pages are never touched and therefore never allocated.
    `on_bytes` is called with the size of each written chunk of content."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], object] = lambda num_bytes: None) -> None:
        self.file, self.on_bytes = file, on_bytes
        self.digest, self.length = xxhash.xxh3_128(), 0
        self._written_back = 0  # number of bytes that the kernel was asked to write to the disk (`write_back`)
        self._address = self._num_written = 0
        self._content: Iterable[memoryview] = ()

    def save(self, sizes: Sequence[int], dtype: torch.dtype, content: Iterable[memoryview]) -> None:
        """Append a tensor of this shape and dtype, whose bytes are the concatenated chunks of `content`."""
        # Computing a CRC, which no version of torch checks, would read the placeholder. The setting is that of this
        # thread (before torch 2.12: of all threads).
        torch.serialization.set_crc32_options(False)
        placeholder = torch.empty(sizes, dtype=dtype)
        self._address, self._num_written, self._content = placeholder.data_ptr(), 0, content
        try:
            torch.save(placeholder, self)  # type: ignore[arg-type]
        except RuntimeError as error:  # raised by torch's writer when `content` or `file` raised an error
            raise error.__context__ or error from None
        assert self._num_written == placeholder.nbytes, (
            f"wrote {self._num_written} bytes of a tensor {list(sizes)} {dtype}, expected {placeholder.nbytes}"
        )
        self._address = 0

    def write(self, data: memoryview) -> int:
        """Append bytes; if they are those of the placeholder, append the tensor's content instead."""
        if not self._address or np.frombuffer(data, dtype=np.uint8).ctypes.data != self._address:
            self._append(data)
            return len(data)
        for chunk in self._content:
            self._append(chunk)
            self._num_written += len(chunk)
            self.on_bytes(len(chunk))
        return len(data)

    def flush(self) -> None:
        """Do nothing. `torch.save` calls this method."""

    def _append(self, data: memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.length += len(data)
        self._written_back = write_back(self.file, self._written_back, self.length)


def _split_evenly(items: Sequence[WriteItem], num_parts: int) -> list[list[WriteItem]]:
    """Distribute items over at most `num_parts` parts of nearly equal size in bytes. Deterministic."""

    def num_bytes(item: WriteItem) -> int:
        if item.type == WriteItemType.BYTE_IO:
            return 0
        data: Any = item.tensor_data
        return data.chunk.sizes.numel() * data.properties.dtype.itemsize

    parts: list[list[WriteItem]] = [[] for _ in range(num_parts)]
    heap = [(0, index) for index in range(num_parts)]
    for item in sorted(items, key=num_bytes, reverse=True):
        size, index = heap[0]
        parts[index].append(item)
        heapq.heapreplace(heap, (size + num_bytes(item), index))
    return [part for part in parts if part]
