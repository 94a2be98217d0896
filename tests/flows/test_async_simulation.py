"""The simulation of benchmarks/async_simulation.py agrees with what can be computed by hand, and with the rules of the
modes."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from async_simulation import SYNCHRONOUS, Mode, Workload, fit_line, simulate

ROUNDS, PROMPTS, LENGTH = 10, 4, 100
MODES = [
    SYNCHRONOUS,
    Mode("colocated", switch_seconds=0.5),
    Mode("ahead", max_ahead=1),
    Mode("ahead by three", max_ahead=3, interval=2),
    Mode("streaming", max_staleness=1),
    Mode("streaming far", max_staleness=4, interval=2),
]


def equal_lengths(train_seconds: float, publish_seconds: float = 0.0) -> Workload:
    """Rounds that one engine generates in 10 s: 100 steps of 0.1 s."""
    return Workload(
        rounds=[[[LENGTH] for _ in range(PROMPTS)] for _ in range(ROUNDS)],
        num_engines=1,
        concurrency=PROMPTS,
        step_seconds=0.02,
        request_seconds=0.02,
        train_seconds=train_seconds,
        train_seconds_per_token=0.0,
        publish_seconds=publish_seconds,
    )


def random_lengths(seed: int) -> Workload:
    rng = random.Random(seed)
    return Workload(
        rounds=[[[rng.choice([1, 5, 20, 400]) for _ in range(2)] for _ in range(PROMPTS)] for _ in range(ROUNDS)],
        num_engines=2,
        concurrency=4,
        step_seconds=0.01,
        request_seconds=0.01,
        train_seconds=1.0,
        train_seconds_per_token=0.01,
        publish_seconds=0.5,
        commit_rollout_seconds=0.1,
        commit_step_seconds=0.2,
    )


def test_a_synchronous_run_takes_the_sum() -> None:
    workload = replace(equal_lengths(train_seconds=7.0, publish_seconds=1.0), warm_up_seconds=(3.0,))
    outcome = simulate(workload, SYNCHRONOUS)
    assert outcome.seconds == pytest.approx(3 + ROUNDS * (10 + 7) + (ROUNDS - 1) * 1)
    assert outcome.trainer_idle == pytest.approx(1 - (3 + ROUNDS * 7) / outcome.seconds)
    assert outcome.engines_idle == pytest.approx(1 - ROUNDS * 10 / outcome.seconds)
    assert outcome.staleness == {0: pytest.approx(ROUNDS * PROMPTS * LENGTH)}


def test_one_rollout_ahead_takes_half_if_both_sides_take_equally_long() -> None:
    outcome = simulate(equal_lengths(train_seconds=10.0), Mode("ahead", max_ahead=1))
    assert outcome.seconds == pytest.approx((ROUNDS + 1) * 10)
    assert max(outcome.staleness) == 1


def test_a_stream_takes_all_trainings_and_weight_updates_if_the_trainer_is_slower() -> None:
    """The last round is started after update 10 - 1 - 2 and taken during the next training: no later update follows."""
    outcome = simulate(equal_lengths(train_seconds=20.0, publish_seconds=1.0), Mode("streaming", max_staleness=2))
    assert outcome.seconds == pytest.approx(10 + ROUNDS * 20 + (ROUNDS - 1 - 2) * 1)


def test_groups_wait_for_the_concurrency_of_the_engines() -> None:
    """Two of four groups are in flight: a step takes 0.02 s + 2 x 0.02 s, and there are twice as many steps."""
    outcome = simulate(replace(equal_lengths(train_seconds=0.0), concurrency=2), SYNCHRONOUS)
    assert outcome.seconds == pytest.approx(ROUNDS * 2 * LENGTH * 0.06)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("grade_seconds", [0.0, 60.0])
def test_every_group_and_token_is_accounted_for_once(mode: Mode, grade_seconds: float) -> None:
    outcome = simulate(replace(random_lengths(0), grade_seconds=grade_seconds), mode)
    assert sorted(outcome.order) == list(range(ROUNDS * PROMPTS))
    assert outcome.trained_tokens + outcome.wasted_tokens == pytest.approx(outcome.generated_tokens)
    assert outcome.trained_tokens == pytest.approx(sum(outcome.staleness.values()))
    assert 0 <= outcome.engines_idle < 1 and 0 <= outcome.trainer_idle < 1
    if mode.max_staleness is None:
        assert max(outcome.staleness) <= mode.max_ahead + mode.interval - 1
        assert not outcome.wasted_tokens


def test_groups_with_late_grades_are_generated_once_more_and_each_trains_a_token() -> None:
    outcomes = [
        simulate(replace(random_lengths(seed), grade_seconds=60.0), Mode("streaming", max_staleness=1))
        for seed in range(12)
    ]
    assert not any(outcome.masked for outcome in outcomes)
    assert all(len(set(outcome.repeated)) == len(outcome.repeated) for outcome in outcomes)
    assert any(outcome.repeated for outcome in outcomes)


def test_a_line_is_fitted_only_if_the_points_vary_enough() -> None:
    assert fit_line([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx((3.0, 2.0))
    assert fit_line([2.0, 2.0, 2.0], [5.0, 7.0, 9.0]) is None
    assert fit_line([1.0, 2.0, 3.0], [9.0, 7.0, 5.0]) is None  # more tokens cannot take less time
