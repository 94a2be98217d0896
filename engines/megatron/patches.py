"""Patches for megatron-core 0.16.1: faster kernels, and fixes for modules that fail without TransformerEngine.

`l2_norm` and `scale` process the gradients of all parameters in one launch. Without them Megatron processes tensor by
tensor, and waits for the GPU at every norm. The arguments are those of apex's functions.

`add_weight_gradient` replaces two functions of apex's extension `fused_weight_gradient_mlp_cuda`. It adds the weight
gradient of a linear layer to the gradient buffer in the matrix product itself (`gradient_accumulation_fusion`). Without
it a bf16 gradient is written, read again and added to the fp32 buffer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

if torch.cuda.is_available():
    from penstock.engines.megatron import triton_kernels

MEGATRON_VERSION = "0.16.1"


def patch_module(module: ModuleType) -> None:
    """Patch a module of `megatron.core` right after its import: on a GPU replace functions by faster ones; without
    TransformerEngine correct modules that need it."""
    names: dict[str, Any] = vars(module)
    name, has_gpu = module.__name__.removeprefix("megatron.core."), torch.cuda.is_available()
    if has_gpu and name == "fusions.fused_bias_swiglu":
        names |= {
            "swiglu": triton_kernels.swiglu,
            "weighted_swiglu": triton_kernels.swiglu,
            "swiglu_back": triton_kernels.swiglu_back,
            "weighted_swiglu_back": triton_kernels.weighted_swiglu_back,
        }
    elif has_gpu and name == "tensor_parallel.layers":
        names["fused_weight_gradient_mlp_cuda"] = SimpleNamespace(
            wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
        )
        names["_grad_accum_fusion_available"] = True
    elif has_transformer_engine():
        return
    elif has_gpu and name == "optimizer.clip_grads":
        names["l2_norm_impl"], names["multi_tensor_scale_impl"] = l2_norm, scale
    elif name == "transformer.moe.moe_utils":
        names.setdefault("te_general_gemm", None)  # otherwise setting moe_router_dtype raises a NameError
    elif name == "transformer.multi_latent_attention":
        names["HAVE_TE"] = False  # Megatron sets True, mistaking its import placeholders for TransformerEngine
    elif name == "tensor_parallel.random":
        # Megatron treats the default fp8=False as enabled fp8, so recomputing norms raises a NameError.
        module.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    elif name == "optimizer.distrib_optimizer":
        # Unpatched, loading raises a KeyError: torch's AdamW has `step` in every parameter's state, a checkpoint does
        # not.
        optimizer: Any = module.DistributedOptimizer
        load_state = optimizer._set_main_param_and_optimizer_states

        def load_with_step(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
            group, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            step = {"step": state["step"].clone()} if "step" in state else {}
            load_state(self, model_param, {**step, **tensors})

        optimizer._set_main_param_and_optimizer_states = load_with_step


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed. If it is, Megatron uses its functions to clip gradients."""
    return importlib.util.find_spec("transformer_engine") is not None


def l2_norm(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the L2 norm of all elements of `tensors[0]`, fp32. [1]"""
    norms = torch._foreach_norm(list(tensors[0]))
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Set tensors[1][i] = tensors[0][i] * factor. The two lists may have the same tensors."""
    sources, targets = map(list, tensors)
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def add_weight_gradient(tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ tokens to `main_grad`, without rounding the product to the dtype of `tokens`.

    Args:
        tokens: [t, in] input of the layer.
        grad_output: [t, out] gradient of its output.
        main_grad: [out, in] gradient buffer of its weight, fp32 or of the dtype of `tokens`.
    """
    if tokens.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), tokens)
    else:
        torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), tokens, main_grad.dtype, out=main_grad)
