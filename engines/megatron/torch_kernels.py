"""Faster replacements of functions that Megatron takes from TransformerEngine or apex (`patches.py`).

`l2_norm` and `scale` process the gradients of all parameters in one launch. Without them Megatron processes tensor by
tensor, and waits for the GPU at every norm. The arguments are those of apex's functions.

The `wgrad_gemm_*` functions, named as in apex's extension `fused_weight_gradient_mlp_cuda`, add weight gradients of
linear layers to the gradient buffer in the matrix product (`gradient_accumulation_fusion`). Without them a bf16
gradient is written, read again and added to the fp32 buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def l2_norm(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the L2 norm of all elements of `tensors[0]`. [1]

    Args:
        chunk_size, flag: not used.
        tensors: one list of fp32 tensors.
    """
    norms = torch._foreach_norm(list(tensors[0]))
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Set tensors[1][i] = tensors[0][i] * factor.

    Args:
        chunk_size, flag: not used.
        tensors: two lists of tensors of equal shapes, which may be the same tensors.
        factor: the factor.
    """
    sources, targets = map(list, tensors)
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def wgrad_gemm_accum_fp32(tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ tokens to `main_grad`, without rounding the product to bf16.

    Args:
        tokens: [t, in] input of the layer.
        grad_output: [t, out] gradient of its output.
        main_grad: [out, in] gradient buffer of its weight, fp32.
    """
    if tokens.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), tokens)
    else:
        torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), tokens, main_grad.dtype, out=main_grad)


def wgrad_gemm_accum_fp16(tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ tokens to `main_grad`, which has the same dtype; shapes as of `wgrad_gemm_accum_fp32`."""
    main_grad.addmm_(grad_output.t(), tokens)
