"""The interface of an experiment tracker, and the records that it receives.

To add a tracker, implement `Tracker` in a new module and add an entry to TRACKERS. Queueing, retries and redaction of
secrets are the same for all trackers (delivery.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from penstock.storage.refs import Commit
from penstock.storage.store import Store
from penstock.storage.tracking.lineage import Lineage

# Scheme of the tracking URI -> module:class. All other schemes (http, sqlite, databricks, ...) belong to MLflow.
TRACKERS: dict[str, str] = {
    "tensorboard": "penstock.storage.tracking.tensorboard:TensorBoardTracker",
    "wandb": "penstock.storage.tracking.wandb:WandbTracker",
}
_DEFAULT = "penstock.storage.tracking.mlflow.tracker:MlflowTracker"


# Which records a connection delivers again, although they were delivered: none; those since the first start that has
# not delivered its end, as of a tracker that may lose records when the process is killed; or all, as of a tracker that
# skips the records that it has, or does not have the run, because its database was deleted.
Resend: TypeAlias = Literal["none", "unended", "all"]


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


class Tracker(Protocol):
    """The connection of one run to a tracker. Methods may raise any error; the caller (delivery.py) retries."""

    name: ClassVar[str]  # of the tracker, for log lines
    resend: Resend

    def __init__(self, uri: str, run: TrackedRun) -> None: ...

    @property
    def page(self) -> str | None:
        """Return the URL of the run in the tracker's UI, or None if there is no UI or no run yet."""

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Send records in the given order.

        A record may be sent again: use the times and steps in the record, and find an existing run by its
        `TrackedRun.identity`.

        Args:
            records: to send.
            lineage: all commits of the run up to the last of `records`.
        """

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that the tracker would refuse the same record again; the
        caller then skips the record."""


def tracker_suffix(uri: str) -> str:
    """Return the suffix of the outbox files that belong to a tracker: "" for MLflow, else `-` and the URI's scheme."""
    scheme = uri.partition("://")[0]
    return f"-{scheme}" if scheme in TRACKERS else ""


def tracker_class(uri: str) -> type[Tracker]:
    """Return the tracker class for a tracking URI."""
    module, _, name = TRACKERS.get(uri.partition("://")[0], _DEFAULT).partition(":")
    tracker: type[Tracker] = getattr(import_module(module), name)
    return tracker
