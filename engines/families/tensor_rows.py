"""Invertible operations (ops) between Megatron and Hugging Face tensors, and the tensor table of one model.

An op splits a Megatron tensor into Hugging Face tensors and joins these again; `join(split(x))` equals `x` bit for
bit. Ops only slice, concatenate and reorder rows, so they also work on meta tensors. This module does not depend on any
family.

The second half of this module has the mappings (`TensorRow`) that model families share: embeddings, norms, attention,
MLP and experts. Hugging Face names are those of Llama and DeepSeek; `renamed` changes them. The mappings of all tensors
of a model are its tensor table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"  # Megatron's names
VISION = "vision."  # prefix of the names of the vision tower's tensors


@dataclass(frozen=True)
class Same:
    """Op for a tensor that is the same in Megatron and Hugging Face; only the names differ. The other ops override both
    methods. `name` is the Megatron tensor's name, for error messages."""

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split a Megatron tensor into its Hugging Face tensors, in the order of `TensorRow.hf`."""
        return [tensor]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face tensors into the Megatron tensor; inverse of `split`."""
        return tensors[0]


@dataclass(frozen=True)
class PaddedVocab(Same):
    """Op for an embedding or LM head. Megatron may append padding rows so that all tensor-parallel ranks get equal
    shards; Hugging Face tensors have none. `join` does not pad, but Megatron's loader does, for the loading run."""

    vocab_size: int

    def split(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        _require_shape(tensor.shape[0] >= self.vocab_size, name, tensor, f"at least {self.vocab_size} vocabulary rows")
        return [tensor[: self.vocab_size]]

    def join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        _require_shape(tensors[0].shape[0] == self.vocab_size, name, tensors[0], f"{self.vocab_size} vocabulary rows")
        return tensors[0]


@dataclass(frozen=True)
class GateUp(Same):
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
class InterleavedQKV(Same):
    """Op for weights `[rows, hidden]` and biases `[rows]` of query, key and value projections, which Megatron
    interleaves: for each query group its query heads, its key head and its value head, so that each tensor-parallel
    rank gets whole groups."""

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
    """One row of a family's tensor table. Names may contain the placeholders `{layer}` and `{expert}`."""

    megatron: str
    op: Same
    hf: Mapping[str, tuple[int, ...]]  # Hugging Face name -> shape, in the order of `op.split`
    copies: tuple[str, ...] = ()  # Hugging Face names of duplicates in some checkpoints; never exported
    layers: range | None = None  # indices of the layers that have this tensor; None: outside of the layers
    num_experts: int = 1


class TensorLayout:
    """The tensor names of a model in Megatron and Hugging Face format, and conversion of whole (unsharded) tensors."""

    def __init__(self, shape: ModelShape, rows: Sequence[TensorRow]) -> None:
        self.shape = shape
        self.hf_shapes: dict[str, tuple[int, ...]] = {}  # Hugging Face name -> shape, without duplicates
        self.copies: dict[str, str] = {}  # Hugging Face name of a duplicate (a tied head) -> name of the original
        self._rows: dict[str, tuple[Same, tuple[str, ...]]] = {}  # Megatron name -> op, Hugging Face names
        for row in rows:
            assert ("{layer}" in row.megatron) == (row.layers is not None), row.megatron
        outside = [row for row in rows if row.layers is None]
        first = [(0, row) for row in outside if row.megatron.startswith("embedding.")]
        of_layers = [(layer, row) for layer in range(shape.num_layers) for row in rows if layer in (row.layers or ())]
        last = [(0, row) for row in outside if not row.megatron.startswith("embedding.")]
        for layer, row in [*first, *of_layers, *last]:  # in the order of `megatron_names`
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
        """Return the full Megatron tensor `name`, joined from those that `fetch` returns by Hugging Face name."""
        op, hf_names = self._row(name)
        tensors = [fetch(hf_name) for hf_name in hf_names]
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = ", ".join(f"{hf_name} {tensor.dtype}" for hf_name, tensor in zip(hf_names, tensors))
            raise ModelError(
                f"the tensors for {name} have different dtypes ({dtypes}): save the checkpoint in one dtype"
            )
        return op.join(name, tensors)

    def hf_names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors that are joined into the Megatron tensor `name`."""
        return self._row(name)[1]

    def megatron_names(self) -> list[str]:
        """Return the names of all Megatron tensors of the model: the embedding, then layer by layer, then the others.
        Exported files have their tensors in this order, which is also the order of Megatron's modules."""
        return list(self._rows)

    def is_untrained(self, hf_name: str) -> bool:
        """Return whether a Hugging Face checkpoint may have this tensor although the Megatron model does not: tensors
        of multi-token prediction layers, which follow the last decoder layer, and RoPE inverse frequencies, which old
        checkpoints have."""
        if hf_name.endswith(".rotary_emb.inv_freq"):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        return layer is not None and 0 <= int(layer[1]) - self.shape.num_layers < self.shape.num_mtp_layers

    def _row(self, name: str) -> tuple[Same, tuple[str, ...]]:
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


MEGATRON, HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def decoder_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the tensor table of a pre-norm decoder. The RoPE dimensions of latent attention have the same order in
    both formats, because the Megatron model also applies interleaved RoPE."""
    input_norm, mlp_norm = norm_rows(shape)
    attention = mla_rows(shape) if shape.latent else attention_rows(shape)
    return [*embedding_rows(shape), input_norm, *attention, mlp_norm, *mlp_rows(shape)]


def embedding_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the rows of the embedding, the final norm and, unless it is tied to the embedding, the LM head."""
    vocab, size = PaddedVocab(shape.vocab_size), (shape.vocab_size, shape.hidden_size)
    head = "lm_head.weight"
    copies = (head,) if shape.tied_embeddings else ()  # Qwen3-0.6B on the hub stores the tied head too
    rows = [
        TensorRow(EMBEDDING, vocab, {"model.embed_tokens.weight": size}, copies=copies),
        TensorRow("decoder.final_layernorm.weight", Same(), {"model.norm.weight": (shape.hidden_size,)}),
    ]
    return rows if shape.tied_embeddings else [*rows, TensorRow(HEAD, vocab, {head: size})]


def norm_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the rows of the norms before attention and before the MLP."""
    size = (shape.hidden_size,)
    return [
        unconverted_layer_row(shape, "input_layernorm.weight", "input_layernorm.weight", size),
        unconverted_layer_row(shape, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", size),
    ]


def attention_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the rows of grouped-query attention, with QKV biases and QK norms if the model has them."""
    heads, groups, dim, hidden = shape.num_attention_heads, shape.num_query_groups, shape.head_dim, shape.hidden_size
    qkv, layers = InterleavedQKV(groups, heads // groups, dim), range(shape.num_layers)
    widths = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    output = (hidden, heads * dim)
    rows = [unconverted_layer_row(shape, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", output)]
    rows += [
        TensorRow(
            f"{MEGATRON}self_attention.linear_qkv.{kind}",
            qkv,
            {f"{HF}self_attn.{x}_proj.{kind}": (width, *columns) for x, width in widths.items()},
            layers=layers,
        )
        for kind, columns in ({"weight": (hidden,), "bias": ()} if shape.qkv_bias else {"weight": (hidden,)}).items()
    ]
    for x in "qk" if shape.qk_layernorm else "":
        rows.append(
            unconverted_layer_row(shape, f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", (dim,))
        )
    return rows


def mla_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the rows of multi-head latent attention, with a direct or a low-rank projection of queries."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_attention_heads
    assert latent is not None, shape.family
    rank, q_rank, queries = latent.kv_lora_rank, latent.q_lora_rank, heads * shape.head_dim
    tensors: dict[str, tuple[str, tuple[int, ...]]] = (
        {"linear_q_proj": ("q_proj", (queries, hidden))}
        if q_rank is None
        else {
            "linear_q_down_proj": ("q_a_proj", (q_rank, hidden)),
            "q_layernorm": ("q_a_layernorm", (q_rank,)),
            "linear_q_up_proj": ("q_b_proj", (queries, q_rank)),
        }
    )
    tensors |= {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (rank + latent.qk_rope_head_dim, hidden)),
        "kv_layernorm": ("kv_a_layernorm", (rank,)),
        "linear_kv_up_proj": ("kv_b_proj", (heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank)),
        "linear_proj": ("o_proj", (hidden, heads * latent.v_head_dim)),
    }
    return [
        unconverted_layer_row(shape, f"self_attention.{name}.weight", f"self_attn.{hf}.weight", size)
        for name, (hf, size) in tensors.items()
    ]


def mlp_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the rows of the MLPs: dense ones in the first layers, and a router and experts in all others."""
    experts, dense = shape.experts, shape.experts.num_dense_layers if shape.experts else shape.num_layers
    rows = swiglu_rows(shape, "mlp.", shape.ffn_hidden_size, range(dense))
    if experts is None:
        return rows
    layers, count = range(dense, shape.num_layers), experts.num_experts
    router = {f"{HF}mlp.gate.weight": (count, shape.hidden_size)}
    rows.append(TensorRow(f"{MEGATRON}mlp.router.weight", Same(), router, layers=layers))
    if experts.bias:
        correction = {f"{HF}mlp.gate.e_score_correction_bias": (count,)}
        rows.append(TensorRow(f"{MEGATRON}mlp.router.expert_bias", Same(), correction, layers=layers))
    rows += swiglu_rows(shape, "mlp.experts.", experts.ffn_hidden_size, layers, count)
    if experts.shared_ffn_hidden_size:
        rows += swiglu_rows(shape, "mlp.shared_experts.", experts.shared_ffn_hidden_size, layers)
    return rows


def swiglu_rows(shape: ModelShape, module: str, width: int, layers: range, num_experts: int = 0) -> list[TensorRow]:
    """Return the rows of a SwiGLU MLP or, if `num_experts` is positive, of that many expert MLPs. `module` is the MLP's
    name prefix ("mlp.")."""
    megatron, hf = MEGATRON + module, HF + module
    if num_experts:
        megatron, hf = megatron + "local_experts.{expert}.", hf + "{expert}."
    gate_up = {f"{hf}{name}_proj.weight": (width, shape.hidden_size) for name in ("gate", "up")}
    down = {f"{hf}down_proj.weight": (shape.hidden_size, width)}
    return [
        TensorRow(f"{megatron}linear_fc1.weight", GateUp(), gate_up, layers=layers, num_experts=max(1, num_experts)),
        TensorRow(f"{megatron}linear_fc2.weight", Same(), down, layers=layers, num_experts=max(1, num_experts)),
    ]


def unconverted_layer_row(shape: ModelShape, megatron: str, hf: str, size: tuple[int, ...]) -> TensorRow:
    """Return the row of a tensor that every layer has and of which only the name (without the layer prefix) differs."""
    return TensorRow(MEGATRON + megatron, Same(), {HF + hf: size}, layers=range(shape.num_layers))


def vision_rows(shape: ModelShape, prefix: str) -> list[TensorRow]:
    """Return the rows of the vision tower. `prefix`: beginning of their Hugging Face names."""
    assert shape.vision is not None, shape.family
    rows = [
        TensorRow(VISION + name, Same(), {prefix + name: size}) for name, size in shape.vision.tensor_shapes.items()
    ]
    if shape.vision.variant == "qwen3":
        return rows
    for index, row in enumerate(rows):
        if ".mlp.linear_fc1." in row.megatron:
            [(name, (size, *columns))] = row.hf.items()
            parts = {name.replace("linear_fc1", part): (size // 2, *columns) for part in ("gate_proj", "up_proj")}
            rows[index] = replace(row, op=GateUp(), hf=parts)
    names = {"merger.linear_fc1": "merger.mlp.0", "merger.linear_fc2": "merger.mlp.2", "merger.norm": "merger.ln_q"}
    return renamed(rows, names | {"linear_fc2": "down_proj"})


def renamed(rows: list[TensorRow], names: dict[str, str]) -> list[TensorRow]:
    """Return copies of `rows` whose Hugging Face names have each key of `names` replaced by its value, key by key."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return [
        replace(row, hf={rename(name): size for name, size in row.hf.items()}, copies=tuple(map(rename, row.copies)))
        for row in rows
    ]
