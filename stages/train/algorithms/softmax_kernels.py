"""Triton kernels of `softmax_sums` and `softmax_gradient` in `logprobs.py`. Imported on GPUs only; torch installs
Triton.

Plain torch reads and writes float32 tensors of the size of the logits about ten times; these kernels read the logits
twice and write the gradient once. The order of summation within a row does not depend on the number of rows, so a token
gives the same bits in any chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)  # below every logit; finite, so that 0 * LOWEST is not NaN
BLOCK, NUM_WARPS = 2048, 8


def softmax_sums(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over each row of logits that log-prob and entropy need, with one kernel. `logprobs.softmax_sums`
    is the same function in torch, and defines the three results."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    max_x, sum_exp, sum_x_exp = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _sums_kernel[(rows,)](
        logits, max_x, sum_exp, sum_x_exp, columns, float(temperature), BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return max_x, sum_exp, sum_x_exp


def softmax_gradient(
    logits: Tensor,
    temperature: float,
    max_x: Tensor,
    scale: Tensor,
    slope: Tensor | None,
    columns: Tensor,
    at_columns: Tensor,
) -> Tensor:
    """Return the gradient with respect to the logits, with one kernel. `logprobs.softmax_gradient` is the same function
    in torch, and explains the arguments."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    slope = torch.zeros_like(scale) if slope is None else slope
    per_row = torch.stack([max_x, scale, slope, at_columns], dim=1)  # [t, 4]
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
    arguments = (logits, out, per_row, columns, logits.shape[1], float(temperature))
    _gradient_kernel[grid](*arguments, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@triton.jit
def _sums_kernel(logits, max_xs, sum_exps, sum_x_exps, columns, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the softmax sums of one row. Every lane keeps a running maximum, and rescales its sums when the maximum
    rises (online softmax, arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    lanes = tl.arange(0, BLOCK)
    max_x = tl.full([BLOCK], LOWEST, tl.float32)
    sum_exp = tl.zeros([BLOCK], tl.float32)
    sum_x_exp = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < columns, other=LOWEST).to(tl.float32) / temperature
        new_max = tl.maximum(max_x, x)
        shift = max_x - new_max
        rescale = tl.exp(shift)
        exp = tl.exp(x - new_max)
        sum_x_exp = (sum_x_exp + sum_exp * shift) * rescale + exp * (x - new_max)
        sum_exp = sum_exp * rescale + exp
        max_x = new_max
    row_max = tl.max(max_x, 0)
    shift = max_x - row_max
    rescale = tl.exp(shift)
    tl.store(max_xs + row, row_max)
    tl.store(sum_exps + row, tl.sum(sum_exp * rescale, 0))
    tl.store(sum_x_exps + row, tl.sum((sum_x_exp + sum_exp * shift) * rescale, 0))


@triton.jit
def _gradient_kernel(logits, out, per_row, targets, columns, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the gradient of one block of columns of one row of logits."""
    row = tl.program_id(0).to(tl.int64)
    max_x = tl.load(per_row + 4 * row)
    scale = tl.load(per_row + 4 * row + 1)
    slope = tl.load(per_row + 4 * row + 2)
    at_target = tl.load(per_row + 4 * row + 3)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=LOWEST).to(tl.float32) / temperature - max_x
    value = tl.exp(x) * (scale + slope * x)
    value += tl.where(column == tl.load(targets + row), at_target, 0.0)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)
