"""The simulation of benchmarks/async_simulation.py agrees with what can be computed by hand, and with the rules of the
modes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from async_simulation import SYNCHRONOUS, Mode, Workload, simulate

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
    rounds = [[[LENGTH] for _ in range(PROMPTS)] for _ in range(ROUNDS)]
    return Workload(rounds, 1, 64, 0.02, 0.02, train_seconds, 0.0, publish_seconds)


def random_lengths(seed: int) -> Workload:
    rng = random.Random(seed)
    rounds = [[[rng.choice([1, 5, 20, 400]) for _ in range(2)] for _ in range(PROMPTS)] for _ in range(ROUNDS)]
    return Workload(rounds, 2, 3, 0.01, 0.01, 1.0, 0.01, 0.5, 0.1, 0.2)


def test_a_synchronous_run_takes_the_sum() -> None:
    outcome = simulate(equal_lengths(train_seconds=7.0, publish_seconds=1.0), SYNCHRONOUS)
    assert outcome.seconds == pytest.approx(ROUNDS * (10 + 7) + (ROUNDS - 1) * 1)
    assert outcome.trainer_idle == pytest.approx(1 - ROUNDS * 7 / outcome.seconds)
    assert outcome.staleness == {0: ROUNDS * PROMPTS * LENGTH}


def test_one_rollout_ahead_takes_half_if_both_sides_take_equally_long() -> None:
    outcome = simulate(equal_lengths(train_seconds=10.0), Mode("ahead", max_ahead=1))
    assert outcome.seconds == pytest.approx((ROUNDS + 1) * 10)
    assert max(outcome.staleness) == 1


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_trained_once_and_no_token_is_too_old(mode: Mode, seed: int) -> None:
    workload = random_lengths(seed)
    outcome = simulate(workload, mode)
    assert sorted(outcome.order) == list(range(ROUNDS * PROMPTS))
    limit = mode.max_ahead + mode.interval - 1 if mode.max_staleness is None else mode.max_staleness
    assert max(outcome.staleness) <= limit
    generated = sum(sum(map(sum, groups)) for groups in workload.rounds)
    assert outcome.trained_tokens + outcome.masked_tokens == pytest.approx(generated, rel=0.01) or mode.max_staleness
    assert 0 <= outcome.engines_idle < 1 and 0 <= outcome.trainer_idle < 1


def test_a_stream_keeps_the_engines_busy_that_wait_in_a_synchronous_run() -> None:
    workload = random_lengths(0)
    streaming, synchronous = simulate(workload, Mode("streaming", max_staleness=2)), simulate(workload, SYNCHRONOUS)
    assert streaming.engines_idle < synchronous.engines_idle
    assert streaming.seconds < 0.8 * synchronous.seconds


def test_a_stream_keeps_the_engines_busy_when_a_few_prompts_are_much_longer() -> None:
    """Log-normal lengths, 2 % of the groups twenty times the median; generation takes longer than training."""
    rng = random.Random(0)

    def group() -> list[int]:
        factor = 20 if rng.random() < 0.02 else 1
        return [max(1, round(100 * factor * rng.lognormvariate(0, 0.5))) for _ in range(4)]

    rounds = [[group() for _ in range(32)] for _ in range(16)]
    outcome = simulate(Workload(rounds, 1, 64, 0.004, 0.0001, 1.0, 0.0, 0.1), Mode("streaming", max_staleness=2))
    assert outcome.engines_idle < 0.05
    assert sorted(outcome.order) == list(range(16 * 32))
