"""Write torch_dist checkpoints: plan which rows of the source make up each slice, write the files, and write their
index.

`TensorLayout`, which maps Hugging Face to Megatron tensors, only moves whole rows. A plan is therefore made by
converting row numbers in place of weights, and writing copies bytes from file to file. The plan is split into work
units of one file each, in the order of the source, so that disks read sequentially.

Files and index have the format of torch.distributed.checkpoint, so Megatron loads them with any parallel sizes. torch's
own writer needs every tensor in memory and does not support several independent processes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.engines.families.tensor_rows import TensorLayout
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout
from penstock.engines.megatron.checkpoints.safe_load import METADATA
from penstock.engines.megatron.checkpoints.writer import ArchiveFile, disable_crc
from penstock.stages.convert.hf_checkpoint import HFWeights, TensorInfo
from penstock.stages.convert.targets import Target
from penstock.stages.convert.work import WorkRecord, write_files

UNIT_BYTES = 512 << 20  # so small that a unit is synced to disk while others are written
EMPTY_OBJECT = "extra_state.distcp"  # the file of the empty `_extra_state` objects
_STRIDE = 1 << 40  # offset between the row numbers of two source tensors of a parameter


@dataclass(frozen=True)
class RowRange:
    """The rows [start, stop) of a Hugging Face tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slice:
    """A slice of a checkpoint tensor, and the rows of the Hugging Face tensors that are written to it."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[RowRange, ...] = ()

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WorkUnit:
    """A work item: one file of the checkpoint, written by one thread."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        return f"share-{self.index:05d}"  # name of its record in the store

    @property
    def file(self) -> str:
        """File name in the pattern that Megatron and torch use for the files of a rank."""
        return f"__{self.index}_0.distcp"

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)


# ---- planning --------------------------------------------------------------------------------------------------------


def plan_units(
    layout: TensorLayout, checkpoint: CheckpointLayout, weights: HFWeights, unit_bytes: int = UNIT_BYTES
) -> list[WorkUnit]:
    """Plan the work units of a conversion. Deterministic: every process plans the same units for the same source.

    Args:
        layout: mapping between the model's Hugging Face and Megatron tensors.
        checkpoint: checkpoint layout of the result.
        weights: weights of the source, of which only names, shapes and locations are used.
        unit_bytes: maximum size of a unit in bytes; a unit of a single slice may be larger.
    """
    runs = _RunFinder(layout, weights.info)
    placed: list[tuple[tuple[int, int], Slice]] = []
    for name, pieces in checkpoint.slices.items():
        dtype, shape = weights.info[layout.hf_names_of(name)[0]].dtype, checkpoint.shape(name)
        whole = runs.find_source_rows(name)
        for piece in pieces:
            columns = [(part.start, part.stop) for part in piece.part[1:]]
            assert columns == [(0, size) for size in shape[1:]], (
                f"{piece.key} is split by columns, but only splits by rows are supported"
            )
            rows = _slice_source_ranges(whole, piece.part[0].start, piece.part[0].stop)
            placed.append(
                (last_source_position(weights, rows), Slice(piece.key, piece.offset, piece.sizes, dtype, rows))
            )
    placed.sort(key=lambda entry: (entry[0], entry[1].key, entry[1].offset))
    return group_units([piece for _, piece in placed], unit_bytes)


def group_units(slices: Iterable[Slice], unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Group slices, in order, into units of at most `unit_bytes` bytes. A unit of a single slice may be larger."""
    groups: list[list[Slice]] = [[]]
    filled = 0
    for piece in slices:
        if groups[-1] and filled + piece.num_bytes > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.num_bytes
    return [WorkUnit(index, tuple(group)) for index, group in enumerate(groups)]


def last_source_position(weights: HFWeights, rows: tuple[RowRange, ...]) -> tuple[int, int]:
    """Return (index of the file, end offset in the file) of the rows that come last in the source."""
    files = {path: index for index, path in enumerate(weights.files)}
    ends = [(weights.locations[run.name], run.stop * weights.info[run.name].row_bytes) for run in rows]
    return max(((files[location.path], location.start + end) for location, end in ends), default=(0, 0))


class _RunFinder:
    """Finds the source rows that a parameter is joined from. Results are cached for all layers and experts with the
    same shapes."""

    def __init__(self, layout: TensorLayout, info: dict[str, TensorInfo]) -> None:
        self.layout, self.info = layout, info
        self._known: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}

    def find_source_rows(self, name: str) -> tuple[RowRange, ...]:
        """Return the source rows that the Megatron parameter `name` is joined from, in order."""
        sources = self.layout.hf_names_of(name)
        shapes = tuple(self.info[source].shape for source in sources)
        kind = (re.sub(r"\d+", "#", name), shapes)
        if kind not in self._known:
            self._known[kind] = self._find_consecutive_rows(name, dict(zip(sources, shapes, strict=True)))
        return tuple(RowRange(sources[source], start, stop) for source, start, stop in self._known[kind])

    def _find_consecutive_rows(self, name: str, shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, int, int]]:
        """Return the runs of consecutive source rows as (index of the source tensor, first row, end row)."""
        sources = list(shapes)

        def row_numbers(source: str) -> Tensor:
            """Return the row numbers of a source tensor. Two columns stand for all columns, to check that whole rows
            are moved."""
            rows = torch.arange(shapes[source][0], dtype=torch.int64) + sources.index(source) * _STRIDE
            return rows if len(shapes[source]) == 1 else torch.stack([2 * rows, 2 * rows + 1], dim=1)

        rows = self.layout.to_megatron(name, row_numbers)
        if rows.ndim > 1:
            joined, rows = rows, rows[:, 0] // 2
            moves_rows = torch.equal(joined, torch.stack([2 * rows, 2 * rows + 1], dim=1))
            assert moves_rows, f"{sources}: `TensorLayout` must only move whole rows"
        starts = [0, *(torch.nonzero(rows[1:] != rows[:-1] + 1).flatten() + 1).tolist(), len(rows)]
        first = [int(rows[at]) for at in starts[:-1]]
        return [
            (row // _STRIDE, row % _STRIDE, row % _STRIDE + end - start)
            for row, start, end in zip(first, starts, starts[1:], strict=False)
        ]


def _slice_source_ranges(source_ranges: tuple[RowRange, ...], start_row: int, stop_row: int) -> tuple[RowRange, ...]:
    """Return the source rows of the rows [start_row, stop_row) of a parameter whose source rows are `source_ranges`."""
    out, at = [], 0
    for rows in source_ranges:
        low, high = max(start_row - at, 0), min(stop_row - at, rows.stop - rows.start)
        if low < high:
            out.append(RowRange(rows.name, rows.start + low, rows.start + high))
        at += rows.stop - rows.start
    return tuple(out)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_unit(
    target: Target, unit: WorkUnit, content: Callable[[Slice], Iterable[memoryview]], on_bytes: Callable[[int], object]
) -> WorkRecord:
    """Write one file of a checkpoint into a target.

    Returns:
        the work record: the file, and the (first byte, length) in the file of each slice.
    """
    hashes: dict[str, str] = {}
    spans: list[tuple[int, int]] = []

    def write(directory: Path) -> None:
        disable_crc()
        with open(directory / unit.file, "wb") as file:
            out = ArchiveFile(file, on_bytes)
            for piece in unit.slices:
                start = out.length
                out.save(piece.sizes, piece.dtype, content(piece))
                spans.append((start, out.length - start))
        hashes[unit.file] = out.digest.hexdigest()

    files = write_files(target, write, lambda: hashes)
    return WorkRecord(files=tuple(files), spans=tuple(spans))


def write_metadata(
    directory: Path,
    checkpoint: CheckpointLayout,
    units: Sequence[tuple[WorkUnit, Sequence[tuple[int, int]]]],
    objects: Sequence[str] = (),
) -> None:
    """Write the index (`.metadata`) of a checkpoint's slices. Deterministic: equal units give equal bytes.

    Args:
        directory: directory of the checkpoint.
        checkpoint: checkpoint layout, with the shapes of the tensors.
        units: work units, each with the (first byte, length) of its slices.
        objects: keys of the empty `_extra_state` objects that Megatron's loader expects; all share one stored object.
    """
    shapes = {piece.key: piece.stored_shape for piece in checkpoint.all_slices()}
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for unit, spans in units:
        for piece, (start, length) in zip(unit.slices, spans, strict=True):
            offset, sizes = torch.Size(piece.offset), torch.Size(piece.sizes)
            entry = TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(shapes[piece.key]), [])
            tensors.setdefault(piece.key, entry).chunks.append(ChunkStorageMetadata(offset, sizes))
            storage[MetadataIndex(piece.key, offset)] = _StorageInfo(unit.file, start, length)
    if objects:
        torch.save([None], directory / EMPTY_OBJECT)
        info = _StorageInfo(EMPTY_OBJECT, 0, (directory / EMPTY_OBJECT).stat().st_size)
        tensors |= {key: BytesStorageMetadata() for key in objects}
        storage |= {MetadataIndex(key): info for key in objects}
    # an empty `storage_meta`: torch's has a random number and the directory's path, which may change later
    metadata = Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    with open(directory / METADATA, "wb") as file:
        pickle.dump(metadata, file)
