"""benchmarks/gpu/real_model.py --kills: the planned kills, and the seconds that are lost to them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

from real_model import describe_kills, plan_kills
from scaling_runs import KILLS


@pytest.mark.parametrize(("number", "rounds"), [(1, 3), (10, 30), (7, 100)])
def test_kills_are_of_each_kind_and_leave_time_for_recovery(number: int, rounds: int) -> None:
    kills = plan_kills(number, rounds, seed=1)
    assert kills == plan_kills(number, rounds, seed=1)
    at = [kill[0] for kill in kills]
    assert at == sorted(set(at)) and at[0] >= 0 and at[-1] <= rounds - 3
    counts = [[kill[2] for kill in kills].count(target) for target in KILLS]
    assert sum(counts) == number and max(counts) - min(counts) <= 1


def test_seconds_lost_are_those_of_two_rounds_above_the_median() -> None:
    updates = [10.0, 12.0, 14.0, 16.0, 46.0, 50.0, 52.0, 54.0, 56.0]  # round 4 takes 30 s, the next one 4 s
    result = describe_kills([(17.0, "driver")], updates)
    assert result["recoveries"] == [
        {"round": 4, "target": "driver", "seconds to its update": 29.0, "seconds lost": 30.0}
    ]
    assert result["mean seconds lost by target"] == {"driver": 30.0} and result["seconds lost"] == 30.0


@pytest.mark.parametrize(("at", "recoveries"), [(55.0, 1), (57.0, 0)])
def test_kill_in_the_last_round_or_after_it(at: float, recoveries: int) -> None:
    updates = [10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 54.0, 56.0]
    assert len(describe_kills([(at, "engine")], updates)["recoveries"]) == recoveries
