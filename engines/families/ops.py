"""Invertible operations (ops) between Megatron and Hugging Face tensors, and the tensor table of one model.

An op splits a Megatron tensor into Hugging Face tensors and joins these again; `join(split(x))` equals `x` bit for
bit. Ops only slice, concatenate and reorder rows, so they also work on meta tensors. This module does not depend on any
family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import ModelError

if TYPE_CHECKING:  # preflight reads names and shapes without torch
    from torch import Tensor


class Op(Protocol):
    """Conversion between a Megatron tensor and the corresponding Hugging Face tensors. `name` is the Megatron tensor's
    name, for error messages."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split a Megatron tensor into its Hugging Face tensors, in the order of `TensorRow.hf`."""

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face tensors into the Megatron tensor; inverse of `split`."""


@dataclass(frozen=True)
class Same:
    """Op for a tensor that is the same in Megatron and Hugging Face; only the names differ."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class PaddedVocab:
    """Op for an embedding or LM head. Megatron may append padding rows so that all tensor-parallel
    ranks get equal shards; Hugging Face tensors have no padding.

    `join` does not pad: Megatron's loader appends zero rows for the tensor-parallel size of the loading run.
    """

    vocab_size: int

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        _require_shape(tensor.shape[0] >= self.vocab_size, name, tensor, f"at least {self.vocab_size} vocabulary rows")
        return [tensor[: self.vocab_size]]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        _require_shape(tensors[0].shape[0] == self.vocab_size, name, tensors[0], f"{self.vocab_size} vocabulary rows")
        return tensors[0]


@dataclass(frozen=True)
class GateUp:
    """Op for SwiGLU's gate and up projections, which Megatron concatenates: all rows of gate, then all rows of up."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        _require_shape(tensor.shape[0] % 2 == 0, name, tensor, "an even number of rows (gate and up)")
        return tensor.chunk(2)

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        gate, up = tensors
        _require_shape(gate.shape == up.shape, name, up, f"shape {list(gate.shape)}, as the gate projection has")
        return torch.cat([gate, up])


@dataclass(frozen=True)
class InterleavedQKV:
    """Op for query, key and value projections, which Megatron interleaves by query group: for each group its query
    heads, its key head and its value head.

    This order gives each tensor-parallel rank whole groups. Applies to weights `[rows, hidden]` and biases `[rows]`.
    """

    num_query_groups: int
    heads_per_group: int
    head_dim: int

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        groups, heads, rest = self.num_query_groups, self.heads_per_group, tensor.shape[1:]
        rows = groups * (heads + 2) * self.head_dim
        _require_shape(tensor.shape[0] == rows, name, tensor, f"{rows} rows")
        grouped = tensor.view(groups, heads + 2, self.head_dim, *rest)  # [G, heads + 2, D, ...]
        return [part.reshape(-1, *rest) for part in grouped.split([heads, 1, 1], dim=1)]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        groups, rest, parts = self.num_query_groups, tensors[0].shape[1:], []
        for tensor, heads in zip(tensors, [self.heads_per_group, 1, 1]):
            rows = groups * heads * self.head_dim
            _require_shape(tensor.shape == (rows, *rest), name, tensor, f"shape {[rows, *rest]}")
            parts.append(tensor.view(groups, heads, self.head_dim, *rest))
        return torch.cat(parts, dim=1).view(-1, *rest)  # [G * (heads + 2) * D, ...]


@dataclass(frozen=True)
class TensorRow:
    """One row of a family's tensor table. Names may contain the placeholders `{layer}` and `{expert}` for layer and
    expert indices."""

    megatron: str
    op: Op
    hf: Mapping[str, tuple[int, ...]]  # Hugging Face name -> shape, in the order of `op.split`
    copies: tuple[str, ...] = ()  # Hugging Face names of duplicates in some checkpoints; never exported
    layers: range | None = None  # indices of the layers that have this tensor; None: outside of the layers
    num_experts: int = 1


def rows_by_layer(rows: Sequence[TensorRow], num_layers: int) -> Iterator[tuple[int, TensorRow]]:
    """Yield every row once for each of its layers, in the order of `TensorLayout.megatron_names`."""
    for row in rows:
        assert ("{layer}" in row.megatron) == (row.layers is not None), row.megatron
    outside = [row for row in rows if row.layers is None]
    yield from ((0, row) for row in outside if row.megatron.startswith("embedding."))
    for layer in range(num_layers):
        yield from ((layer, row) for row in rows if row.layers and layer in row.layers)
    yield from ((0, row) for row in outside if not row.megatron.startswith("embedding."))


class TensorLayout:
    """The tensor names of one model in Megatron and Hugging Face format, and the conversion of tensors between the two.

    Tensors are converted as a whole (unsharded); callers gather them from ranks or read them from files.

    Args:
        shape: shape of the model.
        rows: tensor table of the model's family for this shape.
    """

    def __init__(self, shape: ModelShape, rows: Sequence[TensorRow]) -> None:
        self.shape = shape
        self.hf_shapes: dict[str, tuple[int, ...]] = {}  # Hugging Face name -> shape, without duplicates
        self.copies: dict[str, str] = {}  # Hugging Face name of a duplicate (a tied head) -> name of the original
        self._rows: dict[str, tuple[Op, tuple[str, ...]]] = {}  # Megatron name -> op, Hugging Face names
        for layer, row in rows_by_layer(rows, shape.num_layers):
            for expert in range(row.num_experts):
                names = {name.format(layer=layer, expert=expert): size for name, size in row.hf.items()}
                self._rows[row.megatron.format(layer=layer, expert=expert)] = (row.op, tuple(names))
                self.hf_shapes |= names
            self.copies |= dict.fromkeys(row.copies, next(iter(row.hf)))

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Split the full (unsharded) Megatron tensor `name`, whose layer index counts from the model's first layer,
        into Hugging Face (name, tensor) pairs. The returned tensors may share memory with `tensor`."""
        op, hf_names = self._row(name)
        return list(zip(hf_names, op.split(name, tensor), strict=True))

    def to_megatron(self, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
        """Return the full Megatron tensor `name`, joined from Hugging Face tensors; `fetch` returns a Hugging Face
        tensor by name."""
        op, hf_names = self._row(name)
        tensors = [fetch(hf_name) for hf_name in hf_names]
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = ", ".join(f"{hf_name} {tensor.dtype}" for hf_name, tensor in zip(hf_names, tensors))
            raise ModelError(
                f"{name} is joined from tensors of different dtypes ({dtypes}): save the checkpoint in one dtype"
            )
        return op.join(name, tensors)

    def hf_names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors that are joined into the Megatron tensor `name`."""
        return self._row(name)[1]

    def megatron_names(self) -> list[str]:
        """Return the names of all Megatron tensors of the model: the embedding, then layer by layer, then the others.
        Exported files have their tensors in this order, which is also the order of Megatron's modules."""
        return list(self._rows)

    def hf_names(self) -> set[str]:
        """Return the names of all Hugging Face tensors of the model, without duplicates such as a tied head."""
        return set(self.hf_shapes)

    def is_untrained(self, hf_name: str) -> bool:
        """Return whether a Hugging Face checkpoint may have this tensor although the Megatron model does not.

        True for tensors of multi-token prediction layers (hub checkpoints number these layers after the last decoder
        layer) and for RoPE inverse frequencies (stored by old checkpoints; computed from config.json). Any other name
        that is neither in `hf_names` nor in `copies` belongs to a different model.
        """
        if hf_name.endswith(".rotary_emb.inv_freq"):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        return layer is not None and 0 <= int(layer[1]) - self.shape.num_layers < self.shape.num_mtp_layers

    def _row(self, name: str) -> tuple[Op, tuple[str, ...]]:
        if name not in self._rows:
            raise ModelError(f"{self.shape.family} models have no tensor {name!r}: use a checkpoint of this family")
        return self._rows[name]


def _require_shape(condition: bool, name: str, tensor: Tensor, needed: str) -> None:
    """Raise ModelError about the shape of a tensor unless `condition` is true."""
    if not condition:
        raise ModelError(
            f"{name}: found shape {list(tensor.shape)}, needed {needed}: use the config.json that belongs to "
            "these weights"
        )
