"""GLM-4 (Glm4ForCausalLM: 9B, GLM-Z1-9B, 32B) and GLM (GlmForCausalLM): gate and up projections fused into one tensor,
interleaved RoPE on half of each head. GLM-4 adds sandwich norms; the 32B model has no QKV biases.

GLM-4.5, 4.6 and 4.7: grouped-query attention with RoPE on half of each head, and experts as in DeepSeek-V3 after the
first dense layers. The 355B models also normalize queries and keys.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.deepseek_v3 import expert_entries, experts_from_config
from penstock.engines.families.entries import ConfigEntries, rotary_from_config
from penstock.engines.families.family import Family
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import (
    TensorRow,
    attention_rows,
    embedding_rows,
    norm_rows,
    unconverted_layer_row,
)


def glm_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a config.json with the architecture GlmForCausalLM."""
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "rotary": rotary_from_config(config, fraction=0.5, interleaved=True),
    }


def glm_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the table of Megatron and Hugging Face tensor names of a GLM or GLM-4 model. For these models both formats
    fuse gate and up projections, in this order."""
    hidden, width = shape.hidden_size, shape.ffn_hidden_size
    fused_mlp = [
        unconverted_layer_row(shape, "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", (2 * width, hidden)),
        unconverted_layer_row(shape, "mlp.linear_fc2.weight", "mlp.down_proj.weight", (hidden, width)),
    ]
    sandwich = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight") if shape.sandwich_norms else ()
    post_norms = [unconverted_layer_row(shape, name, name, (hidden,)) for name in sandwich]
    input_norm, mlp_norm = norm_rows(shape)
    return [*embedding_rows(shape), input_norm, *attention_rows(shape), mlp_norm, *fused_mlp, *post_norms]


_DEFAULTS = dict(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-07,
    attention_bias=True,
)
GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    model_types=("glm",),
    defaults=_DEFAULTS,
    read=glm_shape_fields,
    rows=glm_rows,
)
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    model_types=("glm4",),
    defaults=_DEFAULTS,
    read=lambda config: glm_shape_fields(config) | {"sandwich_norms": True},
    rows=glm_rows,
)


def glm4_moe_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of the config.json of GLM-4.5, 4.6 or 4.7."""
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "qk_layernorm": bool(config["use_qk_norm"]),
        "rotary": rotary_from_config(config, fraction=0.5),
        "experts": experts_from_config(config, config["first_k_dense_replace"] or 0),
        "num_mtp_layers": config["num_nextn_predict_layers"] or 0,
    }


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    model_types=("glm4_moe",),
    defaults=dict(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_routed_experts=128,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    read=glm4_moe_shape_fields,
    expert_entries=expert_entries,
)
