"""The tensors of a torch_dist checkpoint: shares of it written file by file, the index of all, and parameters read one at a time.

Files and metadata are torch.distributed.checkpoint's own, so Megatron loads them at any parallel size. Where a parameter lies in
them is `engines.megatron.stored`'s knowledge; what a share is made of, `plan`'s.

torch's own writer wants every tensor in memory, sums up a CRC that nobody reads (a quarter of the time, measured) and knows nothing
of other processes. So only the frame around a tensor is torch's here, and the bytes inside go straight from file to file.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
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
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from engines.megatron.safe_load import METADATA, read_metadata
from engines.megatron.stored import StoredModel, StoredPiece
from engines.megatron.stored_names import found_in
from stages.convert.plan import Box, Share
from stages.convert.saved_tensor import seen
from storage.errors import ModelError

EMPTY_OBJECT = "extra_state.distcp"  # the file of objects without content
Chunks = Iterable[memoryview]


@dataclass(frozen=True)
class Written:
    """A share as it lies on the disk."""

    xxh3: str  # of the file
    num_bytes: int
    spans: tuple[tuple[int, int], ...]  # of each box: (first byte, length)


# ---- writing ----------------------------------------------------------------------------------------------------------------


def write_boxes(path: Path, share: Share, content: Callable[[Box], Chunks], on_bytes: Callable[[int], object]) -> Written:
    """Write one file.

    Args:
        path: of the file.
        share: what is in it.
        content: the bytes of a box, piece by piece.
        on_bytes: called with the size of every piece.
    """
    spans = []
    with open(path, "wb") as file, _without_crc():
        out = _Spliced(file, on_bytes)
        for box in share.boxes:
            start = out.length
            out.save(box, content(box))
            spans.append((start, out.length - start))
    return Written(out.digest.hexdigest(), out.length, tuple(spans))


class _Spliced:
    """The file that `torch.save` writes a stand-in to: the frame passes, the stand-in's memory, which nobody ever filled, is replaced.

    So a tensor of any size takes no memory: pages that are not touched do not exist.
    """

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], object]) -> None:
        self.file, self.on_bytes = file, on_bytes
        self.digest, self.length = xxhash.xxh3_128(), 0
        self._address = self._came = 0
        self._content: Chunks = ()

    def save(self, box: Box, content: Chunks) -> None:
        stand_in = torch.empty(box.sizes, dtype=box.dtype)
        self._address, self._came, self._content = stand_in.data_ptr(), 0, content
        torch.save(stand_in, self)  # type: ignore[arg-type]
        assert self._came == box.num_bytes, f"{box.key}: {self._came} bytes came, {box.num_bytes} were planned"

    def write(self, data: memoryview) -> int:
        if np.frombuffer(data, dtype=np.uint8).ctypes.data != self._address:
            self._put(data)
            return len(data)
        for piece in self._content:
            self._put(piece)
            self._came += len(piece)
            self.on_bytes(len(piece))
        return len(data)

    def flush(self) -> None:
        """`torch.save` asks for it."""

    def _put(self, data: memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.length += len(data)


@contextmanager
def _without_crc() -> Iterator[None]:
    """Inside, `torch.save` does not read the whole stand-in for a sum that no version of torch looks at. Of this thread only."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_metadata(
    directory: Path, stored: StoredModel, shares: Sequence[tuple[Share, Sequence[tuple[int, int]]]], objects: Sequence[str] = ()
) -> None:
    """Write the file that says where every box lies. The same shares give the same bytes.

    Args:
        directory: of the checkpoint.
        stored: shapes of the stored tensors.
        shares: each with the (first byte, length) of its boxes.
        objects: keys of empty objects. They are all alike, so one stands for all, in a file that is written too.
    """
    shapes = {piece.key: piece.stored_shape for pieces in stored.pieces.values() for piece in pieces}
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for share, spans in shares:
        for box, (start, length) in zip(share.boxes, spans, strict=True):
            offset, sizes = torch.Size(box.offset), torch.Size(box.sizes)
            entry = TensorStorageMetadata(TensorProperties(dtype=box.dtype), torch.Size(shapes[box.key]), [])
            tensors.setdefault(box.key, entry).chunks.append(ChunkStorageMetadata(offset, sizes))
            places[MetadataIndex(box.key, offset)] = _StorageInfo(share.file, start, length)
    if objects:
        torch.save([None], directory / EMPTY_OBJECT)
        place = _StorageInfo(EMPTY_OBJECT, 0, (directory / EMPTY_OBJECT).stat().st_size)
        tensors |= {key: BytesStorageMetadata() for key in objects}
        places |= {MetadataIndex(key): place for key in objects}
    # an empty `storage_meta`: torch's own holds a random number and the path of a directory that may be moved
    metadata = Metadata(tensors, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    with open(directory / METADATA, "wb") as file:
        pickle.dump(metadata, file)


# ---- reading ----------------------------------------------------------------------------------------------------------------


class TorchDistWeights:
    """The parameters of a torch_dist checkpoint, read when asked for, whatever the parallel sizes it was saved at. Threads may share it.

    Args:
        directory: converted model or training checkpoint; optimizer and random state are left alone.
        stored: where the parameters lie; the checkpoint may have them under any of Megatron's names (`stored_names.py`).

    Raises:
        ModelError: no checkpoint, a damaged one, or one of another model.
    """

    def __init__(self, directory: str | Path, stored: StoredModel) -> None:
        self.directory = Path(directory)
        metadata = read_metadata(self.directory)
        self.stored = stored = found_in(stored, metadata.state_dict_metadata)
        self.places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self.tensors = cast(dict[str, Any], metadata.state_dict_metadata)
        for name, pieces in stored.pieces.items():
            for piece in pieces:
                self._check(name, piece)
        # a stored tensor that stacks layers and experts has thousands of boxes: each parameter looks at its own layer's and expert's
        self._spare: list[Tensor] = []
        self._maps: dict[str, mmap.mmap] = {}
        self._opening = threading.Lock()
        self._boxes: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = defaultdict(list)
        num_stacked = {piece.key: len(piece.sizes) - len(piece.part) for pieces in stored.pieces.values() for piece in pieces}
        for key, count in num_stacked.items():
            for box in self.tensors[key].chunks:
                if any(size != 1 for size in box.sizes[:count]):
                    raise ModelError(
                        f"{self.directory}: {key} has several layers or experts in one piece: save it with Megatron's names"
                    )
                self._boxes[key, tuple(box.offsets[:count])].append(box)

    def dtype(self, name: str) -> torch.dtype:
        """Number type of a parameter."""
        return self.tensors[self.stored.pieces[name][0].key].properties.dtype

    @contextmanager
    def lent(self, name: str) -> Iterator[Tensor]:
        """A full parameter, on the CPU, to be read inside the block only. It takes memory only where it lies in several boxes."""
        shape, pieces = self.stored.shape(name), self.stored.pieces[name]
        parts = [(piece, item, self._load(name, item)) for piece in pieces for item in self._items(name, piece)]
        if len(parts) == 1:
            yield parts[0][2].reshape(shape)
        else:
            scratch = self._scratch(math.prod(shape) * self.dtype(name).itemsize)
            full = scratch[: math.prod(shape) * self.dtype(name).itemsize].view(self.dtype(name)).view(shape)
            for piece, item, part in parts:
                boxes = zip(item.dest_offsets, item.lengths, strict=True)
                full[piece.part].view(piece.sizes)[tuple(slice(start, start + length) for start, length in boxes)] = part
            yield full
            self._spare.append(scratch)
        for _, item, _ in parts:
            self._let_go(item)

    def fetch(self, name: str) -> Tensor:
        """A full parameter, on the CPU, to keep."""
        with self.lent(name) as tensor:
            return tensor.clone()

    def _scratch(self, num_bytes: int) -> Tensor:
        """Memory that was used before, if there is enough: the first touch of new memory costs as much as all the rest."""
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = torch.empty(0, dtype=torch.uint8)
        return spare if spare.numel() >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)

    def _items(self, name: str, piece: StoredPiece) -> list[ReadItem]:
        """What must be read for a piece."""
        box = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.sizes))
        stacked = piece.offset[: len(piece.sizes) - len(piece.part)]
        there = dataclasses.replace(self.tensors[piece.key], chunks=self._boxes[piece.key, stacked])
        items = create_read_items_for_chunk_list(piece.key, there, [box])
        if sum(item.lengths.numel() for item in items) != torch.Size(piece.sizes).numel():
            raise ModelError(f"{self.directory}: {piece.key} has holes at {name}: give a checkpoint that was saved to the end")
        return items

    def _load(self, name: str, item: ReadItem) -> Tensor:
        """The part of a written box that an item wants."""
        place = self.places[item.storage_index]
        try:
            box = seen(self._mapped(place.relative_path), place.offset, place.length)
            if box is None:
                with open(self.directory / place.relative_path, "rb") as file:
                    view = cast(IO[bytes], _create_file_view(file, place.offset, place.length))
                    box = cast(Tensor, torch.load(view, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{self.directory}: {name} cannot be read ({type(error).__name__}: {reason}): {place.relative_path} is missing or damaged, "
                "give another checkpoint"
            ) from error
        return narrow_tensor_by_index(box, item.storage_offsets, item.lengths)

    def _mapped(self, file_name: str) -> mmap.mmap:
        with self._opening:
            if file_name not in self._maps:
                with open(self.directory / file_name, "rb") as file:
                    self._maps[file_name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[file_name]

    def _let_go(self, item: ReadItem) -> None:
        """Let a box's pages count as this process's memory no longer."""
        place = self.places[item.storage_index]
        first = -(-place.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (place.offset + place.length) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._mapped(place.relative_path).madvise(mmap.MADV_DONTNEED, first, last - first)

    def _check(self, name: str, piece: StoredPiece) -> None:
        found = self.tensors.get(piece.key)
        if not isinstance(found, TensorStorageMetadata):
            raise ModelError(
                f"{self.directory} has no tensor {piece.key!r}, needed for {name}: it is a checkpoint of another model"
            )
        shape, needed = tuple(found.size), piece.stored_shape
        fits = shape[1:] == needed[1:] and shape[0] >= needed[0] if piece.padded else shape == needed
        if not fits:
            raise ModelError(
                f"{self.directory}: {piece.key} has shape {list(shape)}, config.json needs {list(needed)}: give its own assets"
            )
