"""From graded samples to the numbers of an evaluation. Pure: it can be done again at any time from the committed shards.

A sample that failed (its grader hung or raised) counts as reward 0 and not passed; `failed_ratio` says how many there were.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stages.eval.intervals import intervals
from stages.eval.majority import answer_of, majority_rates
from storage.errors import OptionError
from storage.sample import Sample, Status

LOW, HIGH = "-ci_low", "-ci_high"  # behind the name of a number: the bounds of its interval


def score(
    samples: Sequence[Sample], name: str, *, pass_threshold: float | None = None, require_pass_rate: bool = False
) -> dict[str, float]:
    """Metrics of one data set.

    Args:
        samples: all of them, graded.
        name: of the data set.
        pass_threshold: a response passes if its reward is at least this; without it see `passes_of`.
        require_pass_rate: pass@k must be there.

    Returns:
        `eval/<name>` (mean reward), `eval/<name>-truncated_ratio`, `eval/<name>-failed_ratio`, `eval/<name>/response_len/...`,
        and, whenever it is known what passes, `eval/<name>-pass@k` for k = 1, 2, 4, ... and `eval/<name>-majority@k` for k = 4, 8, ...
        up to the set's samples per prompt. If there are two prompts or more, the mean, pass@k and majority@k have an interval each.

    Raises:
        OptionError: pass@k is required and it is not known what passes.
    """
    groups = groups_of(samples)
    lengths = [sum(sample.loss_mask) for sample in samples]
    rewards = [[reward_of(sample) for sample in group] for group in groups]
    plain = {
        f"eval/{name}-truncated_ratio": _share(samples, Status.TRUNCATED),
        f"eval/{name}-failed_ratio": _share(samples, Status.FAILED),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/num_samples": float(len(samples)),
        f"eval/{name}/num_prompts": float(len(groups)),
    }
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    sums, weights = {f"eval/{name}": np.array([sum(group) for group in rewards])}, {f"eval/{name}": sizes}
    passes = passes_of(groups, pass_threshold)
    if passes is None and require_pass_rate:
        other = next(reward for group in rewards for reward in group if reward not in (0.0, 1.0))
        raise OptionError(
            f"data set {name} has the reward {other:g}, and pass@k needs 0 and 1: say with --pass-threshold from "
            "which reward on a response passes, choose another entry with --eval-reward-key, or leave out --log-passrate"
        )
    if passes is not None:
        votes = [[(answer_of(s), ok) for s, ok in zip(group, oks)] for group, oks in zip(groups, passes)]
        sums |= {f"eval/{name}-pass@{k}": rates for k, rates in _pass_rates(passes).items()}
        sums |= {f"eval/{name}-majority@{k}": rates for k, rates in majority_rates(votes).items()}
    return _means(sums, weights) | plain


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each prompt, in the order of their ids: no number depends on the order in which they were written."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        groups[sample.group_id].append(sample)
    return [groups[group_id] for group_id in sorted(groups)]


def reward_of(sample: Sample) -> float:
    """What a sample counts: its reward, or 0 if it failed."""
    return 0.0 if sample.reward is None else sample.reward


def passes_of(groups: Sequence[Sequence[Sample]], threshold: float | None) -> list[list[bool]] | None:
    """Which samples pass, or None if that is not known. The first of these decides: the threshold; a part "correct" of all rewards,
    1 or 0; the reward itself, if all are 1 or 0. A sample that failed does not pass."""
    graded = [sample for group in groups for sample in group if sample.reward is not None]
    if threshold is not None:
        return [[sample.reward is not None and sample.reward >= threshold for sample in group] for group in groups]
    if graded and all(sample.rewards.get("correct") in (0.0, 1.0) for sample in graded):
        return [[sample.reward is not None and sample.rewards["correct"] == 1.0 for sample in group] for group in groups]
    if all(sample.reward in (0.0, 1.0) for sample in graded):
        return [[sample.reward == 1.0 for sample in group] for group in groups]
    return None


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, float]:
    """k -> mean pass@k over the groups, for k = 1, 2, 4, ... up to the smallest group."""
    return {k: float(rates.mean()) for k, rates in _pass_rates(groups).items()}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c that pass: 1 - C(n-c, k) / C(n, k)
    (the unbiased estimator of 2107.03374)."""
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, np.ndarray]:
    """k -> pass@k of each group, [groups]."""
    smallest = min(len(group) for group in groups)
    ks = [2**power for power in range(smallest.bit_length())]
    return {k: np.array([pass_at_k(len(group), sum(group), k) for group in groups]) for k in ks}


def _means(sums: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, float]:
    """Sums over each prompt's values, [prompts], as means over all values, each followed by its interval. A sum weighs 1 unless it
    has weights."""
    values = np.stack(list(sums.values()), axis=1)  # [prompts, quantities]
    counts = np.stack([weights.get(name, np.ones(len(values))) for name in sums], axis=1)
    means = values.sum(0) / counts.sum(0)
    if len(values) < 2:
        return {name: float(mean) for name, mean in zip(sums, means)}
    out: dict[str, float] = {}
    for name, mean, low, high in zip(sums, means, *intervals(values, counts)):
        out |= {name: float(mean), f"{name}{LOW}": float(low), f"{name}{HIGH}": float(high)}
    return out


def _share(samples: Sequence[Sample], status: Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
