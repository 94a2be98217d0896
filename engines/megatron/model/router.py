"""Expert selection (routing) of an MoE layer, as in Hugging Face's model code.

Megatron-core's own router differs: it ranks a group of experts by the sum of its highest `top_k / top_groups` scores
instead of its two highest, always normalizes sigmoid scores, and does not compute the softmax over all experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engines.families.shape import Experts

TINY = 1e-20  # avoids division by zero if all scores are zero; same value as in Hugging Face


def select_experts(
    logits: Tensor,
    experts: Experts,
    correction: Tensor | None = None,
    replay: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the top-k experts of every token, and compute the weights with which the experts' outputs are summed.

    Args:
        logits: [t, experts] router logits, fp32.
        experts: routing settings of the model (top_k, groups, score function, normalization).
        correction: [experts] bias added to the scores for selecting experts, but not for the weights.
        replay: maps the selected expert ids, [t, top_k], to the expert ids to use instead (`router_replay.py`).

    Returns:
        weights (0 for unselected experts) and selection (bool), both [t, experts]. The weights are scores times the
        selection mask instead of a scatter, so that gradients are deterministic.
    """
    scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(dim=-1)
    with torch.no_grad():
        biased = scores if correction is None else scores + correction
        if experts.num_groups > 1:
            by_group = biased.unflatten(-1, (experts.num_groups, -1))  # [t, groups, experts of a group]
            best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(experts.top_groups, dim=-1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
            biased = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        indices = biased.topk(experts.top_k, dim=-1).indices
        if replay is not None:
            indices = replay(indices)
        selection = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, indices, True)
    weights = scores * selection
    if experts.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * experts.scaling, selection
