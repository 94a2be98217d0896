"""From graded samples to the numbers of an evaluation. Pure: it can be done again at any time from the committed shards.

A sample that failed (its grader hung or raised) counts as reward 0 and not passed; `failed_ratio` says how many there were.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from storage.sample import Sample, Status


def score(
    samples: Sequence[Sample], name: str, *, pass_threshold: float | None = None, require_pass_rate: bool = False
) -> dict[str, float]:
    """Metrics of one data set.

    Args:
        samples: all of them, graded.
        name: of the data set.
        pass_threshold: a response passes if its reward is at least this; without it rewards must be 0 or 1.
        require_pass_rate: pass@k must be there.

    Returns:
        `eval/<name>` (mean reward), `eval/<name>-truncated_ratio`, `eval/<name>-failed_ratio`, `eval/<name>/response_len/...`,
        and, whenever the rewards say what passes, `eval/<name>-pass@k` for k = 1, 2, 4, ... up to the set's samples per prompt.

    Raises:
        ValueError: pass@k is required and the rewards do not say what passes.
    """
    rewards = [0.0 if sample.reward is None else sample.reward for sample in samples]
    lengths = [sum(sample.loss_mask) for sample in samples]
    out = {
        f"eval/{name}": statistics.fmean(rewards),
        f"eval/{name}-truncated_ratio": _share(samples, Status.TRUNCATED),
        f"eval/{name}-failed_ratio": _share(samples, Status.FAILED),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/num_samples": float(len(samples)),
    }
    if pass_threshold is None and not set(rewards) <= {0.0, 1.0}:
        if require_pass_rate:
            other = next(reward for reward in rewards if reward not in (0.0, 1.0))
            raise ValueError(
                f"data set {name} has the reward {other:g}, and pass@k needs 0 and 1: say with --pass-threshold from "
                "which reward on a response passes, choose another entry with --eval-reward-key, or leave out --log-passrate"
            )
        return out
    threshold = 1.0 if pass_threshold is None else pass_threshold
    passed = [sample.reward is not None and sample.reward >= threshold for sample in samples]
    groups: dict[str, list[bool]] = defaultdict(list)
    for sample, passes in zip(samples, passed):
        groups[sample.group_id].append(passes)
    return out | {f"eval/{name}-pass@{k}": rate for k, rate in pass_rates(list(groups.values())).items()}


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, float]:
    """k -> mean pass@k over the groups, for k = 1, 2, 4, ... up to the smallest group."""
    smallest = min(len(group) for group in groups)
    ks = [2**power for power in range(smallest.bit_length())]
    return {k: statistics.fmean(pass_at_k(len(group), sum(group), k) for group in groups) for k in ks}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c that pass: 1 - C(n-c, k) / C(n, k)."""
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _share(samples: Sequence[Sample], status: Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)
