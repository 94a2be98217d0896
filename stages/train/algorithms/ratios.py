"""Probability ratios of the current policy to the one before the update: of a token, or of the whole sequence."""

from __future__ import annotations

from torch import Tensor

from stages.train.algorithms.sequences import SampleSums

# exp(40) is 2e17: the product of two such ratios and an advantage is still a float32. Beyond it a ratio has no gradient.
MAX_LOG_RATIO = 40.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp that never overflows: a log ratio counts as at most 40, and as at least -40."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_log_ratio(
    logprobs: Tensor,  # [n] current policy, with gradient
    old_logprobs: Tensor,  # [n] before the update
    samples: SampleSums,
) -> Tensor:  # [n]
    """log pi - log pi_old of each token (PPO)."""
    return logprobs - old_logprobs


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, samples: SampleSums) -> Tensor:  # [n], [n] -> [n]
    """Mean of log pi - log pi_old over the sample, at each token, with gradient through the mean (GSPO, arXiv 2507.18071)."""
    return samples.mean(logprobs - old_logprobs)


# One row per estimator with a ratio of its own.
LOG_RATIOS = {"gspo": sequence_log_ratio}
