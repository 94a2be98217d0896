"""What a loss knows of the trained tokens of a micro-batch besides the model's output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TokenStreams:
    """Of the n trained tokens here, float32 on the device."""

    advantages: Tensor  # [n]
    rollout_logprobs: Tensor  # [n] engine's, at sampling
    old_logprobs: Tensor | None = None  # [n] trainer's before the update; None = the current ones (one step a rollout)
    ref_logprobs: Tensor | None = None  # [n] the frozen reference's
    returns: Tensor | None = None  # [n] what the critic learns
    values: Tensor | None = None  # [n] critic's before its update
    pg_scale: Tensor | None = None  # [n] factor of the policy-gradient part alone (a custom reducer's weights / the usual ones)
