"""Log-probs and entropy of the trained tokens, from hidden states, without ever holding logits for all of them.

The output layer runs on a chunk of positions at a time inside activation checkpointing: forward keeps the hidden states alone,
backward makes the chunk's logits again. A 152k vocabulary at 16k tokens would otherwise cost 10 GB for the float32 logits and as
much again for their gradient. Vocabulary-parallel when a process group is given: its rank i holds the i-th slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # hidden [t, H] -> logits [t, V / group size]


def token_logprobs(
    hidden: Tensor,  # [N, H] at the position before each trained token
    head: Head,
    targets: Tensor,  # [N] the trained tokens
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # [N] log-probs, [N] entropies; float32 or wider
    """Log-probs of `targets`, and entropies of the whole distribution at `temperature`. With N = 0 the graph is still there."""

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _LogProbs.apply(head(hidden), targets, temperature, group, entropy_gradient)

    pieces = [
        checkpoint(one_chunk, h, t, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else one_chunk(h, t)
        for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LogProbs(torch.autograd.Function):
    """log softmax(logits / temperature) at the targets, and the entropy, over a vocabulary that may be split over `group`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [t, V / group size]
        targets: Tensor,  # [t] global token ids
        temperature: float,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        peak = _reduce(scaled.amax(-1), group, dist.ReduceOp.MAX)
        scaled.sub_(peak[:, None])

        columns = scaled.shape[-1]
        local = targets - (0 if group is None else dist.get_rank(group) * columns)
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        at_target = _reduce(torch.where(here, scaled.gather(-1, local[:, None])[:, 0], 0.0), group)

        probs = scaled.exp()
        total = _reduce(probs.sum(-1), group)
        probs.div_(total[:, None])
        entropy = total.log() - _reduce(torch.einsum("tv,tv->t", probs, scaled), group)

        ctx.save_for_backward(probs, local, here, entropy)
        ctx.temperature, ctx.dtype, ctx.entropy_gradient = temperature, logits.dtype, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return at_target - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, local, here, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad = probs * -grad_logprobs[:, None]  # d logprob / d logits = onehot - probs
        grad.scatter_add_(-1, local[:, None], (grad_logprobs * here)[:, None])
        if ctx.entropy_gradient:  # d entropy / d logits = -probs (log probs + entropy)
            grad -= grad_entropy[:, None] * (torch.xlogy(probs, probs) + probs * entropy[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def _reduce(values: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
