"""DeepSeek-V3 and R1, Kimi K2, Moonlight and GLM-4.7-Flash: multi-head latent attention, and experts in every layer
after the first dense layers.

Moonlight projects queries directly (`q_lora_rank` is null); the other models use a low-rank projection.

GLM-4 (Glm4ForCausalLM: 9B, GLM-Z1-9B, 32B) and GLM (GlmForCausalLM): gate and up projections fused into one tensor,
interleaved RoPE on half of each head. GLM-4 adds sandwich norms; the 32B model has no QKV biases.

GLM-4.5, 4.6 and 4.7: grouped-query attention with RoPE on half of each head, and experts as in DeepSeek-V3 after the
first dense layers. The 355B models also normalize queries and keys.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.entries import ConfigEntries, refuse_attention_bias, rotary_from_config
from penstock.engines.families.family import Family
from penstock.engines.families.shape import Experts, LatentAttention, Llama3Scaling, ModelShape
from penstock.engines.families.tensor_rows import (
    TensorRow,
    attention_rows,
    embedding_rows,
    norm_rows,
    unconverted_layer_row,
)


def glm4_moe_lite_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a GLM-4.7-Flash config.json, whose dense layers are given by
    `first_k_dense_replace`, `mlp_layer_types` or both."""
    kinds, dense = config["mlp_layer_types"], config["first_k_dense_replace"]
    if kinds is not None:
        num_dense = kinds.count("dense")
        if kinds != ["dense"] * num_dense + ["sparse"] * (config["num_hidden_layers"] - num_dense):
            config.refuse(
                f"mlp_layer_types {kinds}", "but Penstock supports dense layers only before all layers with experts"
            )
        if dense not in (None, num_dense):
            config.refuse_contradiction(f"first_k_dense_replace {dense} and {num_dense} dense mlp_layer_types")
        dense = num_dense
    return _read_latent_model(config, 1 if dense is None else dense)


def _read_latent_model(config: ConfigEntries, num_dense_layers: int) -> dict[str, Any]:
    """Return the `ModelShape` fields of a model with latent attention and this number of dense layers."""
    refuse_attention_bias(config)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if groups not in (None, heads):
        config.refuse(
            f"num_key_value_heads {groups} and num_attention_heads {heads}",
            "but latent attention needs both to be equal",
        )
    latent = LatentAttention(**{name: config[name] for name in LatentAttention.model_fields})
    rope = rotary_from_config(config, interleaved=bool(config["rope_interleave"]))
    if isinstance(rope.scaling, Llama3Scaling):
        config.refuse("rope_type 'llama3'", "but with latent attention Penstock supports only YaRN or no RoPE scaling")
    return {
        "num_query_groups": heads,
        "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        "qk_layernorm": True,
        "latent": latent,
        "rotary": rope,
        "experts": experts_from_config(config, num_dense_layers),
        "num_mtp_layers": config["num_nextn_predict_layers"] or 0,
    }


def experts_from_config(config: ConfigEntries, num_dense_layers: int) -> Experts:
    """Return the MoE settings of a DeepSeek-style model: sigmoid scores with a frozen correction bias, expert
    groups."""
    for name, needed in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        if config[name] not in (None, needed):
            config.refuse(f"{name} {config[name]!r}", f"but Penstock supports only {needed!r} for this family")
    groups, top_groups, num_experts = config["n_group"] or 1, config["topk_group"] or 1, config["n_routed_experts"]
    if groups > 1 and (num_experts % groups or num_experts // groups < 2 or top_groups > groups):
        config.refuse(
            f"n_group {groups}, topk_group {top_groups}, n_routed_experts {num_experts}",
            "but groups must have equal sizes of at least two experts, and topk_group must not exceed n_group",
        )
    if top_groups >= groups:
        groups = top_groups = 1  # routing selects every group, so groups have no effect
    return Experts(
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        shared_ffn_hidden_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        num_dense_layers=num_dense_layers,
        score="sigmoid",
        normalized=bool(config["norm_topk_prob"]),
        bias=True,
        num_groups=groups,
        top_groups=top_groups,
        scaling=config["routed_scaling_factor"],
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3", "kimi_k2"),
    defaults=dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        max_position_embeddings=4096, rms_norm_eps=1e-6, rope_interleave=True,
        moe_intermediate_size=2048, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=256,
        routed_scaling_factor=2.5, n_group=8, topk_group=4, first_k_dense_replace=3, norm_topk_prob=True,
        kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
    read=lambda config: _read_latent_model(config, config["first_k_dense_replace"] or 0),
    expert_entries=lambda num_dense, num_layers: {"first_k_dense_replace": num_dense},
)  # fmt: skip
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    model_types=("glm4_moe_lite",),
    defaults=dict(
        vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=47, num_attention_heads=20,
        max_position_embeddings=202752, rms_norm_eps=1e-5, rope_interleave=True,
        moe_intermediate_size=1536, num_experts_per_tok=4, n_shared_experts=1, n_routed_experts=64,
        routed_scaling_factor=1.8, n_group=1, topk_group=1, norm_topk_prob=True,
        kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256,
    ),
    read=glm4_moe_lite_shape_fields,
    expert_entries=lambda num_dense, num_layers: {
        "first_k_dense_replace": num_dense,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
    },
)  # fmt: skip


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
    vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07, attention_bias=True,
)  # fmt: skip
GLM = Family(
    name="glm", architecture="GlmForCausalLM", model_types=("glm",), defaults=_DEFAULTS, read=glm_shape_fields,
    rows=glm_rows,
)  # fmt: skip
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    model_types=("glm4",),
    defaults=_DEFAULTS,
    read=lambda config: glm_shape_fields(config) | {"sandwich_norms": True},
    rows=glm_rows,
)


GLM4_MOE = Family(  # GLM-4.5, 4.6 and 4.7
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    model_types=("glm4_moe",),
    defaults=dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
    ),
    read=lambda config: {
        "qkv_bias": bool(config["attention_bias"]),
        "qk_layernorm": bool(config["use_qk_norm"]),
        "rotary": rotary_from_config(config, fraction=0.5),
        "experts": experts_from_config(config, config["first_k_dense_replace"] or 0),
        "num_mtp_layers": config["num_nextn_predict_layers"] or 0,
    },
    expert_entries=lambda num_dense, num_layers: {"first_k_dense_replace": num_dense},
)  # fmt: skip
