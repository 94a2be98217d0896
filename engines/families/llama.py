"""Llama 3, Qwen2 and Qwen3: pre-norm layers, grouped-query attention, SwiGLU.

Qwen2 adds QKV biases; Qwen3 adds norms of queries and keys; Qwen3-MoE is Qwen3 with experts in every layer, routed by
softmax, without shared experts.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.entries import ConfigEntries, refuse_attention_bias, refuse_sliding_windows
from penstock.engines.families.family import Family
from penstock.engines.families.shape import Experts


def llama_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Llama config.json."""
    refuse_attention_bias(config)
    if config["mlp_bias"]:
        config.refuse("mlp_bias true", "but Penstock does not support MLP biases")
    return {}


def qwen2_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen2 config.json, which has no entry for its QKV biases."""
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
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-6,
    ),
    read=llama_shape_fields,
)  # fmt: skip
_QWEN = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=32768, rms_norm_eps=1e-6, max_window_layers=28, sliding_window=4096,
)  # fmt: skip
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


def qwen3_moe_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen3-MoE config.json, whose dense layers must come first."""
    dense = sorted(config["mlp_only_layers"] or [])
    if config["decoder_sparse_step"] != 1:
        config.refuse(
            f"decoder_sparse_step {config['decoder_sparse_step']}",
            "but Penstock supports only 1 (experts in every layer after the dense layers)",
        )
    if dense != list(range(len(dense))):
        config.refuse(
            f"mlp_only_layers {dense}", "but Penstock supports dense layers only before all layers with experts"
        )
    if not config["num_experts"]:
        config.refuse(f"num_experts {config['num_experts']}", "but this architecture needs at least one expert")
    experts = Experts(
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        num_dense_layers=len(dense),
        normalized=bool(config["norm_topk_prob"]),
    )
    return qwen3_shape_fields(config) | {"experts": experts}


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    defaults=dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=4096,
        decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
    ),
    read=qwen3_moe_shape_fields,
    expert_entries=lambda num_dense, num_layers: {"mlp_only_layers": list(range(num_dense))},
)  # fmt: skip
