"""Observers with a thread of their own: they detect hangs, record system metrics, and serve metrics to Prometheus."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Self

import psutil
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from penstock.engines.local_gpus import visible_gpu_usage
from penstock.engines.scratch import STACK_SIGNAL, own_temp_directory, stack_directory
from penstock.flows.reporting.observer import Observer, ThreadObserver
from penstock.storage.commit import Commit
from penstock.storage.tracking.tracker import Committed, metric_points

# ---- hangs -----------------------------------------------------------------------------------------------------------

ANSWER_SECONDS = 2.0  # how long a process may take to print its stacks
HANDLED = "SigCgt:"  # line of /proc/PID/status: bit mask of the signals that the process handles


class HangDetector(ThreadObserver):
    """Detects that no stage has made progress for `timeout` seconds. It then prints the Python stacks of the run's
    processes with `warn`, and writes them to a file in `directory`. Nothing is killed."""

    def __init__(self, timeout: float, warn: Callable[[str], object], directory: Path) -> None:
        super().__init__("hang-detector", ANSWER_SECONDS)
        self.timeout = timeout
        self.warn = warn
        self.directory = directory
        self._moved_at = time.monotonic()

    def on_progress(self) -> None:
        self._moved_at = time.monotonic()

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        self.on_progress()

    def __enter__(self) -> Self:
        self.on_progress()
        return super().__enter__()

    def run_thread(self) -> None:
        wait, reported_at = self.timeout, None  # reported_at: the value of _moved_at at the last report
        while not self.ended.wait(wait):
            moved_at = self._moved_at
            left = moved_at + self.timeout - time.monotonic()
            wait = left if left > 0 else min(self.timeout, 10.0)
            if left > 0 or moved_at == reported_at:
                continue
            reported_at = moved_at
            begin = f"no stage has made progress for {self.timeout:g} s; the run continues. The Python stacks of its"
            try:
                stacks = stacks_of_run()
                path = self.directory / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(stacks)
                self.warn(f"{begin} processes are also in {path}:\n{stacks}")
            except (OSError, psutil.Error) as error:  # for instance a full disk, or a process of another user
                self.warn(f"{begin} processes cannot be shown ({error})")


def stacks_of_run() -> str:
    """Return the Python stacks of this process, thread by thread, and of all its descendants."""
    parts = [f"== driver (pid {os.getpid()})\n"]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        parts[0] += f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()[:3])[:100] or process.name()
            parts.append(f"== {title} (pid {process.pid})\n{stacks_of_process(process)}")
    return "\n".join(parts)


def stacks_of_process(process: psutil.Process, seconds: float = ANSWER_SECONDS) -> str:
    """Return the Python stacks that a child process prints within `seconds`, or a line that says why it prints none.

    Trainer ranks and engine processes print their stacks when they get SIGUSR2 (`engines/scratch.py`, an engine's
    launch script). A process without that handler is not signalled, because SIGUSR2 would kill it.
    """
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"stopped (T): cannot print its stacks before `kill -CONT {process.pid}`\n"
    if status == psutil.STATUS_ZOMBIE:
        return "ended (Z)\n"
    handled = "0"
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        handled = next((line.removeprefix(HANDLED) for line in lines if line.startswith(HANDLED)), "0")
    if not int(handled, 16) >> (STACK_SIGNAL - 1) & 1:
        return (
            f"{status}: this process cannot print its stacks; `py-spy dump --pid {process.pid}` shows those of Python\n"
        )
    directory = stack_directory(own_temp_directory())
    before = {path: path.stat().st_size for path in directory.glob("*.txt")}
    process.send_signal(STACK_SIGNAL)
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        new = "".join(path.read_text()[before.get(path, 0) :] for path in sorted(directory.glob("*.txt")))
        if new and new == text:  # the output has stopped growing, so it is complete
            return new
        text = new
    return text or f"{status}: no answer within {seconds:g} s; the process may be inside a system call\n"


# ---- system metrics --------------------------------------------------------------------------------------------------

SAMPLE_SECONDS = 2.0  # between two samples
INTERVAL_SAMPLES = 5  # samples that are averaged for one record


def sample_system() -> dict[str, float]:
    """Return CPU, memory and GPUs of this node under the names of MLflow's system metrics. CPU utilization is the mean
    since the previous call, in percent of all cores."""
    memory = psutil.virtual_memory()
    metrics = {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / 1e6,
        "system/system_memory_usage_percentage": 100 * memory.used / memory.total,
    }
    for index, usage in enumerate(visible_gpu_usage()):
        metrics |= {f"system/gpu_{index}_{name}": value for name, value in usage.items()}
    return metrics


class SystemMetrics(ThreadObserver):
    """Calls `sample` every SAMPLE_SECONDS, and passes the mean of every INTERVAL_SAMPLES samples to `log`. If that
    fails, it prints a message with `note` and ends; the run continues."""

    def __init__(
        self,
        log: Callable[[dict[str, float]], object],
        note: Callable[[str], object],
        sample: Callable[[], dict[str, float]],
    ) -> None:
        super().__init__("system-metrics", SAMPLE_SECONDS)
        self.log = log
        self.note = note
        self.sample = sample

    def run_thread(self) -> None:
        try:
            self.sample()  # discarded: it has no CPU utilization, which is measured since the previous call
            ended = False
            while not ended:
                samples: list[dict[str, float]] = []
                while len(samples) < INTERVAL_SAMPLES and not ended:
                    ended = self.ended.wait(SAMPLE_SECONDS)
                    samples.append(self.sample())
                names = dict.fromkeys(name for sample in samples for name in sample)
                self.log({name: round(fmean(s[name] for s in samples if name in s), 2) for name in names})
        except Exception as error:  # for instance from the GPU driver's library, or because the disk is full
            self.note(f"system metrics are not recorded any more ({type(error).__name__}: {error})")


# ---- Prometheus ------------------------------------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"


class PrometheusEndpoint(Observer):
    """Serves the newest values of the metrics that trackers receive at http://127.0.0.1:PORT/metrics, for example
    `rollout/raw_reward` as `penstock_rollout_raw_reward{run="..."}`. If `port` is 0, a free port is chosen, which
    `note` prints."""

    def __init__(self, run: str, port: int, note: Callable[[str], object] = lambda text: None) -> None:
        self.run = run
        self.port = port
        self.note = note
        self._registry = CollectorRegistry()
        self._stage = Gauge("penstock_stage", "stage that was started last", ["run", "stage"], registry=self._registry)
        self._gauges: dict[str, Gauge] = {}
        self._lock = threading.Lock()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Replace the values of these metrics. A metric that is not a number is not served."""
        with self._lock:
            for metric, value in metrics.items():
                name = "penstock_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
                if name not in self._gauges:
                    description = "docs/metrics.md describes it"
                    self._gauges[name] = Gauge(name, description, ["run"], registry=self._registry)
                self._gauges[name].clear()
                if not math.isnan(value):
                    self._gauges[name].labels(self.run).set(value)

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        self._stage.clear()
        self._stage.labels(self.run, name).set(1)

    def on_commit(self, key: str, commit: Commit, is_new: bool) -> None:
        """Replace the values of a commit's metrics, under the names that trackers use. The commit of a training step
        also sets the metrics `round` and `policy_version`."""
        self.update({point.name: point.value for point in metric_points(Committed(key, commit.created_at, commit))})
        if commit.kind == "step":
            self.update({"round": commit.index, "policy_version": commit.policy_version})

    def __enter__(self) -> Self:
        self._server, self._thread = start_http_server(self.port, addr=LOOPBACK, registry=self._registry)
        self.port = self._server.server_port
        self.note(f"metrics for Prometheus: http://{LOOPBACK}:{self.port}/metrics")
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
