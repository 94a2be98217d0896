"""The search for the version at which an evaluation fell, with a fake evaluator, and the ranking of groups."""

from __future__ import annotations

import math
import random

import numpy as np
import pyarrow as pa
import pytest

from penstock.stages.eval.bisection import (
    NoFallError,
    find_fall,
    largest_cost,
    list_falls,
    num_replayed,
    rank_groups,
    reward_contrast,
)


def search(curve: list[float], values: dict[int, float], bound: float = 0.5) -> tuple[tuple[int, int], list[int]]:
    """The fall that is found on a curve, and the versions that were evaluated."""
    asked: list[int] = []

    def evaluate(version: int) -> float:
        asked.append(version)
        return curve[version]

    return find_fall(0, len(curve) - 1, values, bound, evaluate), asked


def test_a_single_fall_is_found_in_a_logarithmic_number_of_evaluations() -> None:
    for fall in range(1, 41):
        curve = [0.9] * fall + [0.1] * (41 - fall)
        found, asked = search(curve, {})
        assert found == (fall - 1, fall)
        assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(40))
        assert search(curve, dict(enumerate(curve))) == (found, []), "stored values are not evaluated again"


def test_every_found_pair_is_a_fall_of_a_curve_that_is_not_monotone() -> None:
    chosen = random.Random(0)
    for _ in range(100):
        curve = [1.0, *(chosen.choice([0.2, 0.8, math.nan]) for _ in range(30)), 0.0]
        stored = {version: curve[version] for version in chosen.sample(range(32), 5)}
        values = dict(stored)
        (before, after), asked = search(curve, values)
        assert after == before + 1 and curve[before] >= 0.5 and not curve[after] >= 0.5
        assert (before, after) == list_falls(values, 0.5)[0] and not stored.keys() & set(asked)


def test_the_first_fall_that_stored_values_show_is_searched() -> None:
    curve = [0.2, 0.3, 0.9, 0.9, 0.9, 0.1, 0.1, 0.9, 0.9, 0.1, 0.1]
    found, _ = search(curve, {0: 0.2, 2: 0.9, 6: 0.1, 8: 0.9, 10: 0.1})
    assert found == (4, 5), "a low start is not a fall, and later falls come after the first"


@pytest.mark.parametrize(
    ("curve", "evaluations", "place"),
    [([0.9] * 9, 2, "0.9 at version 8"), ([0.1] * 9, 1, "0.1 at version 0"), ([0.1] * 8 + [0.9], 1, "at version 0")],
)
def test_a_range_without_a_fall_is_refused_after_its_ends(curve: list[float], evaluations: int, place: str) -> None:
    values: dict[int, float] = {}
    with pytest.raises(NoFallError, match=f"{place}.*--below"):
        find_fall(0, 8, values, 0.5, lambda version: curve[version])
    assert len(values) == evaluations


@pytest.mark.parametrize("checkpoints", [[], [10, 20], [3, 7, 8, 21]])
@pytest.mark.parametrize("stored", [[], [0, 24], [0, 12, 24]])
def test_the_stated_cost_is_the_largest_over_all_places_of_the_fall(checkpoints: list[int], stored: list[int]) -> None:
    costs = []
    for fall in range(1, 25):
        curve = [1.0] * fall + [0.0] * (25 - fall)
        (before, _), asked = search(curve, {version: curve[version] for version in stored})
        held, rounds = None, 0
        for version in [*asked, before]:
            rounds, held = rounds + num_replayed(held, version, checkpoints), version
        costs.append((len(asked), rounds))
    several = [{v: float(v < fall) for v in stored} for fall in range(1, 25)]
    stated = [largest_cost(0, 24, values, 0.5, checkpoints) for values in several]
    for (evaluations, rounds), cost in zip(costs, stated, strict=True):
        assert evaluations <= cost.evaluations and rounds <= cost.rounds
    assert max(evaluations for evaluations, _ in costs) == max(cost.evaluations for cost in stated)
    assert max(rounds for _, rounds in costs) == max(cost.rounds for cost in stated)


def test_a_trainer_replays_from_the_nearer_of_checkpoint_and_held_version() -> None:
    assert [num_replayed(held, 14, [5, 10, 15]) for held in (None, 3, 10, 12, 14, 20)] == [4, 4, 4, 2, 0, 4]
    assert num_replayed(None, 4, [5]) == 4


def table(rows: list[tuple[str, float | None]]) -> pa.Table:
    groups, rewards = zip(*rows)
    return pa.table({"group_id": groups, "reward": pa.array(rewards, pa.float64()), "prompt": list(groups)})


def test_contrast_is_the_reward_minus_the_mean_of_its_prompt_in_all_evaluations() -> None:
    before = table([("eval-000003-x-000000000", 1.0), ("eval-000003-x-000000001", 1.0)])
    after = table([("eval-000004-x-000000001", 1.0), ("eval-000004-x-000000000", None)])
    assert reward_contrast([before, after]).tolist() == [0.5, 0.0, 0.0, -0.5]


def test_groups_are_ranked_by_the_sum_of_their_samples() -> None:
    samples = table([("a", 1.0), ("a", 0.0), ("b", None), ("b", 1.0), ("c", 0.0)])
    ranked = rank_groups(samples, [0.5, 0.5, -2.0, 1.0, -2.0])
    assert [(group.group_id, group.influence) for group in ranked] == [("c", -0.5), ("b", -0.25), ("a", 0.25)]
    assert ranked[1].rewards[1] == 1.0 and np.isnan(ranked[1].rewards[0])
    assert [group.influence for group in rank_groups(samples, [0.0] * 5)] == [0.0] * 3
