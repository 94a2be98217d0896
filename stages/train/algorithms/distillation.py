"""On-policy distillation: the policy's own samples, judged token by token by a teacher (arXiv 2306.13649)."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from stages.train.algorithms.experience import Estimate, Experience


class DistillationOptions(Protocol):
    """Fields of the configuration read here."""

    use_rollout_logprobs: bool
    opd_kl_coef: float


def distil(estimate: Estimate, experience: Experience, options: DistillationOptions) -> Estimate:
    """A_t - opd_kl_coef x (log pi_old - log pi_teacher): the one-sample reverse KL as a token's reward."""
    assert experience.teacher_logprobs is not None, "distillation needs the teacher's log-probs"
    reverse_kl = experience.policy_logprobs(options.use_rollout_logprobs) - experience.teacher_logprobs
    return replace(
        estimate,
        advantages=estimate.advantages - options.opd_kl_coef * reverse_kl,
        metrics=estimate.metrics | {"rollout/opd_reverse_kl": reverse_kl},
    )
