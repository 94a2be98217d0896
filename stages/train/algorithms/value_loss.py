"""What the critic learns: the clipped squared error of PPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stages.train.algorithms.streams import TokenStreams

ValueObjective = Callable[[Tensor, TokenStreams], tuple[Tensor, dict[str, Tensor]]]  # values [n], streams -> loss [n], metrics


class ValueOptions(Protocol):
    """Fields of the configuration read here."""

    value_clip: float


def value_objective(options: ValueOptions) -> ValueObjective:
    """max((V - R)^2, (V_old + clip(V - V_old, +-value_clip) - R)^2), without a factor 1/2 (PPO's reference implementation)."""

    def objective(values: Tensor, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        assert streams.values is not None and streams.returns is not None, "the critic needs its old values and the returns"
        moved = values - streams.values
        near = streams.values + moved.clamp(-options.value_clip, options.value_clip)
        loss = torch.maximum((values - streams.returns).square(), (near - streams.returns).square())
        clipped = (moved.detach().abs() > options.value_clip).to(loss.dtype)
        return loss, {"train/value_loss": loss, "train/value_clipfrac": clipped}

    return objective
