"""What a record contains for every tracker: metric points, and the config as named values.

All trackers use these definitions, so a metric has the same name, step, value and time in each of them. (MLflow
replaces characters that it does not accept in names, and rounds times to milliseconds; TensorBoard rounds values to 32
bits.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.storage.refs import Commit
from penstock.storage.secrets import is_secret_name
from penstock.storage.tracking.lineage import eval_metrics
from penstock.storage.tracking.tracker import Committed, MetricsLogged, Record


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric."""

    name: str
    step: int
    value: float
    at: float  # seconds since the epoch


def metric_points(record: Record) -> list[MetricPoint]:
    """Return the metric points of a record, which belong to the run itself (not to a child run)."""
    match record:
        case MetricsLogged():
            values, step = record.metrics, record.step
        case Committed():
            values, step = commit_metrics(record.key, record.commit), record.commit.index
        case _:
            return []
    return [MetricPoint(name, step, float(value), record.at) for name, value in values.items()]


def commit_metrics(key: str, commit: Commit) -> dict[str, float]:
    """Return the metrics of a commit. `key` is the key of the commit record in the store."""
    match commit.kind:
        case "eval":
            return eval_metrics(key, commit)
        case "rollout" | "step":
            return commit.summary | {f"seconds/{commit.kind}_{part}": value for part, value in commit.seconds.items()}
    return commit.summary


def flatten_config(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested config as (dotted name, value). Secrets are left out."""
    for name, value in values.items():
        if name == "store_options" or is_secret_name(name):
            continue
        if isinstance(value, dict):
            yield from flatten_config(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
