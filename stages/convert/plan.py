"""What is to be written, and from where: every box of the checkpoint as a list of row ranges of Hugging Face tensors.

Layouts only move whole rows. So a plan is found with row numbers in place of weights, and carrying it out is copying bytes. It is cut
into shares, one file each, in the order of the source, so that disks read forwards; a share is what a process writes at a time and
what a conversion that was killed need not write again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.megatron.stored import StoredModel, StoredPiece
from stages.convert.hf_files import HFWeights, TensorInfo
from storage.layouts.ops import Layout

SHARE_BYTES = 512 << 20  # each is synced when it is done, while others are written
_STRIDE = 1 << 40  # row numbers of a parameter's second source begin here, and so on


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a Hugging Face tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Box:
    """A stored tensor's piece: what Megatron calls it, and which rows make it."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[Rows, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Share:
    """One file of the checkpoint."""

    index: int
    boxes: tuple[Box, ...]

    @property
    def file(self) -> str:
        """As Megatron and torch name what a rank has written."""
        return f"__{self.index}_0.distcp"

    @property
    def num_bytes(self) -> int:
        return sum(box.num_bytes for box in self.boxes)


def plan_shares(layout: Layout, stored: StoredModel, weights: HFWeights, share_bytes: int = SHARE_BYTES) -> list[Share]:
    """Plan a conversion. The same source gives the same shares, whoever writes them.

    Args:
        layout: names on both sides.
        stored: where the checkpoint has them.
        weights: only names, shapes and places are used.
        share_bytes: a share holds at most this much, or one box.
    """
    runs = _RunFinder(layout, weights.info)
    found: list[tuple[tuple[int, int], Box]] = []
    for name, pieces in stored.pieces.items():
        dtype, whole = weights.info[layout.hf_of(name)[0]].dtype, runs.of(name)
        for piece in pieces:
            rows = _cut(whole, *_rows_of(piece, stored.shape(name)))
            found.append((_place(weights, rows), Box(piece.key, piece.offset, piece.sizes, dtype, rows)))
    found.sort(key=lambda entry: (entry[0], entry[1].key, entry[1].offset))
    shares: list[list[Box]] = [[]]
    filled = 0
    for _, box in found:
        if shares[-1] and filled + box.num_bytes > share_bytes:
            shares.append([])
            filled = 0
        shares[-1].append(box)
        filled += box.num_bytes
    return [Share(index, tuple(boxes)) for index, boxes in enumerate(shares)]


def _rows_of(piece: StoredPiece, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows of the parameter that a piece holds; of all other axes it holds everything."""
    assert all((part.start, part.stop) == (0, size) for part, size in zip(piece.part[1:], shape[1:])), (
        f"{piece.key} is cut by columns"
    )
    return piece.part[0].start, piece.part[0].stop


def _place(weights: HFWeights, rows: tuple[Rows, ...]) -> tuple[int, int]:
    """Where the last of the rows stand: (number of the file, byte)."""
    files = {path: index for index, path in enumerate(weights.files)}
    places = [(weights.places[run.name], run.stop * weights.info[run.name].row_bytes) for run in rows]
    return max(((files[place.path], place.start + end) for place, end in places), default=(0, 0))


class _RunFinder:
    """Which rows a joined parameter is made of. Parameters that differ in layer and expert alone are made alike: found once."""

    def __init__(self, layout: Layout, info: dict[str, TensorInfo]) -> None:
        self.layout, self.info = layout, info
        self._known: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}

    def of(self, name: str) -> tuple[Rows, ...]:
        """The rows of the parameter of this Megatron name, in order."""
        sources = self.layout.hf_of(name)
        shapes = tuple(self.info[source].shape for source in sources)
        kind = (re.sub(r"\d+", "#", name), shapes)
        if kind not in self._known:
            self._known[kind] = _runs(_row_numbers(shapes, lambda fetch: self.layout.to_megatron(name, fetch), sources))
        return tuple(Rows(sources[source], start, stop) for source, start, stop in self._known[kind])


def _row_numbers(
    shapes: tuple[tuple[int, ...], ...], join: Callable[[Callable[[str], Tensor]], Tensor], sources: tuple[str, ...]
) -> Tensor:
    """[rows] of the joined parameter: source x _STRIDE + row. Two columns stand for all, and show whether whole rows were moved."""

    def numbered(name: str) -> Tensor:
        source = sources.index(name)
        rows = torch.arange(shapes[source][0], dtype=torch.int64) + source * _STRIDE
        return rows if len(shapes[source]) == 1 else torch.stack([2 * rows, 2 * rows + 1], dim=1)

    joined = join(numbered)
    if joined.ndim == 1:
        return joined
    rows = joined[:, 0] // 2
    assert torch.equal(joined, torch.stack([2 * rows, 2 * rows + 1], dim=1)), f"{sources}: the layout moves more than rows"
    return rows


def _runs(rows: Tensor) -> list[tuple[int, int, int]]:
    """Row numbers as (source, first row, row after the last)."""
    starts = [0, *(torch.nonzero(rows[1:] != rows[:-1] + 1).flatten() + 1).tolist(), len(rows)]
    first = [int(rows[at]) for at in starts[:-1]]
    return [
        (row // _STRIDE, row % _STRIDE, row % _STRIDE + end - start)
        for row, start, end in zip(first, starts, starts[1:], strict=False)
    ]


def _cut(runs: tuple[Rows, ...], start: int, stop: int) -> tuple[Rows, ...]:
    """The runs of the joined rows `start` to `stop`."""
    out, at = [], 0
    for run in runs:
        low, high = max(start - at, 0), min(stop - at, run.stop - run.start)
        if low < high:
            out.append(Rows(run.name, run.start + low, run.start + high))
        at += run.stop - run.start
    return tuple(out)
