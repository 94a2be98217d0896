"""Derive the Megatron options that a model's checkpoint determines.

`transformer_config.py` builds Megatron's own configuration of the model. Does not import torch.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.shape import Llama3Scaling, ModelShape, YarnScaling

CONSTANT: dict[str, Any] = dict(  # options with the same value in every supported model family
    add_bias_linear=False,
    gated_linear_unit=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    use_rotary_position_embeddings=True,
    no_position_embedding=True,  # no learned position embeddings
    mtp_num_layers=None,  # multi-token prediction layers are kept in checkpoints, but not trained
)


def model_options(shape: ModelShape) -> dict[str, Any]:
    """Return every Megatron option that the model's checkpoint determines, as a dictionary option name -> value."""
    latent = shape.latent
    if latent is None:
        attention: dict[str, Any] = dict(
            group_query_attention=shape.num_query_groups < shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            kv_channels=shape.head_dim,
            qk_layernorm=shape.qk_layernorm,
            add_qkv_bias=shape.qkv_bias,
            rotary_interleaved=shape.rotary.interleaved,
            multi_latent_attention=False,
            q_lora_rank=None,
            kv_lora_rank=None,
        )
    else:  # kv_channels, add_qkv_bias and rotary_interleaved have no effect in MLA, so any value is accepted
        attention = dict(
            multi_latent_attention=True,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            qk_head_dim=latent.qk_nope_head_dim,
            qk_pos_emb_head_dim=latent.qk_rope_head_dim,
            v_head_dim=latent.v_head_dim,
            qk_layernorm=True,
            num_query_groups=shape.num_query_groups,
        )
    return {
        **CONSTANT,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "layernorm_epsilon": shape.norm_epsilon,
        "post_self_attn_layernorm": shape.sandwich_norms,
        "post_mlp_layernorm": shape.sandwich_norms,
        "num_attention_heads": shape.num_attention_heads,
        **attention,
        "rotary_base": shape.rotary.base,
        "rotary_percent": shape.rotary.fraction,
        **_rope_scaling_options(shape),
        **_moe_options(shape),
    }


def training_args(shape: ModelShape) -> dict[str, Any]:
    """Return the arguments that a Megatron-LM training script for this model on one rank would store in its
    checkpoints."""
    options = model_options(shape)
    return {
        **options,
        "norm_epsilon": shape.norm_epsilon,
        "num_experts": shape.experts.num_experts if shape.experts else None,
        "swiglu": True,
        "kv_channels": options.get("kv_channels", shape.head_dim),
        "q_lora_rank": shape.latent.q_lora_rank if shape.latent else None,
        "seq_length": shape.max_position_embeddings,
        "padded_vocab_size": shape.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "ckpt_format": "torch_dist",
    }


def _rope_scaling_options(shape: ModelShape) -> dict[str, Any]:
    """Return the Megatron options for the model's RoPE scaling."""
    scaling = shape.rotary.scaling
    if isinstance(scaling, Llama3Scaling):
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if not isinstance(scaling, YarnScaling):
        return {"use_rope_scaling": False, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return dict(
        use_rope_scaling=False,
        rope_type="yarn",
        rotary_scaling_factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_positions,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        mscale=scaling.mscale,
        mscale_all_dim=scaling.mscale_all_dim,
    )


def _moe_options(shape: ModelShape) -> dict[str, Any]:
    """Return the Megatron options for the model's experts and their router."""
    experts = shape.experts
    if experts is None:
        return {"num_moe_experts": None}
    return dict(
        num_moe_experts=experts.num_experts,
        moe_layer_freq=[int(layer >= experts.num_dense_layers) for layer in range(shape.num_layers)],
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size or None,
        moe_router_topk=experts.top_k,
        moe_router_score_function=experts.score,
        # whether the scores are computed over all experts, before the selection of the top k
        moe_router_pre_softmax=experts.score == "sigmoid" or not experts.normalized,
        moe_router_num_groups=experts.num_groups,
        moe_router_group_topk=experts.top_groups,
        moe_router_topk_scaling_factor=experts.scaling,
        moe_router_enable_expert_bias=experts.bias,
        moe_router_bias_update_rate=0.0,  # the checkpoint's correction bias is frozen
    )
