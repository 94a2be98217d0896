"""Models of plain Megatron-core 0.16.1, built by its own layer specifications: local ones, and TransformerEngine's with
stand-in modules.

TransformerEngine is not installed where these tests run. Its specification is Megatron's source all the same, and asks
a provider for
modules: the stand-ins here have the parameters and states that TransformerEngine's have, so the keys are those of
Megatron's code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.compat import import_megatron
from penstock.engines.megatron.model.norm_and_rope import RMSNorm
from penstock.engines.megatron.model.transformer_config import transformer_config

import_megatron()

from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

FUSED = {  # parameter of a local layer -> of TransformerEngine's; the norm before a mixture of experts is not fused
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
FUSED_LATENT = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


class Attention(DotProductAttention):
    """Megatron's local attention refuses the widths that its latent attention passes, so its own local latent models
    cannot be built."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)


class StandInNorm(RMSNorm):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        assert state is None


class StandInNormLinear(ColumnParallelLinear):
    """A projection with the norm before it."""

    def __init__(self, input_size: int, *args: Any, config: Any, **options: Any) -> None:
        super().__init__(input_size, *args, config=config, **options)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))


class StandInProvider(LocalSpecProvider):
    """What `get_gpt_layer_with_transformer_engine_spec` asks for."""

    def linear(self) -> type:
        return ColumnParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return StandInNormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return StandInNorm

    def core_attention(self) -> type:
        return Attention


def plain_model(shape: ModelShape, names: str, monkeypatch: pytest.MonkeyPatch) -> GPTModel:
    """Build a whole model on this rank. Needs a world of one rank."""
    config = transformer_config(shape, overrides={"use_cpu_initialization": True})
    if names == "te":
        monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", StandInProvider, raising=False)
        monkeypatch.setattr(gpt_layer_specs, "TENorm", StandInNorm, raising=False)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=names == "te", normalization="RMSNorm"
    )
    if shape.latent:
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        config,
        block,
        shape.vocab_size,
        shape.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )


def weight(model: GPTModel, shape: ModelShape, names: str, name: str) -> Tensor:
    """The weight that Penstock calls `name`."""
    if names == "te" and name.startswith("decoder.layers."):
        _, _, layer, rest = name.split(".", 3)
        mixture = shape.experts is not None and int(layer) >= shape.experts.num_dense_layers
        if not (mixture and rest == "pre_mlp_layernorm.weight"):
            rest = (FUSED_LATENT if shape.latent else FUSED).get(rest, rest)
        name = f"decoder.layers.{layer}.{rest}"
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
