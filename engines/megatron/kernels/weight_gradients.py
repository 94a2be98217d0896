"""Weight gradients of linear layers, added to the gradient buffer by the matrix product that computes them.

Megatron-core calls these functions for `gradient_accumulation_fusion` in place of apex's extension
`fused_weight_gradient_mlp_cuda`. Without them a bf16 gradient is written, read again and added to the fp32 buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
