"""Compare evaluations, and decide on promotions.

`compare_rewards` is a paired comparison on the same prompts: the mean difference with its bootstrap interval. The
bootstrap resamples the prompts' differences. The difficulty of a prompt cancels in its difference, so the interval is
narrower than the intervals of the two evaluations suggest. The gate of a promotion: is a candidate better than the
champion on one data set, and not worse on others?
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.stages.eval.scores import bootstrap_intervals, group_by_prompt, reward_or_zero
from penstock.storage.champions import Condition
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_table
from penstock.storage.store import Store

Evaluations = Mapping[str, Commit]  # name of a data set -> commit of a policy's evaluation on it


@dataclass(frozen=True)
class Comparison:
    """Evaluation B compared with evaluation A on their common prompts. A prompt's reward is the mean over its
    samples."""

    num_prompts: int
    mean_a: float
    mean_b: float
    low: float  # bounds of the 95% confidence interval of mean_b - mean_a
    high: float
    wins: int  # prompts on which B is better
    losses: int  # prompts on which A is better
    ties: int

    @property
    def difference(self) -> float:
        return self.mean_b - self.mean_a


def compare_rewards(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Compare two evaluations, given as prompt number -> mean reward, on their common prompts (at least one)."""
    common = sorted(a.keys() & b.keys())
    assert common, "the evaluations have no common prompt"
    differences = np.array([b[prompt] - a[prompt] for prompt in common])  # [prompts]
    lower, upper = bootstrap_intervals(differences[:, None])
    return Comparison(
        num_prompts=len(common),
        mean_a=statistics.fmean(a[prompt] for prompt in common),
        mean_b=statistics.fmean(b[prompt] for prompt in common),
        low=float(lower[0]),
        high=float(upper[0]),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )


def rewards_by_prompt(store: Store, commit: Commit) -> dict[int, float]:
    """Return the mean reward of each prompt, by the prompt's number in the data set; a failed sample counts as 0.

    Raises StoreError if the samples are damaged.
    """
    rows = read_table(store, commit).select(["sample_id", "group_id", "reward"]).to_pylist()
    samples = [Sample(row["sample_id"], row["group_id"], "", commit.index, reward=row["reward"]) for row in rows]
    return {
        int(group[0].group_id.rpartition("-")[2]): statistics.fmean(map(reward_or_zero, group))
        for group in group_by_prompt(samples)
    }


def check_same_data(name: str, a: Commit, b: Commit) -> None:
    """Check that two evaluations on the data set `name` used the same prompts. Raises DataError."""
    segments_a, segments_b = ((commit.state.get("data_source") or {}).get("segments", []) for commit in (a, b))
    content_a, content_b = ([(s["rows"], s["digest"]) for s in segments] for segments in (segments_a, segments_b))
    if content_a != content_b:
        rows_a, rows_b = (sum(rows for rows, _ in content) for content in (content_a, content_b))
        raise DataError(
            f"the data set {name} had {rows_a} rows in the first evaluation, and {rows_b} rows with different content "
            "in the second, but a comparison needs the same prompts: repeat one evaluation with the other's file"
        )


@dataclass(frozen=True)
class Gate:
    """The conditions of a promotion."""

    data_set: str
    margin: float = 0.0  # the candidate must be better by more than this: lower bound of the difference's 95 % interval
    guards: Mapping[str, float] = field(default_factory=dict)  # data set -> by how much the candidate may be worse
    min_reward: float | None = None  # the mean reward of the first champion must be above this


def check_gate(store: Store, gate: Gate, candidate: Evaluations, champion: Evaluations | None) -> list[Condition]:
    """Return every condition of a promotion with its numbers."""
    required = {gate.data_set: gate.margin} | {name: -tolerance for name, tolerance in gate.guards.items()}
    for title, evaluations in (("candidate", candidate), ("champion", champion)):
        if evaluations is not None and (missing := [name for name in required if name not in evaluations]):
            raise DataError(
                f"the {title} was evaluated on {', '.join(evaluations) or 'nothing'}, not on {', '.join(missing)}: "
                "evaluate both on the data sets of the conditions"
            )
    if champion is None:
        mean = candidate[gate.data_set].summary[f"eval/{gate.data_set}"]
        holds = gate.min_reward is None or mean > gate.min_reward
        return [Condition(data_set=gate.data_set, required=gate.min_reward, holds=holds, candidate_mean=mean)]
    conditions = []
    for name, least in required.items():
        check_same_data(name, champion[name], candidate[name])
        comparison = compare_rewards(*(rewards_by_prompt(store, commit[name]) for commit in (champion, candidate)))
        conditions.append(
            Condition(
                data_set=name,
                required=least,
                holds=comparison.low > least,
                candidate_mean=comparison.mean_b,
                champion_mean=comparison.mean_a,
                low=comparison.low,
                high=comparison.high,
                num_prompts=comparison.num_prompts,
            )
        )
    return conditions
