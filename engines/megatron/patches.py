"""Patches for megatron-core 0.16.1: faster kernels, and fixes for modules that fail without
TransformerEngine."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch

MEGATRON_VERSION = "0.16.1"


def patch_module(module: ModuleType) -> None:
    """Patch a module of `megatron.core` right after its import."""
    if torch.cuda.is_available():
        _replace_kernels(module.__name__, vars(module))
    if not has_transformer_engine():
        _fix(module)


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed. Megatron then clips gradients with its functions."""
    return importlib.util.find_spec("transformer_engine") is not None


def _replace_kernels(module: str, names: dict[str, Any]) -> None:
    """Replace functions by faster ones."""
    if module == "megatron.core.fusions.fused_bias_swiglu":
        from penstock.engines.megatron import triton_kernels

        for name in ("swiglu", "weighted_swiglu", "swiglu_back", "weighted_swiglu_back"):
            names[name] = getattr(triton_kernels, name)
    elif module == "megatron.core.tensor_parallel.layers":
        from penstock.engines.megatron import torch_kernels

        names["fused_weight_gradient_mlp_cuda"] = torch_kernels
        names["_grad_accum_fusion_available"] = True
    elif module == "megatron.core.optimizer.clip_grads" and not has_transformer_engine():
        from penstock.engines.megatron import torch_kernels

        names["l2_norm_impl"] = torch_kernels.l2_norm
        names["multi_tensor_scale_impl"] = torch_kernels.scale


def _fix(module: ModuleType) -> None:
    """Fix a module that fails without TransformerEngine."""
    names: dict[str, Any] = vars(module)
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        names.setdefault("te_general_gemm", None)  # otherwise setting moe_router_dtype raises a NameError
    elif module.__name__ == "megatron.core.transformer.multi_latent_attention":
        names["HAVE_TE"] = False  # Megatron sets True, mistaking its import placeholders for TransformerEngine
    elif module.__name__ == "megatron.core.tensor_parallel.random":
        # Megatron treats the default fp8=False like enabled fp8, so that recomputing norms raises a NameError.
        module.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    elif module.__name__ == "megatron.core.optimizer.distrib_optimizer":
        # Loading raises a KeyError: torch's AdamW has `step` in every parameter's state, but a checkpoint does not.
        optimizer: Any = module.DistributedOptimizer
        load_state = optimizer._set_main_param_and_optimizer_states

        def load_with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
            group, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            step = {"step": state["step"].clone()} if "step" in state else {}
            load_state(self, model_param, {**step, **tensors})

        optimizer._set_main_param_and_optimizer_states = load_with_step
