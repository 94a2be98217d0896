"""A tracker that writes one JSON file: the smallest implementation of the Tracker interface besides MLflow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.storage.tracking.tracker import (
    Committed,
    MetricsLogged,
    Record,
    RunCommits,
    RunEnded,
    RunStarted,
    TrackedRun,
    Tracker,
)


class RejectedName(ValueError):
    """A metric name that this tracker does not accept."""


class JsonlTracker(Tracker):
    """Metric points, parts and the status of a run in the file of a `jsonl://` URI, one line each, sorted."""

    def __init__(self, uri: str, run: TrackedRun) -> None:
        self.path = Path(uri.removeprefix("jsonl://"))
        self.run = run
        self.wants_all = not self.path.exists()
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = {tuple(json.loads(line)[:4]): json.loads(line)[4] for line in lines}
        self.page = self.path.as_uri()

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        for record in records:
            match record:
                case RunStarted():
                    self._set("config", "", 0, record.config)
                    self._set("status", "", 0, "RUNNING")
                case MetricsLogged():
                    self._log("", record.metrics, record.step)
                case Committed():
                    part = commits.child_run_name(record.key, record.commit)
                    self._log(part, record.commit.summary, record.commit.index)
                    if record.commit.kind == "checkpoint":
                        rollouts = commits.since_previous_checkpoint("rollout", record.commit.index)
                        self._set("inputs", part, 0, [key for key, _ in rollouts])
                case RunEnded():
                    self._set("status", "", 0, record.status)
        rows = sorted([*key, value] for key, value in self.lines.items())
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def is_permanent_refusal(self, error: Exception) -> bool:
        return isinstance(error, RejectedName)

    def _log(self, part: str, metrics: dict[str, float], step: int) -> None:
        if bad := next((name for name in metrics if len(name) > 250), None):
            raise RejectedName(f"metric {bad[:20]}... has a name of {len(bad)} characters")
        for name, value in metrics.items():
            self._set("metric " + name, part, step, value)

    def _set(self, what: str, part: str, step: int, value: Any) -> None:
        self.lines[what, part, step, self.run.identity] = value
