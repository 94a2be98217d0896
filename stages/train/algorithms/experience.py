"""What goes into the estimation of advantages and what comes out, for a whole rollout, on every rank alike.

Owns the two records. How they are filled (passes through models, one exchange between ranks) is the step's business; because
they hold the whole rollout, no estimator knows ranks, packs or layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

EstimatorName = Literal["grpo", "gspo", "cispo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@dataclass
class Experience:
    """A rollout as far as it is known when advantages are estimated: B samples, N trained tokens, by sample, then position."""

    sample_index: Tensor  # [N] int64, ascending
    rewards: Tensor  # [B] float64; NaN = not graded (such a sample has no trained tokens)
    group_index: Tensor  # [B] int64, which prompt
    rollout_logprobs: Tensor  # [N] float64, engine's, at sampling
    old_logprobs: Tensor | None = None  # [N] trainer's, before the update
    ref_logprobs: Tensor | None = None  # [N] frozen reference's
    teacher_logprobs: Tensor | None = None  # [N] teacher's, for distillation
    values: Tensor | None = None  # [N] critic's, before its update

    def policy_logprobs(self, use_rollout_logprobs: bool) -> Tensor:  # [N]
        """Log-probs of the policy before the update, by the trainer's reckoning or by the engine's."""
        if use_rollout_logprobs:
            return self.rollout_logprobs
        assert self.old_logprobs is not None, "the log-probs before the update were not computed"
        return self.old_logprobs


@dataclass
class Estimate:
    """Advantages of the N trained tokens, and what is worth watching about them."""

    advantages: Tensor  # [N] float64
    returns: Tensor | None = None  # [N] float64, what the critic learns (ppo only)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [N] each, averaged with the loss's weights
