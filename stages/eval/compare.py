"""Two evaluations side by side, prompt by prompt: how large the difference is, and whether it may be chance.

Both answer the same prompts, so what is drawn in the bootstrap is the difference of a prompt: much of what makes prompts easy or hard
falls out, and the interval is narrower than the two single ones suggest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.eval.intervals import intervals
from stages.eval.score import groups_of, reward_of
from storage.errors import DataError
from storage.refs import Commit
from storage.sample import Sample
from storage.shards import read_table
from storage.store import Store

_COLUMNS = ("sample_id", "group_id", "reward")


@dataclass(frozen=True)
class Comparison:
    """B against A over the prompts that both have answered. A prompt's reward is the mean over its samples."""

    num_prompts: int
    mean_a: float
    mean_b: float
    low: float  # bounds of the interval of mean_b - mean_a
    high: float
    wins: int  # prompts on which B is better
    losses: int
    ties: int

    @property
    def difference(self) -> float:
        return self.mean_b - self.mean_a


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Two tables prompt -> reward, over the prompts that both have; at least one."""
    common = sorted(a.keys() & b.keys())
    assert common, "nothing to compare"
    differences = np.array([b[prompt] - a[prompt] for prompt in common])  # [prompts]
    lower, upper = intervals(differences[:, None])
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
    """Prompt (its number in the data set) -> mean reward of its samples; a failed sample counts 0. Raises StoreError if damaged."""
    rows = read_table(store, commit).select(list(_COLUMNS)).to_pylist()
    samples = [Sample(row["sample_id"], row["group_id"], "", commit.index, reward=row["reward"]) for row in rows]
    return {int(group[0].group_id.rpartition("-")[2]): _mean(group) for group in groups_of(samples)}


def check_same_data(name: str, a: Commit, b: Commit) -> None:
    """Whether two evaluations asked the same prompts, by content. Raises DataError."""
    if (one := _content(a)) != (other := _content(b)):
        raise DataError(
            f"the data set {name} differs between the two: {_rows(one)} here, {_rows(other)} there, with other content; only answers "
            "to the same prompts can be compared: evaluate both on the same file"
        )


def _content(commit: Commit) -> list[tuple[int, str]]:
    segments = (commit.state.get("data_source") or {}).get("segments", [])
    return [(segment["rows"], segment["digest"]) for segment in segments]


def _rows(content: list[tuple[int, str]]) -> str:
    return f"{sum(rows for rows, _ in content)} rows"


def _mean(group: Sequence[Sample]) -> float:
    return statistics.fmean(reward_of(sample) for sample in group)
