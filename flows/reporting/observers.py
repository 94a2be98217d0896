"""The observers of a run, which `add_observers` adds."""

from __future__ import annotations

import time

from prefect import get_run_logger

from penstock.engines import scratch
from penstock.engines.training import GIB, MemorySwitch
from penstock.flows.reporting.learning_signal import LearningSignal
from penstock.flows.reporting.monitors import HangDetector, PrometheusEndpoint, SystemMetrics, sample_system
from penstock.flows.reporting.observer import Observer, Observers
from penstock.flows.reporting.prefect_page import FinalReport, PrefectPage
from penstock.flows.reporting.status import StatusWriter
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.runs import ActiveRun, logs_of_run
from penstock.flows.runtime.signals import patience_after
from penstock.storage.commit import Commit
from penstock.storage.errors import StoreError
from penstock.storage.tracking.delivery import RunTracking, read_committed, read_cost_metrics

DELIVERY_SECONDS = 30.0  # how long to wait at the end of a run until the trackers have everything


def add_observers(
    observers: Observers, run: ActiveRun, display: Display, tracking: RunTracking, processes: Processes
) -> None:
    """Add the observers of a run to `observers`, in the order in which they are notified of events. They are exited in
    the reverse order."""
    logs = logs_of_run(run.store, run.keys) or scratch.temp_base_directory()
    report, results = FinalReport(run, display, tracking), Results(run, display, tracking)

    def warn(text: str) -> None:
        display.warn(text)
        get_run_logger().warning(text)

    observers.add(StatusWriter(run, display, processes))
    if timeout := run.config.run.hang_timeout:
        observers.add(HangDetector(timeout, display.warn, logs))
    observers.add(PrefectPage(run, display, tracking, report))
    observers.add(results)
    observers.add(report)
    if (port := run.config.run.prometheus_port) is not None:
        endpoint = PrometheusEndpoint(run.keys.run, port, display.note)
        for record in read_committed(run.store, run.keys):
            endpoint.on_commit(record.key, record.commit, is_new=False)
        tracking.on_metrics = endpoint.update
        observers.add(endpoint)
    observers.add(LearningSignal(run, warn))
    observers.add(SystemMetrics(results.log_system_metrics, display.note, results.sample_system))


class Results(Observer):
    """Prints weight updates and results, and sends metrics that are not in commits to the trackers (MLflow,
    TensorBoard, W&B); at the end also sends the costs of the run."""

    def __init__(self, run: ActiveRun, display: Display, tracking: RunTracking) -> None:
        self.run = run
        self.display = display
        self.tracking = tracking

    def on_publish(
        self, version: int, urls: list[str], metrics: dict[str, float], switches: list[MemorySwitch]
    ) -> None:
        self.display.rounds.publish_seconds.append(metrics["perf/update_weights_time"])
        for switch in switches:
            self.display.note(f"moved GPU memory: {switch}")
        if switches:
            metrics["perf/memory_switch_time"] = sum(switch.seconds for switch in switches)
            metrics["perf/device_memory_peak_gib"] = max(switch.device_bytes_before for switch in switches) / GIB
            metrics["perf/host_memory_gib"] = max(switch.host_bytes_after for switch in switches) / GIB
        if version > 0:  # the key makes it one point per version, even if the version is published again
            self.tracking.enqueue_metrics(f"publish-{version}", metrics, step=version - 1)

    def on_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.tracking.enqueue_metrics(f"overlap-{rollout_id}", metrics, step=rollout_id)
        self.display.rounds.overlap[rollout_id] = metrics

    def on_results(self, commits: list[Commit]) -> None:
        self.display.print_summary(commits)

    def sample_system(self) -> dict[str, float]:
        """Show the metrics of the driver's node in the panel, and return them."""
        metrics = sample_system()
        self.display.panel.machine = metrics
        return metrics

    def log_system_metrics(self, metrics: dict[str, float]) -> None:
        """Send metrics of the driver's node to the trackers. Their step is the number of seconds since the run was
        created, which also increases from one start of the run to the next."""
        seconds = int(time.monotonic() - self.run.created)
        self.tracking.enqueue_metrics(f"system-{self.run.start}-{seconds}", metrics, step=seconds)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        name, price = self.run.keys.run, self.run.config.run.price_per_device_hour
        try:
            for record in read_cost_metrics(self.run.store, self.run.keys, price, self.run.start):
                self.tracking.enqueue_metrics(record.key, record.metrics, record.step, record.at)
        except (StoreError, OSError) as error:
            self.display.note(
                f"the costs of the run are not logged ({error}); `penstock show {name} --cost` shows them"
            )
        self.tracking.close("FAILED" if kind else "FINISHED", timeout=patience_after(kind) or DELIVERY_SECONDS)
        for delivery in self.tracking.deliveries:
            if waiting := delivery.num_waiting():
                why = delivery.problem or "no time left"
                self.display.note(
                    f"{waiting} records are not delivered to {delivery.name} yet ({why}); the next start delivers them"
                )
