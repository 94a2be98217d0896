"""Choosing again the experts that were chosen before: by the forward pass that computed the old log-probs (R2, "routing replay" of the
GSPO report, arXiv 2507.18071 section 5.3), or by the engine that sampled the tokens (R3, arXiv 2510.11370).

Only which experts is replayed; their weights are the current router's, so gradients flow. What is known belongs to a micro-batch and
reaches the routers through its `PackedStream`, never through a global: pipelines interleave micro-batches, and recomputation calls a
layer again long after. How scores become a choice is `routing.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

UNKNOWN = -1  # in place of an expert: the router chooses freely


@dataclass
class RoutingRecord:
    """The experts of one micro-batch of T tokens, as far as this rank knows them."""

    num_tokens: int
    choices: dict[int, Tensor] = field(default_factory=dict)  # layer of the whole model, from 0 -> [T, top_k] int16 on the CPU

    def keep(self, layer: int, rows: Tensor | None, chosen: Tensor) -> None:
        """Remember what was chosen.

        Args:
            layer: of the whole model, from 0.
            rows: [n] tokens of the pack, -1 for padding; None: all, in order.
            chosen: [n, top_k] experts.
        """
        chosen = chosen.to("cpu", torch.int16)
        if rows is None:
            self.choices[layer] = chosen
            return
        known = self.choices.setdefault(layer, torch.full((self.num_tokens, chosen.shape[1]), UNKNOWN, dtype=torch.int16))
        real = rows >= 0
        known[rows[real]] = chosen[real]


@dataclass
class StreamRouting:
    """A record as one rank's routers use it: they see some rows of the pack only, and padding."""

    record: RoutingRecord
    rows: Tensor | None  # [n] on the CPU: token of the pack in each row of the routers, -1 for padding; None: the T tokens
    recording: bool  # remember what is chosen where nothing is known

    def settle(self, layer: int, free: Tensor) -> Tensor:
        """The experts to take. [n, top_k]

        Args:
            layer: of the whole model, from 0.
            free: [n, top_k] experts that the router would choose.
        """
        chosen, known = free, self.record.choices.get(layer)
        if known is not None:
            if self.rows is not None:
                known = torch.where(self.rows[:, None] >= 0, known[self.rows.clamp_min(0)], UNKNOWN)
            known = known.to(free.device, free.dtype)
            chosen = torch.where(known >= 0, known, free)  # a token is known with all its experts or with none
        if self.recording:
            self.record.keep(layer, self.rows, chosen)
        return chosen


def stream_routing(packed: Any, recording: bool, rows: Tensor | None) -> StreamRouting:
    """Connect a pack's record to a rank's routers.

    Args:
        packed: a pack with an attribute `routing: RoutingRecord | None`; None becomes an empty record.
        recording: fill what is unknown; otherwise only read.
        rows: see `StreamRouting`.
    """
    if packed.routing is None:
        packed.routing = RoutingRecord(len(packed.token_ids))
    return StreamRouting(packed.routing, rows, recording)


def rows_of_routers(real: Tensor, origin: Tensor, num_rows: int, rank: int, ranks: int) -> Tensor:
    """Token of the pack in each row that this rank's routers see, -1 for padding. [num_rows / ranks], on the CPU.

    Args:
        real: [r] rows of the stream that are no padding.
        origin: [r] their tokens in the pack.
        num_rows: t, of the stream.
        rank: among the sequence-parallel ranks, which share the stream in equal pieces.
        ranks: their number.
    """
    rows = torch.full((num_rows,), UNKNOWN)
    rows[real.cpu()] = origin.cpu()
    return rows.chunk(ranks)[rank]
