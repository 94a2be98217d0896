"""Triton kernels, imported on GPUs only; torch installs Triton.

The first kernels compute RMSNorm, RoPE, or both, forward and backward; each pass reads and writes the tokens once.
torch's RMSNorm and a compiled RoPE take 2 to 5 times as long (H200, heads of 128; `benchmarks/gpu/step.py
--profile`). `RMSNorm` and `apply_rope_unfused` of `model/norm_and_rope.py` are the same functions in torch. Results
do not depend on the GPU's number of processors, and repeat bit for bit.

The other kernels compute SwiGLU, silu(gate) * up, and its gradient. Megatron compiles both with torch. Its gradient
computes both halves of the result for every element and takes twice as long as reading and writing its bytes (H200;
`benchmarks/gpu/step.py --profile`); calling its compiled forward pass takes the host twice as long as launching a
kernel (H100). The functions here replace functions of `megatron.core.fusions.fused_bias_swiglu` (`patches.py`), and
have the names and arguments of these.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # number of elements of x that a program processes at a time
PARTIAL_SUMS = 2**21  # maximum elements of the partial sums of a weight's gradient, of all backward programs together


def normalize_and_rotate(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Return RoPE(x / rms(x) * weight), computed in fp32. [t, heads, dim] -> [t, heads, dim], contiguous

    Args:
        x: the last dimension must be contiguous, and have an even size.
        weight: [dim] weight of RMSNorm; None: no normalization.
        eps: epsilon of RMSNorm.
        cos_sin: cosines and sines, [t, 1, dim] each, fp32; None: no RoPE.
        interleaved: as in `apply_rope`; only with RoPE.
    """
    cosines, sines = cos_sin or (None, None)
    out: Tensor = NormalizeAndRotate.apply(x, weight, cosines, sines, eps, interleaved)
    return out


class NormalizeAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        cosines: Tensor | None,
        sines: Tensor | None,
        eps: float,
        interleaved: bool,
    ) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight, cosines, sines)
        ctx.eps, ctx.interleaved = eps, interleaved
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tile, num_warps = _tile(x, interleaved)
        grid = (triton.cdiv(x.shape[0] * x.shape[1], tile[2]),)
        forward_kernel[grid](out, x, weight, (cosines, sines), _sizes(x), eps, tile, num_warps=num_warps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cosines, sines = ctx.saved_tensors
        grad = grads[0].contiguous()
        tile, num_warps = _tile(x, ctx.interleaved)
        tiles = triton.cdiv(x.shape[0] * x.shape[1], tile[2])
        tiles_per_program = max(1, triton.cdiv(tiles * x.shape[2], PARTIAL_SUMS))
        programs = triton.cdiv(tiles, tiles_per_program)
        x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weight_grads = None
        if weight is not None:
            weight_grads = torch.empty(programs, x.shape[2], dtype=torch.float32, device=x.device)
        sizes = (*_sizes(x), tiles_per_program)
        backward_kernel[(programs,)](
            (x_grad, weight_grads), grad, (x, weight), (cosines, sines), sizes, ctx.eps, tile, num_warps=num_warps
        )
        weight_grad = None
        if weight_grads is not None and ctx.needs_input_grad[1]:  # --lora-rank freezes the weight
            weight_grad = weight_grads.sum(0).to(weight.dtype)
        return x_grad, weight_grad, None, None, None, None


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Return the number of rows (heads of all tokens), heads of a token, and the strides of tokens and heads."""
    return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


def _tile(x: Tensor, interleaved: bool) -> tuple[tuple[int, int, int, bool], int]:
    """Return the kernels' compile-time arguments (pairs of a head, their next power of two, rows that a program
    processes at a time, `interleaved`), and the number of warps."""
    half = x.shape[2] // 2
    block = triton.next_power_of_2(half)
    return (half, block, max(1, ELEMENTS // (2 * block)), interleaved), min(16, max(4, block // 256))


@triton.jit
def _lanes(HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the indices of the first and of the second dimension of each RoPE pair. [BLOCK] each"""
    lane = tl.arange(0, BLOCK)
    return (2 * lane, 2 * lane + 1) if INTERLEAVED else (lane, lane + HALF)


@triton.jit
def forward_kernel(out, x, weight, cos_sin, sizes, eps, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalize and rotate the rows (heads) of one tile. The dimensions of a row are processed as `HALF` pairs, also
    without RoPE, where the pairs have no meaning."""
    HALF: tl.constexpr = TILE[0]
    BLOCK: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    NORM: tl.constexpr = weight is not None
    ROTATE: tl.constexpr = cos_sin[0] is not None
    num_rows, heads, token_stride, head_stride = sizes
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    lane = tl.arange(0, BLOCK)
    one, two = _lanes(HALF, BLOCK, TILE[3])
    inside = (row < num_rows)[:, None] & (lane < HALF)[None, :]
    at = (token * token_stride + row % heads * head_stride)[:, None]
    first = tl.load(x + at + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + two, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        first *= scale * tl.load(weight + one, mask=lane < HALF, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + two, mask=lane < HALF, other=0.0).to(tl.float32)
    if ROTATE:
        if NORM:  # torch's norm returns the dtype of x, too
            first = first.to(x.dtype.element_ty).to(tl.float32)
            second = second.to(x.dtype.element_ty).to(tl.float32)
        at = token[:, None] * (2 * HALF) + lane
        cosine = tl.load(cos_sin[0] + at, mask=inside, other=0.0)
        sine = tl.load(cos_sin[1] + at, mask=inside, other=0.0)
        first, second = first * cosine - second * sine, second * cosine + first * sine
    at = row[:, None] * (2 * HALF) + lane
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(out, grad, inputs, cos_sin, sizes, eps, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the gradient of x in `tiles_per_program` tiles, and the sum of the weight's gradient over these tiles.

    With n = x / rms(x) and h = grad * weight, the gradient of x is (h - n * mean(h * n)) / rms(x).
    """
    HALF: tl.constexpr = TILE[0]
    BLOCK: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    x_grad, weight_grads = out
    x, weight = inputs
    NORM: tl.constexpr = weight is not None
    ROTATE: tl.constexpr = cos_sin[0] is not None
    num_rows, heads, token_stride, head_stride, tiles_per_program = sizes
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    one, two = _lanes(HALF, BLOCK, TILE[3])
    sum_one = tl.zeros([BLOCK], tl.float32)
    sum_two = tl.zeros([BLOCK], tl.float32)
    for tile in range(tiles_per_program):
        row = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        token = row // heads
        inside = (row < num_rows)[:, None] & (lane < HALF)[None, :]
        at = row[:, None] * (2 * HALF)
        first = tl.load(grad + at + lane, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(grad + at + lane + HALF, mask=inside, other=0.0).to(tl.float32)
        if ROTATE:
            angle = token[:, None] * (2 * HALF) + lane
            cosine = tl.load(cos_sin[0] + angle, mask=inside, other=0.0)
            sine = tl.load(cos_sin[1] + angle, mask=inside, other=0.0)
            first, second = first * cosine + second * sine, second * cosine - first * sine
        if NORM:
            x_at = (token * token_stride + row % heads * head_stride)[:, None]
            n_one = tl.load(x + x_at + one, mask=inside, other=0.0).to(tl.float32)
            n_two = tl.load(x + x_at + two, mask=inside, other=0.0).to(tl.float32)
            mean = (tl.sum(n_one * n_one, 1) + tl.sum(n_two * n_two, 1)) / (2 * HALF)
            scale = tl.rsqrt(mean + eps)[:, None]
            n_one *= scale
            n_two *= scale
            sum_one += tl.sum(first * n_one, 0)
            sum_two += tl.sum(second * n_two, 0)
            first *= tl.load(weight + one, mask=lane < HALF, other=0.0).to(tl.float32)
            second *= tl.load(weight + two, mask=lane < HALF, other=0.0).to(tl.float32)
            dot = (tl.sum(first * n_one, 1) + tl.sum(second * n_two, 1)) / (2 * HALF)
            first = (first - n_one * dot[:, None]) * scale
            second = (second - n_two * dot[:, None]) * scale
        tl.store(x_grad + at + one, first.to(x_grad.dtype.element_ty), mask=inside)
        tl.store(x_grad + at + two, second.to(x_grad.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(weight_grads + program * (2 * HALF) + one, sum_one, mask=lane < HALF)
        tl.store(weight_grads + program * (2 * HALF) + two, sum_two, mask=lane < HALF)


BLOCK, NUM_WARPS = 1024, 4


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up * weight, computed in fp32; None: all weights are 1. [..., 2 * F], [..., 1] -> [..., F]"""
    gate_up, ffn = gate_up.contiguous(), gate_up.shape[-1] // 2
    if weights is not None:
        weights = weights.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], ffn)
    if out.numel():
        swiglu_kernel[(out.numel() // ffn,)](out, gate_up, weights, ffn, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of silu(gate) * up. [..., F], [..., 2 * F] -> [..., 2 * F]"""
    return weighted_swiglu_back(grad, gate_up, None)[0]


def weighted_swiglu_back(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of silu(gate) * up * weight with respect to [gate, up] and the weights.
    [n, F], [n, 2 * F], [n, 1] -> [n, 2 * F], [n, 1]"""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    if weights is not None:
        weights = weights.contiguous()
    out, weight_grads = torch.empty_like(gate_up), None if weights is None else torch.empty_like(weights)
    ffn = grad.shape[-1]
    if grad.numel():
        arguments = (out, weight_grads, grad, gate_up, weights, ffn)
        swiglu_back_kernel[(grad.numel() // ffn,)](*arguments, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out, weight_grads


@triton.jit
def swiglu_kernel(out, gate_up, weights, ffn, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute SwiGLU for one row of tokens; the arguments are those of `swiglu`."""
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
    """Compute the gradient of SwiGLU for one row; the arguments are those of `weighted_swiglu_back`."""
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
