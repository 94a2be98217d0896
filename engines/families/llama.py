"""Llama 3, Qwen2 and Qwen3: pre-norm layers, grouped-query attention, SwiGLU.

Qwen2 adds QKV biases; Qwen3 adds norms of queries and keys.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.entries import ConfigEntries, refuse_attention_bias, refuse_sliding_windows
from penstock.engines.families.family import Family


def llama_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Llama config.json."""
    refuse_attention_bias(config)
    if config["mlp_bias"]:
        config.refuse("mlp_bias true", "but Penstock does not support MLP biases")
    return {}


def qwen2_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen2 config.json. Qwen2 always has QKV biases; config.json has no entry for
    them."""
    refuse_sliding_windows(config)
    return {"qkv_bias": True}


def qwen3_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen3 config.json."""
    refuse_attention_bias(config)
    refuse_sliding_windows(config)
    return {"qk_layernorm": True}


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_types=("llama",),
    defaults=dict(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
    ),
    read=llama_shape_fields,
)
_QWEN = dict(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    max_window_layers=28,
    sliding_window=4096,
)
QWEN2 = Family(
    name="qwen2", architecture="Qwen2ForCausalLM", model_types=("qwen2",), defaults=_QWEN, read=qwen2_shape_fields
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    defaults=_QWEN | {"head_dim": 128},
    read=qwen3_shape_fields,
)
