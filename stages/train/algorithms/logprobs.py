"""Compute log-probs and entropies of the trained tokens from hidden states, without materializing all logits at once.

The LM head runs on one chunk of positions at a time under activation checkpointing: the forward pass keeps only the
hidden states, and the backward pass recomputes the logits of a chunk. Without chunks, 16k tokens with a vocabulary of
152k would need 10 GB for the float32 logits, and 10 GB for their gradient. Three sums per token are saved instead of
the softmax. If a process group is given, the vocabulary is split over its ranks: rank i holds the i-th slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LMHead = Callable[[Tensor], Tensor]  # hidden [t, H] -> logits [t, V / group size]


def token_logprobs(
    hidden: Tensor,  # [N, H] at the position before each trained token
    head: LMHead,
    targets: Tensor,  # [N] ids of the trained tokens
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, ...]:  # [N] log-probs, [N] entropies; float32 or wider
    """Return the log-probs of `targets`, and the entropies of the full distributions, in nats, at `temperature`. The
    results are part of the autograd graph even for N = 0."""

    def compute_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return logits_logprobs(head(hidden), targets, temperature, group, entropy_gradient)

    return in_chunks(compute_chunk, chunk_size, hidden, targets)


def logits_logprobs(
    logits: Tensor,  # [t, V / group size]
    targets: Tensor,  # [t]
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy_gradient: bool,
) -> tuple[Tensor, ...]:  # [t] log-probs, [t] entropies
    """Return the log-probs and entropies of `token_logprobs` from the logits of a chunk."""
    result: tuple[Tensor, ...] = _LogProbs.apply(logits, targets, temperature, group, entropy_gradient)
    return result


def in_chunks(
    compute_chunk: Callable[..., tuple[Tensor, ...]], chunk_size: int, *inputs: Tensor
) -> tuple[Tensor, ...]:  # [N] each
    """Return the results of `compute_chunk`, called for chunks of the rows of `inputs` ([N, ...] each); the backward
    pass calls it again."""
    chunks = list(zip(*(tensor.split(chunk_size) for tensor in inputs), strict=True))
    # the backward pass begins with the last chunk: keeping its logits until then does not raise the peak memory
    recompute = [torch.is_grad_enabled()] * (len(chunks) - 1) + [False]
    results = [
        checkpoint(compute_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        if again
        else compute_chunk(*chunk)
        for chunk, again in zip(chunks, recompute, strict=True)
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


class _LogProbs(torch.autograd.Function):
    """Compute log softmax(logits / temperature) at the targets, and the entropy; `group` may split the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [t, V / group size]
        targets: Tensor,  # [t] global token ids
        temperature: float,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        local = targets - (0 if group is None else dist.get_rank(group) * columns)
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        at_target = torch.where(here, scale_logits(logits.gather(-1, local[:, None])[:, 0], temperature), 0.0)
        max_x, sum_exp, sum_x_exp = softmax_sums(logits, temperature)
        if group is not None:
            max_x, sum_exp, sum_x_exp, at_target = _combine_vocab_slices(max_x, sum_exp, sum_x_exp, at_target, group)

        log_sum = sum_exp.log()
        entropy = log_sum - sum_x_exp / sum_exp
        ctx.save_for_backward(logits, local, here, max_x, sum_exp, entropy)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return at_target - max_x - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients: d logprob / d logits = onehot - p, d entropy / d logits = -p (log p + entropy), with
        p = exp(logits - max_x) / sum_exp."""
        logits, local, here, max_x, sum_exp, entropy = ctx.saved_tensors
        grad_logprobs, factor = grads[0], 1 / (ctx.temperature * sum_exp)
        scale, slope = -grad_logprobs * factor, None
        if ctx.entropy_gradient:
            slope = -grads[1] * factor
            scale = scale + slope * (entropy - sum_exp.log())
        at_target = grad_logprobs * here / ctx.temperature
        return softmax_gradient(logits, ctx.temperature, max_x, scale, slope, local, at_target), None, None, None, None


def _combine_vocab_slices(
    max_x: Tensor, sum_exp: Tensor, sum_x_exp: Tensor, at_target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:  # [t] each
    """Combine the softmax sums of the ranks' vocabulary slices to those of the full vocabulary."""
    global_max = max_x.clone()
    dist.all_reduce(global_max, op=dist.ReduceOp.MAX, group=group)
    shift = max_x - global_max
    rescale = shift.exp()
    sums = torch.stack([sum_exp * rescale, (sum_x_exp + sum_exp * shift) * rescale, at_target])
    dist.all_reduce(sums, group=group)
    return global_max, *sums


# ---- the two passes over logits; on a GPU each is one kernel, and only the gradient has the size of the logits -------


def softmax_sums(
    logits: Tensor,  # [t, V]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [t] each, float32 or wider
    """Return three numbers per row, with x = logits / temperature: the maximum max_x, sum_exp = sum of exp(x - max_x),
    and sum_x_exp = sum of (x - max_x) exp(x - max_x)."""
    if _use_triton_kernel(logits):
        from penstock.stages.train.algorithms import softmax_kernels

        return softmax_kernels.softmax_sums(logits, temperature)
    x = scale_logits(logits, temperature)
    max_x = x.amax(-1)
    x = x - max_x[:, None]
    exp = x.exp()
    return max_x, exp.sum(-1), x.mul_(exp).sum(-1)  # on a CPU three times as fast as an einsum


def softmax_gradient(
    logits: Tensor,  # [t, V]
    temperature: float,
    max_x: Tensor,  # [t]
    scale: Tensor,  # [t]
    slope: Tensor | None,  # [t]; None: zeros
    columns: Tensor,  # [t] int64, the column of each row's sampled token
    at_columns: Tensor,  # [t], added in that column; 0 if another rank has the column
) -> Tensor:  # [t, V] in the dtype of logits, rounded once
    """Return the gradient of log-probs and entropies with respect to the logits, for the coefficients that the backward
    pass has computed: exp(x - max_x) * (scale + slope * (x - max_x)), x = logits / temperature, with `at_columns` added
    in the column of each row's sampled token."""
    if _use_triton_kernel(logits):
        from penstock.stages.train.algorithms import softmax_kernels

        return softmax_kernels.softmax_gradient(logits, temperature, max_x, scale, slope, columns, at_columns)
    x = scale_logits(logits, temperature) - max_x[:, None]
    if slope is None:
        gradient = x.exp_().mul_(scale[:, None])
    else:
        gradient = x.exp() * (scale[:, None] + slope[:, None] * x)
    return gradient.scatter_add_(-1, columns[:, None], at_columns[:, None]).to(logits.dtype)


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32 or wider; may return `logits` itself."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def _use_triton_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64
