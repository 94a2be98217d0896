"""Serve the newest metrics of a run to Prometheus: http://127.0.0.1:PORT/metrics, while the run's driver lives.

The values are those that go to the trackers: `rollout/raw_reward` of a run is `penstock_rollout_raw_reward{run="..."}`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.flows.reporting.observer import CommitReport, Observer
from penstock.storage.tracking.tracker import Committed, metric_points

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

LOOPBACK = "127.0.0.1"


class PrometheusEndpoint(Observer):
    """Serves the newest value of each metric of a run on loopback.

    Args:
        run: name of the run, the label of all metrics.
        port: 0 for a free port; `port` is then the chosen one.
        note: prints a message for the user.
    """

    def __init__(self, run: str, port: int, note: Callable[[str], object] = lambda text: None) -> None:
        self.run = run
        self.port = port
        self.note = note
        self._values: dict[str, float] = {}
        self._stage = ""
        self._lock = threading.Lock()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Replace the values of these metrics."""
        with self._lock:
            self._values |= {metric_name(name): float(value) for name, value in metrics.items()}

    def update_from_record(self, record: Committed) -> None:
        """Replace the values of a commit's metrics as trackers name them, for a step also round and policy version."""
        self.update({point.name: point.value for point in metric_points(record)})
        if record.commit.kind == "step":
            self.update({"round": record.commit.index, "policy_version": record.commit.policy_version})

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        self._stage = name

    def on_commit(self, report: CommitReport) -> None:
        self.update_from_record(Committed(report.key, report.commit.created_at, report.commit))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics, as prometheus_client asks of a collector."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values, stage = dict(self._values), self._stage
        for name, value in values.items():
            if not math.isnan(value):
                family = GaugeMetricFamily(f"penstock_{name}", "docs/metrics.md describes it", labels=["run"])
                family.add_metric([self.run], value)
                yield family
        if stage:
            family = GaugeMetricFamily("penstock_stage", "stage that was started last", labels=["run", "stage"])
            family.add_metric([self.run, stage], 1.0)
            yield family

    def __enter__(self) -> PrometheusEndpoint:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(self.port, addr=LOOPBACK, registry=registry)
        self.port = self._server.server_port
        self.note(f"metrics for Prometheus: http://{LOOPBACK}:{self.port}/metrics")
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metric_name(name: str) -> str:
    """Return a metric's name as Prometheus allows it: `rollout/response_len/mean` -> `rollout_response_len_mean`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
