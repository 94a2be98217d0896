"""Read and write torch_dist checkpoints: files in the format of torch.distributed.checkpoint, and their index.

Reading: one parameter at a time and without copies where possible. `torch.load` copies every tensor into new memory,
which takes three quarters of an export's time (measured). The files that it reads are zip archives of uncompressed
members: a pickle with dtype, shape and strides, and the tensor's bytes. `tensor_view` reads the pickle without
executing code from it, and returns a view of the bytes. Tensors that are not plain and contiguous are still read by
`torch.load`.

Writing: plan which rows of the source make up each slice, write the files, and write their index. `TensorLayout` only
moves whole rows between Hugging Face and Megatron tensors. A plan is therefore made by converting row numbers in place
of weights, and writing copies bytes from file to file. The plan is split into work units of one file each, in the order
of the source, so that disks read sequentially. torch's own writer needs every tensor in memory and does not support
several independent processes.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import struct
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
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

from penstock.engines.families.tensor_rows import TensorLayout
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, ShardSlice
from penstock.engines.megatron.checkpoints.safe_load import METADATA, read_metadata
from penstock.engines.megatron.checkpoints.writer import ArchiveFile
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Target
from penstock.stages.convert.work import WorkRecord, write_files
from penstock.storage.errors import ModelError

UNIT_BYTES = 512 << 20  # small enough that one unit is synced to disk while others are written
EMPTY_OBJECT = "extra_state.distcp"  # the file of the empty `_extra_state` objects
_STRIDE = 1 << 40  # rows of a parameter's source tensor i are numbered from i * _STRIDE on, so numbers are unique
LOCAL_HEADER = 30  # bytes of a zip member's local header, without its name and extra field


class TorchDistWeights:
    """The parameters of a torch_dist checkpoint, read on demand and independent of the parallel sizes it was saved
    with. Thread-safe.

    Args:
        directory: directory of a converted model or training checkpoint; optimizer and RNG states are ignored.
        checkpoint: checkpoint layout of the model; the checkpoint may have local or TransformerEngine names.
    """

    def __init__(self, directory: str | Path, checkpoint: CheckpointLayout) -> None:
        self.directory = Path(directory)
        metadata = read_metadata(self.directory)
        self.checkpoint = checkpoint.adapt_to_stored_keys(metadata.state_dict_metadata)
        self.storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self.tensors = cast(dict[str, Any], metadata.state_dict_metadata)
        for name, pieces in self.checkpoint.slices.items():
            for piece in pieces:
                stored, needed = self.tensors.get(piece.key), piece.stored_shape
                if not isinstance(stored, TensorStorageMetadata):
                    raise ModelError(
                        f"{self.directory} has no tensor {piece.key!r}, which stores the parameter {name}: use a "
                        "checkpoint of this model"
                    )
                shape = tuple(stored.size)
                if not (shape[1:] == needed[1:] and shape[0] >= needed[0] if piece.padded else shape == needed):
                    raise ModelError(
                        f"{self.directory}: {piece.key} has shape {list(shape)}, config.json needs {list(needed)}: use "
                        "the config.json that belongs to this checkpoint"
                    )
        self.meta = {  # parameter name -> full tensor on the meta device: shape and dtype of the parameter
            name: torch.empty(
                self.checkpoint.shape(name), dtype=self.tensors[pieces[0].key].properties.dtype, device="meta"
            )
            for name, pieces in self.checkpoint.slices.items()
        }
        self._spare: list[Tensor] = []
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()
        # a tensor that stacks layers and experts has thousands of chunks: index them by key, layer and expert
        self._chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = defaultdict(list)
        for key, count in {piece.key: piece.num_stacking_axes for piece in self.checkpoint.all_slices()}.items():
            for chunk in self.tensors[key].chunks:
                if any(size != 1 for size in chunk.sizes[:count]):
                    raise ModelError(
                        f"{self.directory}: a chunk of {key} spans several layers or experts, but Penstock needs one "
                        "chunk per layer and expert: save the checkpoint with Megatron-core"
                    )
                self._chunks[key, tuple(chunk.offsets[:count])].append(chunk)

    @contextmanager
    def open_parameter(self, name: str) -> Iterator[Tensor]:
        """Yield a full parameter on the CPU, valid inside the `with` block only. A parameter of one chunk is a view of
        the mapped file; several chunks are copied into a buffer, which later calls reuse."""
        full, pieces = self.meta[name], self.checkpoint.slices[name]
        parts = [
            (piece, item, self._read_part(name, item)) for piece in pieces for item in self._read_items(name, piece)
        ]
        if len(parts) == 1:
            yield parts[0][2].reshape(full.shape)
        else:
            try:  # page faults of new memory would take as long as the rest of the read
                buffer = self._spare.pop()
            except IndexError:
                buffer = torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < full.nbytes:
                buffer = torch.empty(full.nbytes, dtype=torch.uint8)
            full = buffer[: full.nbytes].view(full.dtype).view(full.shape)
            for piece, item, part in parts:
                spans = zip(item.dest_offsets, item.lengths, strict=True)
                index = tuple(slice(start, start + length) for start, length in spans)
                full[piece.part].view(piece.sizes)[index] = part
            yield full
            self._spare.append(buffer)
        for _, item, _ in parts:  # remove the pages of the chunks from this process's memory
            info = self.storage[item.storage_index]
            first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (info.offset + info.length) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._memory_map(info.relative_path).madvise(mmap.MADV_DONTNEED, first, last - first)

    def fetch(self, name: str) -> Tensor:
        """Return a copy of a full parameter, on the CPU."""
        with self.open_parameter(name) as tensor:
            return tensor.clone()

    def _read_items(self, name: str, piece: ShardSlice) -> list[ReadItem]:
        """Return the read items (torch's term: parts of stored chunks) that a slice consists of."""
        chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.sizes))
        stacked = piece.offset[: piece.num_stacking_axes]
        stored = replace(self.tensors[piece.key], chunks=self._chunks[piece.key, stacked])
        items = create_read_items_for_chunk_list(piece.key, stored, [chunk])
        if sum(item.lengths.numel() for item in items) != torch.Size(piece.sizes).numel():
            raise ModelError(
                f"{self.directory}: the chunks of {piece.key} do not cover the parameter {name}: use a "
                "completely saved checkpoint"
            )
        return items

    def _read_part(self, name: str, item: ReadItem) -> Tensor:
        """Return the part of a stored chunk that a read item describes."""
        info = self.storage[item.storage_index]
        try:
            path, memory = self.directory / info.relative_path, self._memory_map(info.relative_path)
            chunk = tensor_view(path, memory, info.offset, info.length)
            if chunk is None:
                with open(path, "rb") as file:
                    view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    chunk = cast(Tensor, torch.load(view, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{self.directory}: {name} cannot be read ({type(error).__name__}: {reason}): {info.relative_path} is "
                "missing or damaged; use another checkpoint"
            ) from error
        return narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)

    def _memory_map(self, file_name: str) -> mmap.mmap:
        with self._lock:
            if file_name not in self._maps:
                with open(self.directory / file_name, "rb") as file:
                    self._maps[file_name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[file_name]


def tensor_view(path: Path, memory: mmap.mmap, start: int, length: int) -> Tensor | None:
    """Return a view of a tensor that `torch.save` wrote into a byte range of a file; None if the range needs
    `torch.load`. `memory`, the map of the file, is private, so that writing to the tensor does not change the file."""
    try:
        # zipfile finds an archive at the end of a file, after any other bytes: a second map ends with the range
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), start + length, access=mmap.ACCESS_READ) as up_to_end,
            zipfile.ZipFile(cast(IO[bytes], up_to_end)) as archive,
        ):
            pickled = next(member for member in archive.infolist() if member.filename.endswith("/data.pkl"))
            at = _content_offset(memory, pickled)
            saved = _TensorUnpickler(io.BytesIO(memory[at : at + pickled.file_size])).load()
            member = archive.getinfo(f"{pickled.filename.removesuffix('data.pkl')}data/{saved.storage}")
    except Exception:  # a damaged archive may raise anything; `torch.load` reports it
        return None
    count = math.prod(saved.size)
    contiguous = tuple(math.prod(saved.size[axis + 1 :]) for axis in range(len(saved.size)))
    plain = saved.offset == 0 and saved.stride == contiguous and member.compress_type == zipfile.ZIP_STORED
    if not plain or count == 0 or member.file_size != count * saved.dtype.itemsize:
        return None
    at = _content_offset(memory, member)
    return torch.frombuffer(memory, dtype=saved.dtype, count=count, offset=at).view(saved.size)


def _content_offset(memory: mmap.mmap, member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's content in the file. (`ZipFile.read` would check a CRC, which may be absent.)"""
    header = member.header_offset
    name_length, extra_length = struct.unpack("<HH", memory[header + 26 : header + LOCAL_HEADER])
    return header + LOCAL_HEADER + name_length + extra_length


class _SavedTensor:
    """Description of a saved tensor; replaces `torch._utils._rebuild_tensor_v2` when its pickle is read."""

    def __init__(
        self, storage: tuple[Any, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> None:
        self.storage, self.dtype = storage
        self.offset, self.size, self.stride = offset, size, stride


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of a saved tensor. It accepts only the three kinds of names that a plain tensor needs and calls
    none of the functions that they name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _SavedTensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # holds backward hooks; always empty
        if module == "torch":  # FloatStorage, ...
            dtype = getattr(torch, name.removesuffix("Storage").lower(), None)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which a plain tensor does not need")

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        _, dtype, key, _, _ = pid
        return key, dtype


# ---- plan of a conversion --------------------------------------------------------------------------------------------


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


def plan_units(
    layout: TensorLayout, checkpoint: CheckpointLayout, weights: HFWeights, unit_bytes: int
) -> list[WorkUnit]:
    """Plan the work units of a conversion from names, shapes and locations of the source's tensors. Deterministic:
    every process plans the same units for the same source."""
    files = {path: index for index, path in enumerate(weights.files)}
    placed: list[tuple[tuple[int, int], Slice]] = []  # ((file, offset) of the slice's last rows in the source, slice)
    source_rows: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for name, pieces in checkpoint.slices.items():
        sources, shape = layout.hf_names_of(name), checkpoint.shape(name)
        shapes = tuple(weights.info[source].shape for source in sources)
        kind = (re.sub(r"\d+", "#", name), shapes)  # equal for all layers and experts with the same shapes
        if kind not in source_rows:
            source_rows[kind] = _find_source_rows(layout, name, sources, shapes)
        for piece in pieces:
            columns = [(part.start, part.stop) for part in piece.part[1:]]
            assert columns == [(0, size) for size in shape[1:]], (
                f"{piece.key} is split by columns, but only splits by rows are supported"
            )
            rows, last, at = [], (0, 0), 0  # `at`: first row of a run in the parameter
            for index, start, stop in source_rows[kind]:
                low, high = max(piece.part[0].start - at, 0), min(piece.part[0].stop - at, stop - start)
                at += stop - start
                if low < high:
                    run = RowRange(sources[index], start + low, start + high)
                    location, row_bytes = weights.locations[run.name], weights.info[run.name].row_bytes
                    last = max(last, (files[location.path], location.start + run.stop * row_bytes))
                    rows.append(run)
            dtype = weights.info[sources[0]].dtype
            placed.append((last, Slice(piece.key, piece.offset, piece.sizes, dtype, tuple(rows))))
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


def _find_source_rows(
    layout: TensorLayout, name: str, sources: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive source rows that the Megatron parameter `name` is joined from, in order, as (index
    of the source tensor, first row, end row)."""

    def row_numbers(source: str) -> Tensor:
        """Return a stand-in for a source tensor, filled with its row numbers, which are unique over all sources. A
        matrix gets two different columns, so that a layout that moves parts of rows is found."""
        index = sources.index(source)
        rows = torch.arange(shapes[index][0], dtype=torch.int64) + index * _STRIDE
        return rows if len(shapes[index]) == 1 else torch.stack([2 * rows, 2 * rows + 1], dim=1)

    rows = layout.to_megatron(name, row_numbers)
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


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_unit(
    target: Target, unit: WorkUnit, content: Callable[[Slice], Iterable[memoryview]], on_bytes: Callable[[int], object]
) -> WorkRecord:
    """Write one file of a checkpoint into a target. `content` yields the bytes of a slice; `on_bytes` is called with
    the number of written bytes. Return the work record: the file, and (first byte, length) of each slice in it."""
    spans: list[tuple[int, int]] = []

    def write(directory: Path) -> dict[str, str]:
        with open(directory / unit.file, "wb") as file:
            out = ArchiveFile(file, on_bytes)
            for piece in unit.slices:
                start = out.length
                out.save(piece.sizes, piece.dtype, content(piece))
                spans.append((start, out.length - start))
        return {unit.file: out.digest.hexdigest()}

    return WorkRecord(files=tuple(write_files(target, write)), spans=tuple(spans))


def write_metadata(
    directory: Path,
    checkpoint: CheckpointLayout,
    units: Sequence[tuple[WorkUnit, Sequence[tuple[int, int]]]],
    objects: Sequence[str],
) -> None:
    """Write the index (`.metadata`) of a checkpoint's slices. Deterministic: equal units give equal bytes.

    Args:
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
    # `storage_meta` stays empty: torch would write a random number and the directory's path, which may change later
    metadata = Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    with open(directory / METADATA, "wb") as file:
        pickle.dump(metadata, file)
