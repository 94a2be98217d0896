"""Sample CPU, memory and GPUs of the driver's node during a run, under the names of MLflow's system metrics."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import psutil

from penstock.engines.local_gpus import visible_gpu_usage
from penstock.flows.reporting.observer import Observer

SAMPLE_SECONDS = 2.0  # between two samples
INTERVAL_SAMPLES = 5  # samples that are averaged for one record


def sample_system() -> dict[str, float]:
    """Return the current metrics: name -> value. CPU utilization is that since the previous call, in percent of all
    cores."""
    memory = psutil.virtual_memory()
    metrics = {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / 1e6,
        "system/system_memory_usage_percentage": 100 * memory.used / memory.total,
    }
    for index, usage in enumerate(visible_gpu_usage()):
        metrics |= {f"system/gpu_{index}_{name}": value for name, value in usage.items()}
    return metrics


def average(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the samples that have it."""
    values = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            values[name].append(value)
    return {name: round(sum(of_name) / len(of_name), 2) for name, of_name in values.items()}


class SystemMetrics(Observer):
    """Samples in a thread and logs the mean of every INTERVAL_SAMPLES samples, at its end also
    of the remaining ones. If sampling fails, it ends with a note; the run is not affected.

    Args:
        log: logs metrics.
        note: prints a message for the user.
        sample: returns the current metrics.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], object],
        note: Callable[[str], object],
        sample: Callable[[], dict[str, float]] = sample_system,
    ) -> None:
        self.log = log
        self.note = note
        self.sample = sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def __enter__(self) -> SystemMetrics:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(SAMPLE_SECONDS)

    def _run(self) -> None:
        try:
            self.sample()  # the first CPU utilization has no previous call
            ended = False
            while not ended:
                samples: list[dict[str, float]] = []
                while len(samples) < INTERVAL_SAMPLES and not ended:
                    ended = self._stop.wait(SAMPLE_SECONDS)
                    samples.append(self.sample())
                self.log(average(samples))
        except Exception as error:  # of a driver library or a full disk
            self.note(f"system metrics are not recorded any more ({type(error).__name__}: {error})")
