"""Build Megatron-core's `TransformerConfig` of a model, and choose the kernel of causal attention over packed sequences
(`--attention-backend`).

The configuration's fields come from the checkpoint and the parallel layout (fixed), from Penstock's defaults, and from
`MegatronOptions`, which may change the defaults. `gpt.py` builds the model, `optimizer.py` the optimizer.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import distributions
from typing import Any, Literal

import torch
import torch.nn.functional as F

from penstock.engines.families.shape import Llama3Scaling, ModelShape, YarnScaling
from penstock.engines.megatron.compat import import_megatron
from penstock.engines.parallel_layout import (
    ParallelLayout,
    check_grouped_experts,
    check_model_parallel,
    check_pipeline,
    has_grouped_experts,
    unaligned_row,
)
from penstock.storage.errors import OptionError, check_rules

import_megatron()

from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

# "padded": batches of sequences of similar length, any device and dtype; "torch": torch's variable-length
# FlashAttention-2; "fa4": FlashAttention-4
AttentionKernel = Literal["padded", "torch", "fa4"]
FA4 = "flash-attn-4"  # package
FA4_WIDTHS = ((64, 64), (128, 128), (192, 128))  # tested head dimensions: (of keys, of values)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Fixed values of MoE fields. Other values would drop tokens or add noise, which the engines do not do, or would add
# load-balancing losses, which Megatron scales for losses that are means over tokens (Penstock's losses are sums).
MOE_FIXED: dict[str, Any] = dict(
    moe_aux_loss_coeff=0.0,
    moe_z_loss_coeff=None,
    moe_input_jitter_eps=None,
    moe_expert_capacity_factor=None,
    moe_apply_probs_on_input=False,
    moe_shared_expert_gate=False,
    moe_latent_size=None,
    moe_router_fusion=False,  # `layers.select_experts` selects the experts
    moe_enable_routing_replay=False,
)
# Defaults for an installation without TransformerEngine and apex.
DEFAULTS: dict[str, Any] = dict(
    transformer_impl="local",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    masked_softmax_fusion=False,
    apply_rope_fusion=False,
    persist_layer_norm=False,
    bias_dropout_fusion=False,  # without bias and dropout only the residual addition is left: one kernel of torch
    moe_token_dispatcher_type="alltoall",  # "allgather" needs micro-batches of equal length, even without experts
    moe_router_load_balancing_type="none",
    moe_router_dtype="fp32",
    cross_entropy_loss_fusion=False,  # the fused kernel casts gradients to bf16, even in an fp32 model
    perform_initialization=True,  # otherwise weights do not have the attributes that describe their sharding
)
CONSTANT: dict[str, Any] = dict(  # options with the same value in every supported model family
    add_bias_linear=False,
    gated_linear_unit=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    use_rotary_position_embeddings=True,
    no_position_embedding=True,  # no learned position embeddings
    mtp_num_layers=None,  # multi-token prediction layers are kept in checkpoints, but not trained
)


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout | None = None,
    dtype: str = "fp32",
    overrides: dict[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's `TransformerConfig` of a model. `overrides` replace Penstock's defaults, but not the values
    that the checkpoint or the layout determines; options that are not its fields are ignored."""
    layout, overrides = layout or ParallelLayout(), dict(overrides or {})
    check_pipeline(shape, layout.pipeline, layout.virtual_pipeline, overrides)
    check_model_parallel(shape, layout.tensor, layout.expert, layout.expert_tensor, layout.sequence_parallel)
    cuda = torch.cuda.is_available()
    on_gpus = ("bias_activation_fusion", "gradient_accumulation_fusion")
    defaults = dict(**DEFAULTS, **dict.fromkeys(on_gpus, cuda), use_cpu_initialization=not cuda)
    if uses_grouped_experts(shape, layout.expert_tensor or layout.tensor, dtype, overrides):
        defaults["moe_grouped_gemm"] = True
    # `grouped_experts.TokenDispatcher` permutes the tokens; Megatron's fused permutation needs an additional package.
    overrides.pop("moe_permute_fusion", None)
    fixed = {
        **model_options(shape),
        **dict(activation_func=F.silu, softmax_scale=None),
        **(MOE_FIXED if shape.experts else {}),
        **dict(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
            params_dtype=DTYPES[dtype],
            pipeline_dtype=DTYPES[dtype],
            bf16=dtype == "bf16",
            variable_seq_lengths=layout.pipeline > 1,  # micro-batches differ in length
            # With gloo any other combination of these two fields gives wrong results without an error.
            overlap_p2p_comm=layout.virtual_pipeline is not None,
            batch_p2p_comm=layout.virtual_pipeline is None,
            calculate_per_token_loss=True,  # Megatron sums gradients without scaling; the loss function normalizes
        ),
    }
    config_class = MLATransformerConfig if shape.latent else TransformerConfig
    return config_class(**merge_overrides(config_class, defaults, overrides, fixed))


def uses_grouped_experts(shape: ModelShape, expert_tensor: int, dtype: str, overrides: dict[str, Any]) -> bool:
    """Return whether grouped GEMMs compute the experts: as options decide, otherwise on GPUs on which the kernels were
    tested. Raises OptionError if an option needs what the model or the GPU does not have."""
    size, has_kernel = DTYPES[dtype].itemsize, runs_hopper_kernels(dtype)
    is_grouped = has_grouped_experts(shape, overrides, has_kernel and not unaligned_row(shape, expert_tensor, size))
    if is_grouped:
        check_grouped_experts(shape, expert_tensor, size)
    if is_grouped and torch.cuda.is_available() and not has_kernel:
        raise OptionError(
            "--moe-grouped-gemm and --moe-permute-fusion need bf16 and Hopper GPUs; found "
            f"{dtype} on {torch.cuda.get_device_name()}: omit the options"
        )
    return is_grouped


def merge_overrides(
    config_class: type, defaults: dict[str, Any], overrides: dict[str, Any], fixed: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments for one of Megatron's configuration dataclasses: `overrides` replace `defaults`, and `fixed`
    values always apply; names that are not fields of the dataclass are left out."""
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in {**defaults, **overrides, **fixed}.items() if name in known}


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
    """Return the arguments that a Megatron-LM training script on one rank would store in its checkpoints."""
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


def choose_attention_kernel(backend: str | None, dtype: str, shape: ModelShape) -> AttentionKernel:
    """Return the kernel that the value `backend` of `--attention-backend` means on this machine. "auto", "flash",
    "fused" and None: in bf16 on a GPU "fa4" if it is installed and supports the GPU and the widths of the heads, else
    "torch"; without a GPU or in fp32 "padded"."""
    if backend in ("unfused", "local"):
        return "padded"
    kernel = torch_attention_kernel(dtype)
    found = f"{dtype} on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}"
    widths = (shape.head_dim, shape.latent.v_head_dim if shape.latent else shape.head_dim)
    problem = "" if widths in FA4_WIDTHS else f"heads of {widths}"  # why FlashAttention-4 does not work
    if not runs_hopper_kernels(dtype):
        problem = found
    elif not any(distributions(name=FA4)):
        problem = "no such package"
    rules = (
        (
            backend == "torch" and kernel == "padded",
            f"--attention-backend torch needs bf16 on a GPU; found {found}: use auto",
        ),
        (
            backend == "fa4" and problem,
            f"--attention-backend fa4 needs bf16 on a Hopper GPU, the package {FA4}, and heads of "
            f"{' or '.join(map(str, FA4_WIDTHS))} (keys, values); found {problem}: use auto",
        ),
    )
    check_rules(rules)
    return kernel if problem or backend == "torch" else "fa4"


def runs_hopper_kernels(dtype: str) -> bool:
    """Return whether FlashAttention-4 and torch's grouped GEMM run here. They were tested in bf16 on Hopper only."""
    return torch.cuda.is_available() and dtype == "bf16" and torch.cuda.get_device_capability()[0] == 9


def torch_attention_kernel(dtype: str) -> AttentionKernel:
    """Return the faster of torch's two kernels that works for `dtype` on this machine."""
    return "torch" if torch.cuda.is_available() and dtype == "bf16" else "padded"
