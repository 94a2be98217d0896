"""Metrics of the driver's node: sampled in a thread, averaged, and never the reason for a failure."""

from __future__ import annotations

import threading

import pytest

from penstock.flows.reporting import system_metrics
from penstock.flows.reporting.system_metrics import SystemMetrics, average, sample_system


def test_a_metric_is_averaged_over_the_samples_that_have_it() -> None:
    assert average([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}


def test_machine_has_cpu_and_memory() -> None:
    sample_system()
    metrics = sample_system()
    assert 0 <= metrics["system/cpu_utilization_percentage"] <= 100
    assert 0 < metrics["system/system_memory_usage_percentage"] <= 100
    assert metrics["system/system_memory_usage_megabytes"] > 10


def test_records_are_means_of_intervals_and_the_end_logs_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 0.01)
    logged, sampled, twelve = [], [], threading.Event()

    def sample() -> dict[str, float]:
        sampled.append(float(len(sampled)))
        if len(sampled) == 13:
            twelve.set()
        return {"system/x": sampled[-1]}

    with SystemMetrics(logged.append, print, sample) as sampler:
        assert twelve.wait(60)
    sampler._thread.join()
    means = [record["system/x"] for record in logged]
    rest = sampled[1 + 5 * (len(means) - 1) :]  # the first sample is before the first interval
    assert means[:2] == [3.0, 8.0] and means[-1] == pytest.approx(sum(rest) / len(rest)) and len(rest) <= 5


def test_failing_sampler_is_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 0.001)
    notes, logged = [], []

    def sample() -> dict[str, float]:
        raise OSError("no driver")

    with SystemMetrics(logged.append, notes.append, sample) as sampler:
        sampler._thread.join()
    assert logged == [] and len(notes) == 1 and "OSError: no driver" in notes[0]
