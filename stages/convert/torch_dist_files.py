"""The tensors of a torch_dist checkpoint, written and read one at a time.

Files and metadata are torch.distributed.checkpoint's own, so Megatron loads them at any parallel size. Where a parameter lies in
them is `engines.megatron.stored`'s knowledge, what is in it comes from a callback.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from engines.megatron.stored import StoredModel, StoredPiece, describe_checkpoint


def write_tensors(directory: Path, stored: StoredModel, dtypes: dict[str, torch.dtype], resolve: Callable[[str], Tensor]) -> None:
    """Write a checkpoint.

    Args:
        directory: made if it is not there.
        stored: where everything goes.
        dtypes: of every parameter.
        resolve: gives a full parameter by its global name; asked for one after the other, once for each if the pieces of a
            parameter are neighbours.
    """
    planner = _LazySavePlanner(stored, dtypes, resolve)
    writer = dcp.FileSystemWriter(directory, sync_files=False)  # the store syncs what it commits
    dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    describe_checkpoint(directory)


class _LazySavePlanner(DefaultSavePlanner):
    """Plans a checkpoint by names and shapes alone, and makes a tensor when the writer is about to write it."""

    def __init__(self, stored: StoredModel, dtypes: dict[str, torch.dtype], resolve: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.stored, self.dtypes, self.resolve = stored, dtypes, resolve
        self.sources = {(piece.key, piece.offset): (name, piece) for name, pieces in stored.pieces.items() for piece in pieces}
        self.last: tuple[str, Tensor] | None = None  # a parameter in two pieces is made once

    def create_local_plan(self) -> SavePlan:
        items = [_write_object(key, content) for key, content in self.stored.objects.items()]
        items += [_write_piece(piece, self.dtypes[name]) for name, pieces in self.stored.pieces.items() for piece in pieces]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.stored.objects[write_item.index.fqn])
        name, piece = self.sources[write_item.index.fqn, tuple(write_item.index.offset or ())]
        if self.last is None or self.last[0] != name:
            self.last = None  # free it before the next one is made
            self.last = (name, self.resolve(name))
        return self.last[1][piece.part].contiguous().view(piece.sizes)


def _write_object(key: str, content: bytes) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(content)))


def _write_piece(piece: StoredPiece, dtype: torch.dtype) -> WriteItem:
    data = TensorWriteData(_box(piece), TensorProperties(dtype=dtype), torch.Size(piece.stored_shape))
    return WriteItem(MetadataIndex(piece.key, torch.Size(piece.offset)), WriteItemType.SHARD, tensor_data=data)


def _box(piece: StoredPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.sizes))


class TorchDistWeights:
    """The parameters of a torch_dist checkpoint, read when asked for, whatever the parallel sizes it was saved at.

    Args:
        directory: converted model or training checkpoint; optimizer and random state are left alone.
        stored: where the parameters lie.

    Raises:
        ValueError: no checkpoint, or one of another model.
    """

    def __init__(self, directory: str | Path, stored: StoredModel) -> None:
        self.directory, self.stored = Path(directory), stored
        if not (self.directory / ".metadata").is_file():
            raise ValueError(
                f"{directory} is no torch_dist checkpoint (no .metadata): give a checkpoint that was saved to the end"
            )
        self.reader = dcp.FileSystemReader(self.directory)
        metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, Any] = metadata.state_dict_metadata
        for name, pieces in stored.pieces.items():
            for piece in pieces:
                self._check(name, piece)

    def dtype(self, name: str) -> torch.dtype:
        """Number type of a parameter."""
        return self.tensors[self.stored.pieces[name][0].key].properties.dtype

    def fetch(self, name: str) -> Tensor:
        """A full parameter, on the CPU."""
        full = torch.empty(self.stored.shape(name), dtype=self.dtype(name))
        for piece in self.stored.pieces[name]:
            target = full[piece.part].view(piece.sizes)
            items = create_read_items_for_chunk_list(piece.key, self.tensors[piece.key], [_box(piece)])
            assert sum(item.lengths.numel() for item in items) == target.numel(), f"{piece.key} has holes"
            self.reader.read_data(LoadPlan(items), _ReadInto(target)).wait()
        return full

    def _check(self, name: str, piece: StoredPiece) -> None:
        found = self.tensors.get(piece.key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(
                f"{self.directory} has no tensor {piece.key!r}, needed for {name}: it is a checkpoint of another model"
            )
        shape, needed = tuple(found.size), piece.stored_shape
        fits = shape[1:] == needed[1:] and shape[0] >= needed[0] if piece.padded else shape == needed
        if not fits:
            raise ValueError(
                f"{self.directory}: {piece.key} has shape {list(shape)}, config.json needs {list(needed)}: give its own assets"
            )


class _ReadInto(DefaultLoadPlanner):
    """Copies what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        boxes = zip(read_item.dest_offsets, read_item.lengths)
        return self.target[tuple(slice(start, start + length) for start, length in boxes)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return  # it was copied in place
