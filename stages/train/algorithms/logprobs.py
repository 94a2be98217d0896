"""Log-probs and entropy of the trained tokens, from hidden states, without ever holding logits for all of them.

The output layer runs on a chunk of positions at a time inside activation checkpointing: forward keeps the hidden states alone,
backward makes the chunk's logits again. A 152k vocabulary at 16k tokens would otherwise cost 10 GB for the float32 logits and as
much again for their gradient. No softmax is kept either, but three sums per token (`softmax.py`). Vocabulary-parallel when a process
group is given: its rank i holds the i-th slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.train.algorithms.softmax import softmax_gradient, softmax_sums, widened

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

    chunks = list(zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True))
    # backward begins with the last chunk: keeping its logits until then does not raise the peak
    again = [torch.is_grad_enabled()] * (len(chunks) - 1) + [False]
    pieces = [
        checkpoint(one_chunk, h, t, use_reentrant=False, preserve_rng_state=False) if recompute else one_chunk(h, t)
        for (h, t), recompute in zip(chunks, again, strict=True)
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
        columns = logits.shape[-1]
        local = targets - (0 if group is None else dist.get_rank(group) * columns)
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        at_target = torch.where(here, widened(logits.gather(-1, local[:, None])[:, 0], temperature), 0.0)
        peak, total, weighted, at_target = _over_ranks(*softmax_sums(logits, temperature), at_target, group)

        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, here, peak, total, entropy)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return at_target - peak - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot - p, d entropy / d logits = -p (log p + entropy), with p = exp(logits - peak) / total."""
        logits, local, here, peak, total, entropy = ctx.saved_tensors
        grad_logprobs, scale = grads[0], 1 / (ctx.temperature * total)
        flat, tilted = -grad_logprobs * scale, None
        if ctx.entropy_gradient:
            tilted = -grads[1] * scale
            flat = flat + tilted * (entropy - total.log())
        at_target = grad_logprobs * here / ctx.temperature
        return softmax_gradient(logits, ctx.temperature, peak, flat, tilted, local, at_target), None, None, None, None


def _over_ranks(
    peak: Tensor, total: Tensor, weighted: Tensor, at_target: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:  # [t] each
    """The sums over this rank's slice of the vocabulary, put together with the other slices'."""
    if group is None:
        return peak, total, weighted, at_target
    highest = peak.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    lower = peak - highest
    share = lower.exp()
    sums = torch.stack([total * share, (weighted + total * lower) * share, at_target])
    dist.all_reduce(sums, group=group)
    return highest, *sums
