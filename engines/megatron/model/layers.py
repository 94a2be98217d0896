"""Transformer layers that Megatron-core does not have or implements differently from Hugging Face: sandwich norms
(GLM-4), deepstack features (Qwen3-VL), and MoE layers with Hugging Face's expert selection (routing) and routing replay
(`packing.StreamRouting`).

Megatron-core's own router differs: it ranks a group of experts by the sum of its highest `top_k / top_groups` scores
instead of its two highest, always normalizes sigmoid scores, and does not compute the softmax over all experts.

`transformer_block_spec` combines these layers, `norm_and_rope.RMSNorm` and `attention.CoreAttention` with
Megatron's local layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from penstock.engines.families.shape import Experts, ModelShape
from penstock.engines.megatron.model.attention import CoreAttention, HeadNormAttention, MLASelfAttention
from penstock.engines.megatron.model.grouped_experts import GroupedExperts, TokenDispatcher
from penstock.engines.megatron.model.norm_and_rope import HeadNorm, RMSNorm
from penstock.engines.megatron.model.vision import AddDeepstack
from penstock.engines.megatron.packing import StreamRouting

TINY = 1e-20  # avoids division by zero if all scores are zero; same value as in Hugging Face


def transformer_block_spec(shape: ModelShape, config: TransformerConfig, stage: int | None) -> Any:
    """Return Megatron's specification of the transformer layers of one pipeline chunk. `stage`: index of the chunk on
    this rank under virtual pipeline parallelism, otherwise None."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if shape.sandwich_norms:
            layer.module = SandwichNormLayer
        elif shape.vision and shape.vision.deepstack_blocks:
            layer.module = DeepstackLayer
        elif shape.experts:
            layer.module = RoutedLayer
        if shape.latent:
            parts.self_attention = ModuleSpec(module=MLASelfAttention, params={"shape": shape})
        else:
            attention = parts.self_attention.submodules
            attention.core_attention = CoreAttention
            if config.qk_layernorm:
                parts.self_attention.module = HeadNormAttention
                attention.q_layernorm = attention.k_layernorm = HeadNorm
        if shape.experts and hasattr(parts.mlp.submodules, "router"):
            parts.mlp.submodules.router = partial(ExpertRouter, shape.experts)
            if config.moe_grouped_gemm:
                parts.mlp.submodules.experts = GroupedExperts
    block.layer_norm = RMSNorm
    return block


class RoutedLayer(TransformerLayer):
    """A transformer layer that passes the current micro-batch's recorded expert ids to its MoE router at every call.

    Megatron's full recomputation calls the whole layer again with the record of the same micro-batch. Megatron's
    recomputation of only the MoE block would call the router with the record of a later micro-batch. This layer
    therefore replaces the latter: it recomputes everything after attention, including the pre-MLP norm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_moe_layer and self.config.moe_grouped_gemm:
            # Megatron's dispatcher stays if experts are sharded over tensor-parallel ranks, or if the computation of
            # shared experts overlaps with its communication.
            is_plain = self.config.moe_token_dispatcher_type == "alltoall" and not self.config.moe_shared_expert_overlap
            if is_plain and self.pg_collection.expt_tp.size() == 1:
                self.mlp.token_dispatcher = TokenDispatcher(self.config, self.pg_collection)
        self.recomputes_experts = self.is_moe_layer and self.mlp.moe_layer_recompute
        if self.recomputes_experts:
            self.mlp.moe_layer_recompute = self.recompute_pre_mlp_layernorm = False
        self.stream_routing: StreamRouting | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.stream_routing = kwargs["packed_seq_params"].routing
        return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stream_routing = self.stream_routing  # bound here, because `run` may be recomputed after later micro-batches

        def run(hidden_states: Tensor) -> Tensor:
            if self.is_moe_layer:
                self.mlp.router.stream_routing = stream_routing
            return super(RoutedLayer, self)._forward_mlp(hidden_states, *args, **kwargs)

        return tensor_parallel.checkpoint(run, False, hidden_states) if self.recomputes_experts else run(hidden_states)


class DeepstackLayer(RoutedLayer):
    """A transformer layer that adds deepstack features of images to its output (Qwen3-VL)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, context = super().forward(*args, **kwargs)
        images, index = kwargs["packed_seq_params"].images, self.layer_number - 1
        if images is not None and index < len(images.deepstack):
            hidden = AddDeepstack.apply(hidden, images, index)
        return hidden, context


class SandwichNormLayer(RoutedLayer):
    """A transformer layer that also normalizes the outputs of attention and MLP before adding them to the residual."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = partial(_norm_bias_dropout_add, self.post_self_attn_layernorm)
        self.mlp_bda = partial(_norm_bias_dropout_add, self.post_mlp_layernorm)


def _norm_bias_dropout_add(norm: nn.Module, training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return a function that applies `norm` to a sublayer's output, then dropout, and adds the residual."""
    bias_dropout_add = get_bias_dropout_add(training, fused)

    def norm_bias_dropout_add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert output[1] is None, "sandwich norms need projections without bias, but found a bias"
        return bias_dropout_add((norm(output[0]), None), residual, dropout)

    return norm_bias_dropout_add


class ExpertRouter(TopKRouter):
    """An MoE router that selects experts as Hugging Face does: its correction bias is frozen, without auxiliary
    loss."""

    def __init__(self, experts: Experts, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.experts = experts
        self.stream_routing: StreamRouting | None = None  # set by `RoutedLayer` before each call

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        record = self.stream_routing
        replay = None if record is None else partial(record.replay, self.layer_number - 1)
        return select_experts(logits.view(-1, self.experts.num_experts), self.experts, self.expert_bias, replay)


def select_experts(
    logits: Tensor,
    experts: Experts,
    correction: Tensor | None = None,
    replay: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the top-k experts of every token, and compute the weights with which the experts' outputs are summed.

    Args:
        logits: [t, experts] router logits, fp32.
        experts: routing settings of the model (top_k, groups, score function, normalization).
        correction: [experts] bias added to the scores for selecting experts, but not for the weights.
        replay: maps the selected expert ids, [t, top_k], to the expert ids to use instead (`StreamRouting.replay`).

    Returns:
        weights (0 for unselected experts) and selection (bool), both [t, experts]. The weights are scores times the
        selection mask instead of a scatter, so that gradients are deterministic.
    """
    scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(dim=-1)
    with torch.no_grad():
        biased = scores if correction is None else scores + correction
        if experts.num_groups > 1:
            by_group = biased.unflatten(-1, (experts.num_groups, -1))  # [t, groups, experts of a group]
            best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(experts.top_groups, dim=-1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
            biased = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        indices = biased.topk(experts.top_k, dim=-1).indices
        if replay is not None:
            indices = replay(indices)
        selection = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, indices, True)
    weights = scores * selection
    if experts.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * experts.scaling, selection
