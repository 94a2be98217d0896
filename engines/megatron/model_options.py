"""What Megatron's options would say of a model: the check of model files and flags against the checkpoint.

A model needs no such option, for its shape is read from the checkpoint. Whoever gives one all the same (a file of
`configs/models`, a flag of a Megatron-LM script) means a certain model, and hears at once if the checkpoint is another.
The configuration that Megatron gets is `transformer_config.py`'s.
"""

from __future__ import annotations

from typing import Any

from engines.megatron.args import check_megatron_args
from engines.megatron.shape import LatentAttention, Llama3Scaling, ModelShape, YarnScaling
from storage.errors import OptionError

CONSTANT: dict[str, Any] = dict(  # alike in every family, so model files leave them out
    add_bias_linear=False,
    gated_linear_unit=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    use_rotary_position_embeddings=True,
    no_position_embedding=True,  # learned ones
    mtp_num_layers=None,  # such layers are carried along, not trained
)


def contradictions(shape: ModelShape, megatron_options: dict[str, Any]) -> None:
    """Check that options describe this model, as far as they describe any.

    Args:
        shape: of the checkpoint.
        megatron_options: from files and flags, under any of Megatron's spellings.

    Raises:
        OptionError: one that does not, with both values; or one that Megatron does not know.
    """
    settled = model_options(shape)
    for name, value in check_megatron_args(megatron_options).items():
        if name == "moe_layer_freq" and isinstance(value, int) and value:
            value = [int(layer % value == 0) for layer in range(shape.num_layers)]  # Megatron's word for one layer in `value`
        if name in settled and value != settled[name] and (value or settled[name]):  # no experts, no groups: 0 and None alike
            raise OptionError(
                f"megatron option {name} = {value!r}, but the {shape.architecture} of this checkpoint, as Penstock trains it, "
                f"has {settled[name]!r}: drop the option or give the checkpoint that it describes"
            )


def model_options(shape: ModelShape) -> dict[str, Any]:
    """Every option that the checkpoint settles, under the names of Megatron's fields or of its command line."""
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
        **(_grouped(shape) if shape.latent is None else _latent(shape, shape.latent)),
        "rotary_base": shape.rotary.base,
        "rotary_percent": shape.rotary.fraction,
        **_scaling(shape),
        **_experts(shape),
    }


def training_args(shape: ModelShape) -> dict[str, Any]:
    """Return what the arguments of a Megatron training script would be for this model on one rank, as its checkpoints record them."""
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


def _grouped(shape: ModelShape) -> dict[str, Any]:
    return dict(
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


def _latent(shape: ModelShape, latent: LatentAttention) -> dict[str, Any]:
    """Megatron gives `kv_channels`, `add_qkv_bias` and `rotary_interleaved` no meaning here, and scripts give them any value."""
    return dict(
        multi_latent_attention=True,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_nope_head_dim,
        qk_pos_emb_head_dim=latent.qk_rope_head_dim,
        v_head_dim=latent.v_head_dim,
        qk_layernorm=True,
        num_query_groups=shape.num_query_groups,
    )


def _scaling(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rotary.scaling
    options: dict[str, Any] = {"use_rope_scaling": isinstance(scaling, Llama3Scaling)}
    if isinstance(scaling, Llama3Scaling):
        return options | {"rope_scaling_factor": scaling.factor}
    if not isinstance(scaling, YarnScaling):
        return options | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return options | dict(
        rope_type="yarn",
        rotary_scaling_factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_positions,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        mscale=scaling.mscale,
        mscale_all_dim=scaling.mscale_all_dim,
    )


def _experts(shape: ModelShape) -> dict[str, Any]:
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
        moe_router_pre_softmax=experts.score == "sigmoid" or not experts.normalized,  # scores of all experts, not of the chosen
        moe_router_num_groups=experts.num_groups,
        moe_router_group_topk=experts.top_groups,
        moe_router_topk_scaling_factor=experts.scaling,
        moe_router_enable_expert_bias=experts.bias,
        moe_router_bias_update_rate=0.0,  # the correction is the checkpoint's, and stays
    )
