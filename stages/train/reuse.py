"""Measure whether a fork that trains on its parent's rollouts (`penstock fork --reuse-rollouts`) can still learn from
them: compare each round with the log-probs of the policy that sampled it, and with the parent's round.

The trainer writes the log-prob and the advantage of every trained token of a round; this module reads these files in
the driver, before the round is committed. docs/resume.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import GateFailed
from penstock.storage.samples.shards import list_column, read_table, read_trained_tokens, trained_mask
from penstock.storage.store import Store


@dataclass(frozen=True)
class Reuse:
    """The rounds of a fork whose rollouts are its parent's, and what is compared."""

    parent: RunKeys
    rounds: range
    min_effective_sample_size: float  # --min-effective-sample-size
    loss_unit: str | None  # `AlgorithmConfig.loss_unit` of the fork

    def compare(self, store: Store, rollout: Commit, step: Commit) -> dict[str, float]:
        """Return the metrics of a trained round: `step` is its commit, which is not in the store yet. They are absent
        if the trainer has written no log-probs (rounds that train only the critic, a user-defined loss). Raises
        GateFailed if the effective sample size of the tokens is below the bound."""
        trained = read_trained_tokens(store, step)
        if trained is None:
            return {}
        original = store.committed(self.parent.step_prefix(step.index))
        of_parent = None if original is None else read_trained_tokens(store, original)
        metrics = reuse_metrics(read_table(store, rollout), trained, of_parent, self.loss_unit)
        size, bound = metrics.get("reuse/ess_tokens", 1.0), self.min_effective_sample_size
        if not size >= bound:  # also if it is not a number
            raise GateFailed(
                f"round {step.index}: the effective sample size of the stored tokens is {size:.3f}, below "
                f"--min-effective-sample-size {bound:g}, because the policy has moved away from the one that sampled "
                f"them: end the run before this round with `penstock resume {step.run} --num-rollout {step.index}`, or "
                "train on with a lower bound"
            )
        return metrics


def reuse_metrics(
    samples: pa.Table, trained: pa.Table, of_parent: pa.Table | None, loss_unit: str | None
) -> dict[str, float]:
    """Return the metrics of a round.

    Args:
        samples: the rollout's B samples, with the log-probs of the policy that sampled them.
        trained: the fork's log-probs and advantages of the N trained tokens (TOKENS_SCHEMA), in B rows.
        of_parent: the same of the parent; None if it has not trained the round, or has not stored them.
        loss_unit: column of the samples whose values have equal weight in the loss; None: all tokens have.
    """
    offsets, logprobs = list_column(trained, "trainer_logprobs")
    advantages, num_tokens = list_column(trained, "advantages")[1].astype(np.float64), np.diff(offsets)
    sampled = list_column(samples, "rollout_logprobs")[1][trained_mask(samples, needs_rewards=True)[1]]
    kept = (logprobs != 0) | (advantages != 0)  # both are 0 where a user-defined function has masked the token
    if not sampled[kept].any():  # no tokens, or samples from a source that has no log-probs
        return {}
    log_ratio = (logprobs.astype(np.float64) - sampled)[kept]
    sample = np.repeat(np.arange(len(num_tokens)), num_tokens)
    per_sample = np.bincount(sample[kept], weights=log_ratio)[np.unique(sample[kept])]
    metrics = {
        "reuse/ess_tokens": effective_sample_size(log_ratio),
        "reuse/ess_samples": effective_sample_size(per_sample),
    }
    if of_parent is None:
        return metrics
    parent_offsets, parent_advantages = list_column(of_parent, "advantages")
    same = num_tokens == np.diff(parent_offsets)  # samples with the same trained tokens in both runs
    before = parent_advantages.astype(np.float64)[np.repeat(same, np.diff(parent_offsets))]
    now, sample = advantages[np.repeat(same, num_tokens)], sample[np.repeat(same, num_tokens)]
    weights = np.ones(len(now))
    if loss_unit is not None:
        units = samples[loss_unit].combine_chunks().dictionary_encode().indices.to_numpy()[sample]
        weights /= np.bincount(units)[units]
    return metrics | {
        "reuse/advantage_flips": float((now * before < 0).mean()) if len(now) else 0.0,
        "reuse/advantage_weight_cosine": cosine(weights * now, weights * before),
    }


def effective_sample_size(log_weights: np.ndarray) -> float:
    """Return (sum w)^2 / (n sum w^2) of n weights (Kish): 1 if all are equal, 1/n if one outweighs all others."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights @ weights)))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 1 if both are zero, 0 if one is."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else float(not a.any() and not b.any())
