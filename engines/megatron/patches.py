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
    names: dict[str, Any] = vars(module)
    if module.__name__ == "megatron.core.fusions.fused_bias_swiglu" and torch.cuda.is_available():
        from penstock.engines.megatron.kernels import swiglu

        names["swiglu_back"] = swiglu.swiglu_back
        names["weighted_swiglu_back"] = swiglu.weighted_swiglu_back
    elif module.__name__ == "megatron.core.tensor_parallel.layers" and torch.cuda.is_available():
        from penstock.engines.megatron.kernels import weight_gradients

        names["fused_weight_gradient_mlp_cuda"] = weight_gradients
        names["_grad_accum_fusion_available"] = True
    elif importlib.util.find_spec("transformer_engine") is not None:
        return
    elif module.__name__ == "megatron.core.transformer.moe.moe_utils":
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
