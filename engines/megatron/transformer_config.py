"""Megatron-core's configuration of a model: what the checkpoint settles, what the parallel layout settles, our defaults, and the user's
`megatron` options, which may change the defaults and contradict nothing.

The model itself is built by `model.py`, the optimizer by `optimizer.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from engines.megatron.args import check_megatron_args
from engines.megatron.door import open_door
from engines.megatron.fit import check_fit, check_pipeline
from engines.megatron.model_options import contradictions, model_options
from engines.megatron.option_values import REFUSED
from engines.megatron.parallel import ParallelLayout
from engines.megatron.shape import ModelShape
from storage.errors import OptionError

open_door()

from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

MEANINGLESS = ("kv_channels", "add_qkv_bias", "rotary_interleaved")  # in latent attention; scripts give them all the same
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, layout: ParallelLayout | None = None, dtype: str = "fp32", overrides: dict[str, Any] | None = None
) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        shape: of the model.
        layout: parallel sizes.
        dtype: "fp32" or "bf16".
        overrides: the user's `megatron` options; those that this configuration has are taken from it.

    Raises:
        LayoutError: the shape and the layout do not fit.
        OptionError: an override contradicts the model.
    """
    layout, overrides = layout or ParallelLayout(), check_megatron_args(overrides or {})
    check_pipeline(shape, layout.pipeline, layout.virtual_pipeline, overrides)
    check_fit(shape, layout.tensor, layout.expert, layout.expert_tensor, layout.sequence_parallel)
    contradictions(shape, overrides)
    settled = model_options(shape)
    for name in (*settled, *(MEANINGLESS if shape.latent else ())):
        overrides.pop(name, None)  # it says the same
    for (name, value), reason in REFUSED.items():
        if overrides.get(name) == value:
            raise OptionError(f"megatron option {name} = {value!r} {reason}: drop it")
    fixed = {**settled, **_fixed(shape), **_layout_fields(layout, dtype)}
    config_class = MLATransformerConfig if shape.latent else TransformerConfig
    return config_class(**with_overrides(config_class, _defaults(torch.cuda.is_available()), overrides, fixed))


def with_overrides(
    config_class: type, defaults: dict[str, Any], overrides: dict[str, Any], fixed: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of one of Megatron's dataclasses: our defaults, what the user says of its fields, what is settled elsewhere.

    Raises:
        OptionError: the user contradicts what is settled elsewhere.
    """
    for name, value in overrides.items():
        if name in fixed and value != fixed[name]:
            raise OptionError(
                f"megatron option {name} = {value!r}, but the checkpoint or Penstock's own options say {fixed[name]!r}: drop it"
            )
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in {**defaults, **overrides, **fixed}.items() if name in known}


def _fixed(shape: ModelShape) -> dict[str, Any]:
    """What Penstock settles for every checkpoint. Of a mixture that is whatever would make training differ from the engine's model:
    dropped tokens, noise, losses that balance the load (Megatron scales them for means over tokens; our losses are plain sums)."""
    fixed: dict[str, Any] = dict(activation_func=F.silu, softmax_scale=None)
    if shape.experts:
        fixed |= dict(
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=None,
            moe_input_jitter_eps=None,
            moe_expert_capacity_factor=None,
            moe_apply_probs_on_input=False,
            moe_shared_expert_gate=False,
            moe_latent_size=None,
            moe_router_fusion=False,  # the choice is `routing.route`'s
            moe_enable_routing_replay=False,
            moe_grouped_gemm=False,  # one matrix for all experts: other names, and a package of its own
        )
    return fixed


def _layout_fields(layout: ParallelLayout, dtype: str) -> dict[str, Any]:
    return dict(
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
        variable_seq_lengths=layout.pipeline > 1,  # packs differ in length
        overlap_p2p_comm=layout.virtual_pipeline is not None,  # with gloo anything else is silently wrong
        batch_p2p_comm=layout.virtual_pipeline is None,
        calculate_per_token_loss=True,  # gradients are plain sums: the loss brings its own denominators
    )


def _defaults(cuda: bool) -> dict[str, Any]:
    """Choices that fit an installation without TransformerEngine and apex. A user may change them."""
    return dict(
        transformer_impl="local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=cuda,
        bias_activation_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # the other one refuses packs of varying length, also in a dense model
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        cross_entropy_loss_fusion=False,  # casts gradients to bf16 in an fp32 model
        use_cpu_initialization=not cuda,
        perform_initialization=True,  # without it weights lack the attributes that tell how they are sharded
    )
