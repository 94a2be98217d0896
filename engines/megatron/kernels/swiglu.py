"""Triton kernels for SwiGLU, silu(gate) * up, and its gradient. Imported on GPUs only; torch installs Triton.

Megatron compiles both with torch. Its gradient computes both halves of the result for every element and takes twice
the time of its bytes (H200; `benchmarks/gpu/step.py --profile`); calling its compiled forward pass takes the host twice
as long as launching a kernel (H100). The names and arguments are those of the functions in
`megatron.core.fusions.fused_bias_swiglu` that this module replaces (`patches.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 1024, 4


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, computed in fp32. [..., 2 * F] -> [..., F]"""
    return _swiglu(gate_up, None)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight, computed in fp32. [n, 2 * F], [n, 1] -> [n, F]"""
    return _swiglu(gate_up, weights.contiguous())


def _swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    gate_up, ffn = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], ffn)
    if out.numel():
        swiglu_kernel[(out.numel() // ffn,)](out, gate_up, weights, ffn, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of silu(gate) * up. [..., F], [..., 2 * F] -> [..., 2 * F]"""
    return _swiglu_back(grad, gate_up, None)[0]


def weighted_swiglu_back(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of silu(gate) * up * weight with respect to [gate, up] and the weights.
    [n, F], [n, 2 * F], [n, 1] -> [n, 2 * F], [n, 1]"""
    gate_up_grad, weight_grads = _swiglu_back(grad, gate_up, weights.contiguous())
    assert weight_grads is not None
    return gate_up_grad, weight_grads


def _swiglu_back(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    out, weight_grads = torch.empty_like(gate_up), None if weights is None else torch.empty_like(weights)
    ffn = grad.shape[-1]
    if grad.numel():
        arguments = (out, weight_grads, grad, gate_up, weights, ffn)
        swiglu_back_kernel[(grad.numel() // ffn,)](*arguments, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out, weight_grads


@triton.jit
def swiglu_kernel(out, gate_up, weights, ffn, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, ffn, BLOCK):
        column = start + lanes
        inside = column < ffn
        gate = tl.load(gate_up + row * 2 * ffn + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * ffn + ffn + column, mask=inside, other=0.0).to(tl.float32)
        product = gate * tl.sigmoid(gate) * up
        if weights is not None:
            product *= tl.load(weights + row).to(tl.float32)
        tl.store(out + row * ffn + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_back_kernel(out, weight_grads, grad, gate_up, weights, ffn, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one row; sum the gradient of its weight over the row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    for start in range(0, ffn, BLOCK):
        column = start + lanes
        inside = column < ffn
        slope = tl.load(grad + row * ffn + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + row * 2 * ffn + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * ffn + ffn + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if weights is not None:
            weight_grad += silu * up * slope
            slope *= tl.load(weights + row).to(tl.float32)
        gate_grad = slope * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(out + row * 2 * ffn + column, gate_grad.to(out.dtype.element_ty), mask=inside)
        tl.store(out + row * 2 * ffn + ffn + column, (slope * silu).to(out.dtype.element_ty), mask=inside)
    if weights is not None:
        tl.store(weight_grads + row, tl.sum(weight_grad, 0).to(weight_grads.dtype.element_ty))
