"""Routing replay: reuse recorded expert ids in the training forward pass. The ids were selected in the forward pass
that computed the old log-probs (R2, the GSPO report, arXiv 2507.18071 section 5.3), or by the inference engine (R3,
arXiv 2510.11370).

Only the expert ids are replayed; the weights of the experts' outputs are computed from the current router's logits, so
that the router gets gradients. A `RoutingRecord` belongs to one micro-batch and is passed to the routers in its
`PackedStream`. A global variable would not work: pipeline parallelism interleaves micro-batches, and recomputation
calls a layer again much later. The selection itself is in `router.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

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
