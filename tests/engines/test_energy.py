"""Energy from the counters of GPUs: only if every GPU of the stage has one on this machine."""

from __future__ import annotations

import time

import pytest

from penstock.engines import energy
from penstock.engines.energy import energy_metric, read_counters, used_joules
from penstock.engines.local_gpus import all_gpu_joules, visible_gpu_usage


def test_counters_are_those_of_the_named_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "all_gpu_joules", lambda: [10.0, 20.0, None])
    assert read_counters([("n", "1"), ("n", "0"), ("n", "1")], "n") == {"0": 10.0, "1": 20.0}


@pytest.mark.parametrize(
    "gpus", [[], [("other", "0")], [("n", "0"), ("n", "2")], [("n", "7")], [("n", "MIG-1")]], ids=str
)
def test_no_counters_if_one_gpu_has_none_here(gpus: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "all_gpu_joules", lambda: [10.0, 20.0, None])
    assert read_counters(gpus, "n") == {}


def test_energy_is_the_difference_of_two_readings_of_the_same_gpus() -> None:
    before, after = {"0": 10.0, "1": 20.0}, {"0": 11.5, "1": 22.0}
    assert used_joules(before, after) == 3.5 and energy_metric("x", before, after) == {"x": 3.5}
    assert used_joules({}, {}) is None and used_joules(before, {"0": 11.5}) is None
    assert energy_metric("x", before, {}) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not all_gpu_joules(), reason="needs a CUDA device")
def test_counter_of_a_gpu_agrees_with_its_power() -> None:
    [before, *_], start = all_gpu_joules(), time.perf_counter()
    watts = []
    while time.perf_counter() - start < 3:
        watts.append(visible_gpu_usage()[0]["power_usage_watts"])
        time.sleep(0.1)
    seconds, [after, *_] = time.perf_counter() - start, all_gpu_joules()
    assert before is not None and after is not None
    assert (after - before) / seconds == pytest.approx(sum(watts) / len(watts), rel=0.3)
