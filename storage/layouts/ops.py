"""The two-way operations a layout's table is made of, and the table itself.

An op says how one Megatron tensor splits into Hugging Face tensors and how these join again: `join(split(x))` is `x` to the bit.
Ops only cut, stack and reorder, so they also work on meta tensors, where they tell the shapes. Nothing here knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from storage.errors import ModelError

if TYPE_CHECKING:  # preflight reads names and shapes without torch
    from torch import Tensor


class Latent(Protocol):
    """What a layout wants to know of latent attention."""

    @property
    def q_lora_rank(self) -> int | None: ...


class Mixture(Protocol):
    """What a layout wants to know of a mixture of experts."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_dense_layers(self) -> int: ...
    @property
    def shared_ffn_hidden_size(self) -> int: ...


class Shape(Protocol):
    """What a layout wants to know of a model; `engines.megatron.shape.ModelShape` has it."""

    @property
    def family(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...
    @property
    def latent(self) -> Latent | None: ...
    @property
    def experts(self) -> Mixture | None: ...
    @property
    def num_mtp_layers(self) -> int: ...


class Op(Protocol):
    """One correspondence. `name` is the Megatron name, for messages."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """One Megatron tensor -> the Hugging Face tensors, in the order of the row's names."""

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""


@dataclass(frozen=True)
class Same:
    """The same tensor under another name."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class PaddedVocab:
    """Vocabulary rows. Megatron may append rows so that tensor-parallel ranks get equal parts; Hugging Face never sees them.

    Joining adds none: Megatron's loader fills them with zeros for the parallel size it runs at.
    """

    vocab_size: int

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        _need(tensor.shape[0] >= self.vocab_size, name, tensor, f"at least {self.vocab_size} vocabulary rows")
        return [tensor[: self.vocab_size]]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        _need(tensors[0].shape[0] == self.vocab_size, name, tensors[0], f"{self.vocab_size} vocabulary rows")
        return tensors[0]


@dataclass(frozen=True)
class GateUp:
    """SwiGLU's gate and up projections, stacked: the rows of gate, then those of up."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        _need(tensor.shape[0] % 2 == 0, name, tensor, "an even number of rows, gate and up")
        return tensor.chunk(2)

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        gate, up = tensors
        _need(gate.shape == up.shape, name, up, f"the gate's shape {list(gate.shape)}")
        return _cat([gate, up])


@dataclass(frozen=True)
class InterleavedQKV:
    """Query, key and value projections. Megatron orders rows by group: the group's query heads, its key head, its value head.

    So tensor-parallel ranks cut whole groups. Weights `[rows, hidden]` and biases `[rows]` alike.
    """

    num_query_groups: int
    heads_per_group: int
    head_dim: int

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        groups, heads, rest = self.num_query_groups, self.heads_per_group, tensor.shape[1:]
        rows = groups * (heads + 2) * self.head_dim
        _need(tensor.shape[0] == rows, name, tensor, f"{rows} rows")
        grouped = tensor.view(groups, heads + 2, self.head_dim, *rest)  # [G, heads + 2, D, ...]
        return [part.reshape(-1, *rest) for part in grouped.split([heads, 1, 1], dim=1)]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        groups, rest, parts = self.num_query_groups, tensors[0].shape[1:], []
        for tensor, heads in zip(tensors, [self.heads_per_group, 1, 1]):
            rows = groups * heads * self.head_dim
            _need(tensor.shape == (rows, *rest), name, tensor, f"shape {[rows, *rest]}")
            parts.append(tensor.view(groups, heads, self.head_dim, *rest))
        return _cat(parts, dim=1).view(-1, *rest)  # [G * (heads + 2) * D, ...]


@dataclass(frozen=True)
class Row:
    """One line of a family's table; `{layer}` and `{expert}` in the names stand for their numbers."""

    megatron: str
    op: Op
    hf: tuple[str, ...]
    copies: tuple[str, ...] = ()  # names under which some checkpoints hold the same tensor again; never written
    layers: range | None = None  # that have it; None: it is no layer's
    num_experts: int = 1


class Layout:
    """A family's table, filled in for one model: every name, both ways.

    Args:
        shape: of the model.
        rows: the family's table.
    """

    def __init__(self, shape: Shape, rows: Sequence[Row]) -> None:
        self.shape = shape
        self._rows: dict[str, tuple[Op, tuple[str, ...]]] = {}  # Megatron name -> op, Hugging Face names
        self.copies: dict[str, str] = {}  # Hugging Face name of a superfluous copy -> the name that counts
        for row in rows:
            assert ("{layer}" in row.megatron) == (row.layers is not None), row.megatron
            for layer in range(1) if row.layers is None else row.layers:
                for expert in range(row.num_experts):
                    names = tuple(name.format(layer=layer, expert=expert) for name in row.hf)
                    self._rows[row.megatron.format(layer=layer, expert=expert)] = (row.op, names)
            self.copies |= {copy: row.hf[0] for copy in row.copies}

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """A full Megatron tensor (layer number global) as Hugging Face ones. The results may share its memory."""
        op, hf_names = self._row(name)
        return list(zip(hf_names, op.split(name, tensor), strict=True))

    def to_megatron(self, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
        """The full Megatron tensor called `name`, made of what `fetch` gives for Hugging Face names."""
        op, hf_names = self._row(name)
        tensors = [fetch(hf_name) for hf_name in hf_names]
        if len({tensor.dtype for tensor in tensors}) > 1:
            found = ", ".join(f"{hf_name} {tensor.dtype}" for hf_name, tensor in zip(hf_names, tensors))
            raise ModelError(f"{name} is made of {found}; they must have one dtype: save the checkpoint in one dtype")
        return op.join(name, tensors)

    def hf_of(self, name: str) -> tuple[str, ...]:
        """The Hugging Face names that one Megatron tensor is made of."""
        return self._row(name)[1]

    def megatron_names(self) -> list[str]:
        """Every Megatron name of the model."""
        return list(self._rows)

    def hf_names(self) -> set[str]:
        """Every Hugging Face name of the model, without copies such as a tied head."""
        return {hf_name for _, hf_names in self._rows.values() for hf_name in hf_names}

    def carried(self, hf_name: str) -> bool:
        """Whether a tensor of a checkpoint is none of the model's that trains, and known to be harmless.

        True for multi-token prediction layers, which hub checkpoints hold after the last layer, and for rotary frequencies, which
        old ones hold although they follow from config.json. Any other name that is not in `hf_names` or `copies` is another
        model's.
        """
        if hf_name.endswith(".rotary_emb.inv_freq"):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        return layer is not None and 0 <= int(layer[1]) - self.shape.num_layers < self.shape.num_mtp_layers

    def _row(self, name: str) -> tuple[Op, tuple[str, ...]]:
        if name not in self._rows:
            raise ModelError(f"the {self.shape.family} layout has no tensor {name!r}: the checkpoint is of another model")
        return self._rows[name]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(tensors), dim)


def _need(true: bool, name: str, tensor: Tensor, needed: str) -> None:
    if not true:
        found = list(tensor.shape)
        raise ModelError(f"{name}: found shape {found}, needed {needed}: config.json and the weights are of different models")
