"""GLM-4.5, 4.6 and 4.7: grouped-query attention with RoPE on half of each head, and experts as in DeepSeek-V3 after the
first dense layers. The 355B models also normalize queries and keys."""

from __future__ import annotations

from typing import Any

from penstock.engines.families.deepseek_v3 import expert_entries, experts_from_config
from penstock.engines.families.entries import ConfigEntries, rotary_from_config
from penstock.engines.families.family import Family


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
