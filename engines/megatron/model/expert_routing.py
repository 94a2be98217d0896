"""Expert selection (routing) of an MoE layer, as in Hugging Face's model code.

Megatron-core's own router differs: it ranks a group of experts by the sum of its highest `top_k / top_groups` scores
instead of its two highest, always normalizes sigmoid scores, and does not compute the softmax over all experts.

Routing replay: reuse recorded expert ids in the training forward pass. The ids were selected in the forward pass
that computed the old log-probs (R2, the GSPO report, arXiv 2507.18071 section 5.3), or by the inference engine (R3,
arXiv 2510.11370).

Only the expert ids are replayed; the weights of the experts' outputs are computed from the current router's logits, so
that the router gets gradients. A `RoutingRecord` belongs to one micro-batch and is passed to the routers in its
`PackedStream`. A global variable would not work: pipeline parallelism interleaves micro-batches, and recomputation
calls a layer again much later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        replay: maps the selected expert ids, [t, top_k], to the expert ids to use instead (`StreamRouting.replay`).

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


UNKNOWN = -1  # stands for an expert id that was not recorded: the router selects the expert


@dataclass
class RoutingRecord:
    """The recorded expert ids of the T tokens of one micro-batch. Layers may be missing; tokens may be UNKNOWN."""

    num_tokens: int  # T
    # layer number in the whole model, from 0 -> expert ids, [T, top_k] int16 on the CPU
    choices: dict[int, Tensor] = field(default_factory=dict)

    def record_experts(self, layer: int, rows: Tensor | None, experts: Tensor) -> None:
        """Record the expert ids that one layer used for some or all tokens.

        Args:
            layer: layer number in the whole model, from 0.
            rows: [n] index in the micro-batch of each of the n tokens, -1 for padding; None: the tokens are the whole
                micro-batch.
            experts: [n, top_k] expert ids.
        """
        experts = experts.to("cpu", torch.int16)
        if rows is None:
            self.choices[layer] = experts
            return
        recorded = self.choices.setdefault(
            layer, torch.full((self.num_tokens, experts.shape[1]), UNKNOWN, dtype=torch.int16)
        )
        real = rows >= 0
        recorded[rows[real]] = experts[real]


@dataclass
class StreamRouting:
    """Maps this rank's router rows to a `RoutingRecord`: a rank's routers process only some tokens, and padding."""

    record: RoutingRecord
    rows: Tensor | None  # [n] index in the micro-batch of each router row, on the CPU; -1: padding; None: all tokens
    recording: bool  # whether `replay` also adds the expert ids that it returns to `record`

    def replay(self, layer: int, selected: Tensor) -> Tensor:
        """Return the expert ids that a layer must use: the recorded ids, or those in `selected` for tokens without a
        record. [n, top_k]

        Args:
            layer: layer number in the whole model, from 0.
            selected: [n, top_k] expert ids that the current router selected.
        """
        experts, recorded = selected, self.record.choices.get(layer)
        if recorded is not None:
            if self.rows is not None:
                recorded = torch.where(self.rows[:, None] >= 0, recorded[self.rows.clamp_min(0)], UNKNOWN)
            recorded = recorded.to(selected.device, selected.dtype)
            experts = torch.where(recorded >= 0, recorded, selected)  # all top_k ids of a token are recorded, or none
        if self.recording:
            self.record.record_experts(layer, self.rows, experts)
        return experts
