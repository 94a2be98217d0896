"""Compute the metrics of an evaluation from its graded samples, which the committed shards contain.

A sample whose grader timed out or raised counts as reward 0 and as not passed; `failed_ratio` is their fraction.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from penstock.stages.eval.intervals import bootstrap_intervals
from penstock.stages.eval.majority import majority_rates, voted_answer
from penstock.storage.errors import OptionError
from penstock.storage.samples.sample import Sample, Status

LOW, HIGH = "-ci_low", "-ci_high"  # suffixes of the metrics with the bounds of an interval


def compute_eval_metrics(
    samples: Sequence[Sample], name: str, *, pass_threshold: float | None = None, require_pass_rate: bool = False
) -> dict[str, float]:
    """Return the metrics of an evaluation on one data set.

    Args:
        samples: all samples of the data set, graded.
        name: name of the data set.
        pass_threshold: a response passes if its reward is at least this; None = see `decide_passes`.
        require_pass_rate: raise an error if the rewards do not define pass@k.

    Returns:
        `eval/<name>` (mean reward), `eval/<name>-truncated_ratio`, `eval/<name>-failed_ratio`,
        `eval/<name>/response_len/...`, `eval/<name>/rewards/<part>` for each number of a reward that is a dictionary;
        if passing is defined, also `eval/<name>-pass@k` for k = 1, 2, 4, ... and
        `eval/<name>-majority@k` for k = 4, 8, ... up to the samples per prompt. With at least two prompts, the mean,
        pass@k and majority@k have confidence intervals.

    Raises:
        OptionError: pass@k is required, but the rewards do not define which samples pass.
    """
    groups = group_by_prompt(samples)
    lengths = [sum(sample.loss_mask) for sample in samples]
    rewards = [[reward_or_zero(sample) for sample in group] for group in groups]
    plain = {
        f"eval/{name}-truncated_ratio": _fraction_with_status(samples, Status.TRUNCATED),
        f"eval/{name}-failed_ratio": _fraction_with_status(samples, Status.FAILED),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/num_samples": float(len(samples)),
        f"eval/{name}/num_prompts": float(len(groups)),
    }
    for part in sorted({part for sample in samples for part in sample.rewards}):
        values = [s.rewards.get(part, 0.0) for s in samples if part in s.rewards or s.reward is None]
        plain[f"eval/{name}/rewards/{part}"] = statistics.fmean(values)
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    sums, weights = {f"eval/{name}": np.array([sum(group) for group in rewards])}, {f"eval/{name}": sizes}
    passes = decide_passes(groups, pass_threshold)
    if passes is None and require_pass_rate:
        other = next(reward for group in rewards for reward in group if reward not in (0.0, 1.0))
        raise OptionError(
            f"data set {name} has the reward {other:g}, but pass@k needs rewards of 0 and 1: set --pass-threshold to "
            "the lowest passing reward, select a reward of 0 or 1 with --eval-reward-key, or omit --log-passrate"
        )
    if passes is not None:
        votes = [[(voted_answer(s), ok) for s, ok in zip(group, oks)] for group, oks in zip(groups, passes)]
        sums |= {f"eval/{name}-pass@{k}": rates for k, rates in pass_rates(passes).items()}
        sums |= {f"eval/{name}-majority@{k}": rates for k, rates in majority_rates(votes).items()}
    return _means_with_intervals(sums, weights) | plain


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group samples by prompt, both sorted by id, so that metrics do not depend on the order of `samples`."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        groups[sample.group_id].append(sample)
    return [groups[group_id] for group_id in sorted(groups)]


def reward_or_zero(sample: Sample) -> float:
    """Return the reward of a sample, or 0 if generation or grading failed."""
    return 0.0 if sample.reward is None else sample.reward


def decide_passes(groups: Sequence[Sequence[Sample]], threshold: float | None) -> list[list[bool]] | None:
    """Return for each sample of each group whether it passes, or None if the rewards do not define this.

    The criterion is the first of these that applies: the reward is at least `threshold`, if given; `rewards["correct"]`
    is 1, if it is 0 or 1 in all graded samples; the reward is 1, if it is 0 or 1 in all graded samples. A failed sample
    does not pass.
    """
    graded = [sample for group in groups for sample in group if sample.reward is not None]
    if threshold is not None:
        return [[sample.reward is not None and sample.reward >= threshold for sample in group] for group in groups]
    if graded and all(sample.rewards.get("correct") in (0.0, 1.0) for sample in graded):
        return [
            [sample.reward is not None and sample.rewards["correct"] == 1.0 for sample in group] for group in groups
        ]
    if all(sample.reward in (0.0, 1.0) for sample in graded):
        return [[sample.reward == 1.0 for sample in group] for group in groups]
    return None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn from n without replacement, is among the c that
    pass: 1 - C(n-c, k) / C(n, k), the unbiased estimator of arXiv 2107.03374."""
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, np.ndarray]:
    """Return k -> pass@k of each prompt, [prompts], for k = 1, 2, 4, ... up to the smallest number of samples of a
    prompt. `groups` holds, for each prompt, whether each of its samples passes."""
    smallest = min(len(group) for group in groups)
    ks = [2**power for power in range(smallest.bit_length())]
    return {k: np.array([pass_at_k(len(group), sum(group), k) for group in groups]) for k in ks}


def _means_with_intervals(sums: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the mean of each metric and, with at least two prompts, the bounds of its confidence interval.

    `sums` holds the sum of each prompt's values, [prompts]; `weights` the number of each prompt's values, [prompts], or
    1 for metrics without an entry.
    """
    values = np.stack(list(sums.values()), axis=1)  # [prompts, quantities]
    counts = np.stack([weights.get(name, np.ones(len(values))) for name in sums], axis=1)
    means = values.sum(0) / counts.sum(0)
    if len(values) < 2:
        return {name: float(mean) for name, mean in zip(sums, means)}
    out: dict[str, float] = {}
    for name, mean, low, high in zip(sums, means, *bootstrap_intervals(values, counts)):
        out |= {name: float(mean), f"{name}{LOW}": float(low), f"{name}{HIGH}": float(high)}
    return out


def _fraction_with_status(samples: Sequence[Sample], status: Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
