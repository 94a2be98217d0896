"""The layers that Megatron-core lacks or has otherwise than Hugging Face: norms also after attention and MLP (GLM-4), and the choice of
experts (`routing.py`), which may be given (`replay.py`). `block_spec` puts them, our norm and our attention into Megatron's local layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from engines.megatron.attention import CoreAttention
from engines.megatron.latent import LatentAttention
from engines.megatron.norm import RMSNorm
from engines.megatron.replay import StreamRouting
from engines.megatron.routing import route
from engines.megatron.shape import Experts, ModelShape


def block_spec(shape: ModelShape, config: TransformerConfig, stage: int | None) -> Any:
    """Specifications of the layers of one pipeline chunk."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if shape.sandwich_norms:
            layer.module = SandwichLayer
        elif shape.experts:
            layer.module = RoutedLayer
        if shape.latent:
            parts.self_attention = ModuleSpec(module=LatentAttention, params={"shape": shape})
        else:
            attention = parts.self_attention.submodules
            attention.core_attention = CoreAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        if shape.experts and hasattr(parts.mlp.submodules, "router"):
            parts.mlp.submodules.router = partial(Router, shape.experts)
    block.layer_norm = RMSNorm
    return block


class RoutedLayer(TransformerLayer):
    """A layer that tells its router on which micro-batch it works, every time: Megatron's recomputation calls the whole layer again with
    the same stream. Its recomputation of the experts alone would ask the router again with another micro-batch's stream, so here the
    layer does it: what comes after attention, its norm included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recomputes_experts = self.is_moe_layer and self.mlp.moe_layer_recompute
        if self.recomputes_experts:
            self.mlp.moe_layer_recompute = self.recompute_pre_mlp_layernorm = False
        self.stream_routing: StreamRouting | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.stream_routing = kwargs["packed_seq_params"].routing
        return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mine = self.stream_routing  # of this call, also when the experts are recomputed after others

        def run(hidden_states: Tensor) -> Tensor:
            if self.is_moe_layer:
                self.mlp.router.stream_routing = mine
            return super(RoutedLayer, self)._forward_mlp(hidden_states, *args, **kwargs)

        return tensor_parallel.checkpoint(run, False, hidden_states) if self.recomputes_experts else run(hidden_states)


class SandwichLayer(RoutedLayer):
    """A layer that also normalises what attention and MLP give, before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = partial(_normed, self.post_self_attn_layernorm)
        self.mlp_bda = partial(_normed, self.post_mlp_layernorm)


def _normed(norm: nn.Module, training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's "bias, dropout, add" with a norm before it."""
    inner = get_bias_dropout_add(training, fused)

    def normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert output[1] is None, "a projection with a bias"
        return inner((norm(output[0]), None), residual, dropout)

    return normed


class Router(TopKRouter):
    """Sends tokens to experts as Hugging Face does. Nothing here balances their load: the correction is frozen, no loss is added."""

    def __init__(self, experts: Experts, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.experts = experts
        self.stream_routing: StreamRouting | None = None  # set by the layer before each call

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        known = self.stream_routing
        settle = None if known is None else partial(known.settle, self.layer_number - 1)
        return route(logits.view(-1, self.experts.num_experts), self.experts, self.expert_bias, settle)
