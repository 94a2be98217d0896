"""Find the first policy version at which an evaluation fell, and rank the groups of the round that trained it.

The search is a function of the known values alone: `next_version` names the version to evaluate next, so a search that
was killed continues from the values that are stored. An evaluation falls between two known versions if its value is at
least the bound at the first and below it at the second. Values need not be monotone. Bisection always finds such a
fall, and of several the first that the known values show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from penstock.storage.errors import RunError

Values = Mapping[int, float]  # policy version -> value of the metric


class NoFallError(RunError):
    """The evaluation does not fall below the bound in the range of versions, as far as the values are known."""


def list_falls(values: Values, bound: float) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring known versions between which the value falls below `bound`, in order. A value
    that is not a number counts as below it."""
    return [(a, b) for a, b in pairwise(sorted(values)) if values[a] >= bound and not values[b] >= bound]


def next_version(first: int, last: int, values: Values, bound: float) -> int | None:
    """Return the version to evaluate next, or None if the first known fall is between two consecutive versions.

    Without a known fall, it is an end of the range: `first` if no value reaches the bound, else `last`. Otherwise it is
    the middle of the first known fall.

    Raises:
        NoFallError: that end is known.
    """
    if falls := list_falls(values, bound):
        before, after = falls[0]
        return None if after - before == 1 else (before + after) // 2
    is_high = any(value >= bound for value in values.values())
    end = last if is_high else first
    if end in values:
        raise NoFallError(
            f"from version {first} to {last}, the metric does not fall from {bound:g} or more to less than {bound:g} "
            f"(it is {values[end]:.4g} at version {end}): give another --below, or another range with --from and --to"
        )
    return end


def find_fall(
    first: int, last: int, values: dict[int, float], bound: float, evaluate: Callable[[int], float]
) -> tuple[int, int]:
    """Evaluate versions until the first known fall is between two consecutive ones, and return these. `values` are the
    known values; those of `evaluate` are added. Raises NoFallError if there is none."""
    while (version := next_version(first, last, values, bound)) is not None:
        values[version] = evaluate(version)
    return list_falls(values, bound)[0]


# ---- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchCost:
    """The most that a search can take."""

    evaluations: int
    rounds: int  # replayed


def largest_cost(
    first: int, last: int, values: Values, bound: float, checkpoints: Collection[int], held: int | None = None
) -> SearchCost:
    """Return the largest cost over all outcomes of the evaluations, including the restoration of the version before the
    fall, of which a checkpoint is then saved.

    Args:
        checkpoints: versions with a checkpoint; version 0 needs none.
        held: the version that the trainer holds.
    """
    try:
        version = next_version(first, last, values, bound)
    except NoFallError:
        return SearchCost(0, 0)
    if version is None:
        return SearchCost(0, num_replayed(held, list_falls(values, bound)[0][0], checkpoints))
    costs = [
        largest_cost(first, last, {**values, version: outcome}, bound, checkpoints, version)
        for outcome in (bound, -math.inf)
    ]
    rounds = num_replayed(held, version, checkpoints) + max(cost.rounds for cost in costs)
    return SearchCost(1 + max(cost.evaluations for cost in costs), rounds)


def num_replayed(held: int | None, version: int, checkpoints: Collection[int]) -> int:
    """Return the number of rounds that a trainer replays to reach `version`. It starts from the newest checkpoint up to
    `version`, or from the version that it holds if that is between the two."""
    newest = max((saved for saved in checkpoints if saved <= version), default=0)
    return version - (held if held is not None and newest <= held <= version else newest)


# ---- ranking ---------------------------------------------------------------------------------------------------------


def reward_contrast(evaluations: Sequence[pa.Table]) -> np.ndarray:  # [E]
    """Return for each sample of several evaluations on the same data set its reward minus the mean reward of its prompt
    over all of them. A failed sample has the reward 0."""
    rewards = np.concatenate([table["reward"].fill_null(0.0).to_numpy() for table in evaluations]).astype(np.float64)
    groups = [group for table in evaluations for group in table["group_id"].to_pylist()]
    numbers = np.array([int(group.rpartition("-")[2]) for group in groups])  # of the prompt in the data set
    _, prompt = np.unique(numbers, return_inverse=True)
    means = np.bincount(prompt, weights=rewards) / np.bincount(prompt)
    return rewards - means[prompt]


@dataclass(frozen=True)
class RankedGroup:
    """A group of a round, and how much training on it has changed an evaluation."""

    group_id: str
    influence: float  # share of the sum over all groups of absolute influences; negative: the group made it fall
    rewards: list[float]  # of its samples; NaN: not graded
    prompt: str


def rank_groups(samples: pa.Table, influence: Sequence[float]) -> list[RankedGroup]:
    """Return the groups of a round, the most harmful first. `influence` [B] is that of its samples."""
    groups = samples["group_id"].combine_chunks().dictionary_encode()
    names, index = groups.dictionary.to_pylist(), groups.indices.to_numpy()
    sums = np.bincount(index, weights=np.array(influence), minlength=len(names))
    shares = sums / (np.abs(sums).sum() or 1.0)
    rewards, first = samples["reward"].to_numpy().astype(np.float64), np.unique(index, return_index=True)[1]
    prompts = samples["prompt"].take(pa.array(first)).to_pylist()
    return [
        RankedGroup(names[group], float(shares[group]), rewards[index == group].tolist(), prompts[group])
        for group in np.argsort(shares, kind="stable")
    ]
