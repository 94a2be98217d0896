"""Estimate the activation memory that one layer keeps for its backward pass. Does not import torch.

The formulas are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(sections 4 and 5), adapted to the layers of `model/`: no dropout, RMSNorm, SwiGLU with a fused activation,
grouped-query or latent attention, flash attention (no attention matrix), and packed sequences. Per token and layer of a
dense model with hidden size h, query width q, key and value width k each, MLP width f, and n bytes per element:

    n (4 h  +  3 q + 4 k  +  q with QK norms  +  3 f) + 4 bytes x attention heads

that is the inputs and outputs of both norms; the QKV projection (q + 2 k), its copy of the queries for the QK norm, the
rotated queries and keys, the output of attention; the output of the first MLP matrix (2 f) and of SwiGLU (f).
Tensor parallelism divides the attention and MLP terms; the terms in h are divided only with sequence parallelism.
Tokens are counted per rank, after context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.families.shape import ModelShape
from penstock.engines.parallel_layout import ParallelLayout

FP32 = 4  # bytes
MLP_PARTS = ("router", "moe", "moe_act", "shared_experts")  # recomputed together by `--recompute-modules moe`


@dataclass(frozen=True)
class LayerActivations:
    """Activation memory of consecutive layers on one rank, in bytes per token that the rank processes."""

    stored: float  # kept from the forward pass to the backward pass
    recomputed: float  # additional peak while a part of the layers is recomputed
    largest: float  # activations of the layer that has most, without recomputation


def layer_activations(
    shape: ModelShape, layers: Sequence[int], layout: ParallelLayout, bytes_per_element: int, megatron: dict[str, Any]
) -> LayerActivations:
    """Return the activation memory of the layers of a pipeline stage, per token.

    Args:
        shape: shape of the model.
        layers: indices of the layers.
        layout: parallel sizes.
        bytes_per_element: bytes of an activation's element.
        megatron: Megatron options by dataclass field name; only the recomputation options are used.
    """
    parts = {layer: activation_bytes_by_module(shape, layer, layout, bytes_per_element) for layer in layers}
    full = [sum(parts[layer].values()) for layer in layers]
    largest = max(full, default=0.0)
    granularity, group = megatron.get("recompute_granularity"), megatron.get("recompute_num_layers") or 1
    if granularity == "full":
        inputs = [parts[layer]["input"] for layer in layers]
        if megatron.get("recompute_method") == "block":
            return LayerActivations(sum(inputs[:group]) + sum(full[group:]), largest, largest)
        return LayerActivations(sum(inputs[::group]), group * largest, largest)
    if granularity == "selective":
        modules = megatron.get("recompute_modules") or ["core_attn"]
        dropped = {*modules, *(MLP_PARTS if "moe" in modules else ())}
        stored = [sum(size for name, size in parts[layer].items() if name not in dropped) for layer in layers]
        return LayerActivations(sum(stored), max((a - b for a, b in zip(full, stored)), default=0.0), largest)
    return LayerActivations(sum(full), 0.0, largest)


def activation_bytes_by_module(
    shape: ModelShape, layer: int, layout: ParallelLayout, bytes_per_element: int
) -> dict[str, float]:
    """Return the activation memory of one layer in bytes per token, by module. Keys that are values of
    --recompute-modules ("core_attn", "mlp", ...) can be recomputed selectively; the other keys ("input", "attention",
    ...) cannot, except "router" as a part of "moe"."""
    residual = bytes_per_element * shape.hidden_size / _sequence_ranks(layout)
    parts = {"input": residual, "residual": residual, "layernorm": 2 * residual}
    if shape.sandwich_norms:
        parts["sandwich"] = 2 * residual
    parts |= (
        _latent_parts(shape, layout, bytes_per_element)
        if shape.latent
        else _attention_parts(shape, layout, bytes_per_element)
    )
    if shape.experts is None or layer < shape.experts.num_dense_layers:
        return {**parts, "mlp": 3 * bytes_per_element * shape.ffn_hidden_size / layout.tensor}
    return {**parts, **_expert_parts(shape, layout, bytes_per_element)}


def _attention_parts(shape: ModelShape, layout: ParallelLayout, bytes_per_element: int) -> dict[str, float]:
    """Return the activation memory of grouped-query attention, in bytes per token, by module."""
    query = shape.num_attention_heads * shape.head_dim / layout.tensor
    key = max(1.0, shape.num_query_groups / layout.tensor) * shape.head_dim
    stored = (query + 2 * key) + (query if shape.qk_layernorm else 0) + (query + key) + query
    exchanged = query if layout.context > 1 else 0.0  # the output before and after the exchange of heads
    log_sums = FP32 * shape.num_attention_heads / layout.tensor
    return {"attention": bytes_per_element * stored, "core_attn": bytes_per_element * exchanged + log_sums}


def _latent_parts(shape: ModelShape, layout: ParallelLayout, bytes_per_element: int) -> dict[str, float]:
    """Return the activation memory of latent attention, in bytes per token, by module. Flash attention pads values to
    the width of queries and keys."""
    latent, heads = shape.latent, shape.num_attention_heads / layout.tensor
    assert latent is not None
    width, padding = shape.head_dim, max(0, shape.head_dim - latent.v_head_dim)
    low_rank = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    padded = padding + (width if padding else 0)  # values, and the output before it is cut
    exchanged = 2 * (width + latent.v_head_dim) if layout.context > 1 else 0  # queries, keys, values and output
    return {
        "attention": bytes_per_element * (low_rank / _sequence_ranks(layout) + heads * latent.v_head_dim),
        "mla_up_proj": bytes_per_element * heads * (2 * width + latent.v_head_dim),
        "core_attn": bytes_per_element * heads * (padded + exchanged) + FP32 * heads,
    }


def _expert_parts(shape: ModelShape, layout: ParallelLayout, bytes_per_element: int) -> dict[str, float]:
    """Return the activation memory of a mixture of experts, in bytes per token, by module, if all experts get equally
    many tokens."""
    experts, sequence = shape.experts, _sequence_ranks(layout)
    assert experts is not None
    ranks = layout.expert_tensor or layout.tensor
    copies = experts.top_k * ranks / sequence  # of each token, over the rank's experts
    width = experts.ffn_hidden_size / ranks
    return {
        "router": 3 * FP32 * experts.num_experts / sequence,
        "moe": bytes_per_element * copies * (shape.hidden_size + 2 * width),
        "moe_act": bytes_per_element * copies * width,
        "shared_experts": 3 * bytes_per_element * experts.shared_ffn_hidden_size / layout.tensor,
    }


def _sequence_ranks(layout: ParallelLayout) -> int:
    """Return the number of ranks over which sequence parallelism splits norms and residuals."""
    return layout.tensor if layout.sequence_parallel else 1
