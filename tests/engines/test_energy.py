"""Energy from the counters of GPUs: only if every GPU of the stage has one on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.engines import local_gpus
from penstock.engines.local_gpus import (
    GpuReading,
    all_counters,
    energy_metric,
    read_counters,
    used_joules,
    visible_gpu_usage,
)
from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store


def test_counters_are_those_of_the_named_gpus_if_all_have_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpus, "read_gpus", lambda: [GpuReading(joules=value) for value in (10.0, 20.0, None)])
    assert read_counters([("n", "1"), ("n", "0"), ("n", "1")], "n") == {"0": 10.0, "1": 20.0}
    for gpus in ([], [("other", "0")], [("n", "0"), ("n", "2")], [("n", "7")], [("n", "MIG-1")]):
        assert read_counters(gpus, "n") == {}, gpus


def test_energy_is_the_difference_of_two_readings_of_the_same_gpus() -> None:
    before, after = {"0": 10.0, "1": 20.0}, {"0": 11.5, "1": 22.0}
    assert used_joules(before, after) == 3.5 and energy_metric("x", before, after) == {"x": 3.5}
    assert used_joules({}, {}) is None and used_joules(before, {"0": 11.5}) is None
    assert energy_metric("x", before, {}) == {}


def test_energy_of_a_start_counts_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [1000.0, 2000.0, 3000.0]
    monkeypatch.setattr(local_gpus, "read_gpus", lambda: [GpuReading(joules=value) for value in counters])
    processes = Processes(
        ActiveRun(Store(str(tmp_path)), RunKeys("r"), Flow.TRAIN, parse_config(["--run", "r"])), print
    )
    counters[:] = [1010.0, 2020.0, 3040.0]
    assert processes.used_joules() is None  # a start that failed before it had GPUs
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "n"))
    processes._cluster = SimpleNamespace(alive=lambda: True, ray=ray)  # type: ignore[assignment]
    replica = SimpleNamespace(gpus=lambda: [("n", "1"), ("n", "2")])
    processes.pools["rollout"] = SimpleNamespace(replicas=[replica])  # type: ignore[assignment]
    assert processes.used_joules() == 60.0  # no stage has read the counters


@pytest.mark.gpu
@pytest.mark.skipif(not all_counters(), reason="needs a CUDA device")
def test_counter_of_a_gpu_agrees_with_its_power() -> None:
    before, start = all_counters()["0"], time.perf_counter()
    watts = []
    while time.perf_counter() - start < 3:
        watts.append(visible_gpu_usage()[0]["power_usage_watts"])
        time.sleep(0.1)
    seconds, after = time.perf_counter() - start, all_counters()["0"]
    assert (after - before) / seconds == pytest.approx(sum(watts) / len(watts), rel=0.3)
