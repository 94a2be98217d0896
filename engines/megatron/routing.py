"""Which experts a token goes to, for every family as Hugging Face does it.

Megatron-core's own choice is another one in places: groups of experts are ranked by their best `top_k / top_groups` members, not always
by two; sigmoid scores are always normalised, a softmax over all experts never.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engines.megatron.shape import Experts

TINY = 1e-20  # keeps scores that all underflow from being divided by zero; Hugging Face's value


def route(
    logits: Tensor, experts: Experts, correction: Tensor | None = None, settle: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Which experts a token goes to, and their weights.

    Args:
        logits: [t, experts] of the router, fp32.
        experts: how many are chosen, and how.
        correction: [experts] added for choosing only.
        settle: may put other experts in place of those chosen, [t, top_k] (`replay.py`).

    Returns:
        weights and choice (bool), both [t, experts]. Weights are products with masks, not scattered: gradients are deterministic.
    """
    scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(dim=-1)
    with torch.no_grad():
        merit = scores if correction is None else scores + correction
        if experts.num_groups > 1:
            by_group = merit.unflatten(-1, (experts.num_groups, -1))  # [t, groups, experts of a group]
            best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(experts.top_groups, dim=-1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
            merit = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        chosen = merit.topk(experts.top_k, dim=-1).indices
        if settle is not None:
            chosen = settle(chosen)
        choice = torch.zeros_like(merit, dtype=torch.bool).scatter(-1, chosen, True)
    weights = scores * choice
    if experts.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * experts.scaling, choice
