"""The interface of an experiment tracker: the records that it receives, and the metric points in them.

Queueing, retries and redaction of secrets are the same for all trackers (delivery.py). All trackers use the metric
points of this file, so a metric has the same name, step, value and time in each of them. (MLflow replaces characters
that it does not accept in names, and rounds times to milliseconds; TensorBoard rounds values to 32 bits.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from penstock.storage.commit import Commit
from penstock.storage.config import StageConfig
from penstock.storage.errors import OptionError
from penstock.storage.secrets import is_secret_name
from penstock.storage.tracking.run_commits import RunCommits, eval_name_from_key

if TYPE_CHECKING:
    from penstock.storage.store import Store


@dataclass(frozen=True)
class TrackedRun:
    """The identity of a run in a tracker."""

    name: str
    run_id: str  # `id` in run.json
    store_uri: str = ""  # the store's current URI
    experiment: str = "penstock"
    # For what trackers show of the run's files and records besides its commits; None: only the commits are shown.
    store: Store | None = field(default=None, repr=False, compare=False)
    num_traces: int = 0  # samples of each round that MLflow shows as traces

    @property
    def identity(self) -> str:
        """Return an id of the run that is unique across stores, and the same after the store was moved."""
        return hashlib.sha256(f"run {self.run_id}".encode()).hexdigest()[:16]


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted:
    """The run was started or resumed. `config` is the resolved config without secrets."""

    key: str
    at: float  # seconds since the epoch; the same for the other records
    config: dict[str, Any]


@dataclass(frozen=True)
class MetricsLogged:
    """Metrics were logged that are not part of a commit."""

    key: str
    at: float
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Committed:
    """A stage was committed. Its metrics are in `commit.summary`."""

    key: str  # of the commit record in the store
    at: float
    commit: Commit


@dataclass(frozen=True)
class ReportWritten:
    """The HTML report of the run was written to the store."""

    key: str  # contains a hash of the report
    at: float
    store_key: str  # in `TrackedRun.store`; a later report has replaced it, or it was deleted, if the hash differs


@dataclass(frozen=True)
class RunEnded:
    """The run ended; `status` is FINISHED or FAILED."""

    key: str
    at: float
    status: str


Record = RunStarted | MetricsLogged | Committed | ReportWritten | RunEnded


def parse_record(line: dict[str, Any]) -> Record:
    """Return the record that is stored in an outbox line."""
    match line["type"]:
        case "start":
            return RunStarted(line["key"], line["at"], line["config"])
        case "metrics":
            return MetricsLogged(line["key"], line["at"], line["step"], line["metrics"])
        case "commit":
            commit = Commit.model_validate(line["commit"])
            return Committed(line["key"], commit.created_at, commit)
        case "report":
            return ReportWritten(line["key"], line["at"], line["store_key"])
        case "end":
            return RunEnded(line["key"], line["at"], line["status"])
    raise ValueError(f"outbox line {line['key']} has the unknown type {line['type']!r}")


def report_record_key(content: bytes) -> str:
    """Return the key of the record of a report, the same for `penstock track`."""
    return f"report-{hashlib.sha256(content).hexdigest()[:16]}"


class MetricPoint(NamedTuple):
    """One value of a metric."""

    name: str
    step: int
    value: float
    at: float  # seconds since the epoch


def metric_points(record: Record) -> list[MetricPoint]:
    """Return the metric points of a record, which belong to the run itself (not to a child run).

    The `perf/*` and `rollout/*` of an evaluation become `eval/<task>/perf/*` and `eval/<task>/rollout/*`. Otherwise
    they would collide with those of the training rollout, and of other evaluated data sets.
    """
    match record:
        case MetricsLogged():
            values, step = record.metrics, record.step
        case Committed(key, _, commit):
            values, step = commit.summary, commit.index
            if commit.kind == "eval":
                prefix = f"eval/{eval_name_from_key(key)}/"
                values = {name if name.startswith("eval/") else prefix + name: value for name, value in values.items()}
            elif commit.kind in ("rollout", "step"):
                values = values | {f"seconds/{commit.kind}_{part}": value for part, value in commit.seconds.items()}
        case _:
            return []
    return [MetricPoint(name, step, float(value), record.at) for name, value in values.items()]


def flatten_config(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested config as (dotted name, value). Secrets are left out."""
    for name, value in values.items():
        if name == "store_options" or is_secret_name(name):
            continue
        if isinstance(value, dict):
            yield from flatten_config(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ---- trackers --------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """Base of the trackers: the connection of one run to a tracker. Methods may raise any error; the caller
    (delivery.py) retries."""

    name: ClassVar[str]  # of the tracker, for log lines
    # Whether records that were delivered are delivered again: by a tracker that skips those that it has, or does not
    # have the run, because its database was deleted.
    wants_all: bool = False
    # Whether delivered records may be lost when the process is killed, until the end of the run is delivered.
    buffers: ClassVar[bool] = False

    @staticmethod
    def uri_of(store: Store, options: Any) -> str | None:
        """Return the tracking URI, which may contain credentials, or None if the options do not choose the tracker."""

    @staticmethod
    def check_options(options: Any) -> None:
        """Check that the tracker can be used on this machine if the options choose it. Raises OptionError if not."""
        return

    def __init__(self, uri: str, run: TrackedRun) -> None: ...

    @property
    def page(self) -> str | None:
        """Return the URL of the run in the tracker's UI, or None if there is no UI or no run yet."""

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Send records in the given order.

        A record may be sent again: use the times and steps in the record, and find an existing run by its
        `TrackedRun.identity`.

        Args:
            records: to send.
            commits: all commits of the run up to the last of `records`.
        """

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that the tracker would refuse the same record again; the
        caller then skips the record."""
        return False


class OptionsOfTracker(StageConfig):
    """Base of the options of one tracker: a row of the table in trackers.py."""

    scheme: ClassVar[str]  # of its tracking URIs
    tracker: ClassVar[type[Tracker]]

    def check_companions(self, switch: str, prefix: str) -> None:
        """Check that no option with a prefix is given unless the option `switch` chooses the tracker."""
        if getattr(self, switch):
            return
        for name in sorted(self.model_fields_set):
            if name.startswith(prefix) and getattr(self, name) != type(self).model_fields[name].default:
                flag, needed = (f"--{option.replace('_', '-')}" for option in (name, switch))
                raise OptionError(f"{flag} has no effect without {needed}: add {needed}, or omit {flag}")
