"""GLM-4 (Glm4ForCausalLM: 9B, GLM-Z1-9B, 32B) and GLM (GlmForCausalLM): gate and up projections fused into one tensor,
interleaved RoPE on half of each head. GLM-4 adds sandwich norms; the 32B model has no QKV biases."""

from __future__ import annotations

from typing import Any

from penstock.engines.families.entries import ConfigEntries, rotary_from_config
from penstock.engines.families.family import Family
from penstock.engines.families.ops import TensorRow
from penstock.engines.families.rows import attention_rows, embedding_rows, norm_rows, unconverted_layer_row
from penstock.engines.families.shape import ModelShape


def glm_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a config.json with the architecture GlmForCausalLM."""
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "rotary": rotary_from_config(config, fraction=0.5, interleaved=True),
    }


def glm4_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a config.json with the architecture Glm4ForCausalLM."""
    return glm_shape_fields(config) | {"sandwich_norms": True}


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
    read=glm4_shape_fields,
    rows=glm_rows,
)
