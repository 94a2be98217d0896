"""`softmax.py` on a GPU, in Triton, which torch brings along. Only CUDA code imports this.

Plain torch passes over [t, V] in float32 about ten times, and back and forth through memory each time. A row's sums are added in one
fixed order whatever t is, so the same tokens give the same bits in any chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)  # below every logit; finite, so that 0 * LOWEST is no NaN
BLOCK, NUM_WARPS = 2048, 8


def sums(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `softmax.softmax_sums`."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    peak, total, weighted = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _sums[(rows,)](logits, peak, total, weighted, columns, float(temperature), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return peak, total, weighted


def gradient(
    logits: Tensor, temperature: float, peak: Tensor, flat: Tensor, tilted: Tensor | None, columns: Tensor, at_columns: Tensor
) -> Tensor:
    """See `softmax.softmax_gradient`."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    tilted = torch.zeros_like(flat) if tilted is None else tilted
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
    _gradient[grid](
        *(logits, out, peak, flat, tilted, columns, at_columns, logits.shape[1], float(temperature)),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit
def _sums(logits, peaks, totals, weighteds, columns, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row. Every lane keeps a peak of its own, and corrects its sums when that rises (online softmax, arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    lanes = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < columns, other=LOWEST).to(tl.float32) / temperature
        higher = tl.maximum(peak, x)
        lower = peak - higher
        share = tl.exp(lower)
        power = tl.exp(x - higher)
        weighted = (weighted + total * lower) * share + power * (x - higher)
        total = total * share + power
        peak = higher
    highest = tl.max(peak, 0)
    lower = peak - highest
    share = tl.exp(lower)
    tl.store(peaks + row, highest)
    tl.store(totals + row, tl.sum(total * share, 0))
    tl.store(weighteds + row, tl.sum((weighted + total * lower) * share, 0))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, out, peaks, flats, tilteds, targets, at_targets, columns, temperature, BLOCK: tl.constexpr
):
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=LOWEST).to(tl.float32) / temperature - tl.load(peaks + row)
    value = tl.exp(x) * (tl.load(flats + row) + tl.load(tilteds + row) * x)
    value += tl.where(column == tl.load(targets + row), tl.load(at_targets + row), 0.0)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)
