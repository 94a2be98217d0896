"""The interface of an experiment tracker: the records that it receives, the metric points in them, and which commits
belong to a child run.

Queueing, retries and redaction of secrets are the same for all trackers (delivery.py). All trackers use the metric
points of this file, so a metric has the same name, step, value and time in each of them. (MLflow replaces characters
that it does not accept in names, and rounds times to milliseconds; TensorBoard rounds values to 32 bits.)
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from penstock.storage.commit import Commit
from penstock.storage.config import StageConfig
from penstock.storage.secrets import is_secret_name

if TYPE_CHECKING:
    from penstock.storage.store import Store


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it: its name and identity, and the store from which they read its files."""

    name: str
    run_id: str  # `id` in run.json
    store_uri: str = ""  # the store's current URI
    experiment: str = "penstock"
    store: Store | None = field(default=None, repr=False, compare=False)  # None: trackers show only the commits
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
    at: float  # seconds since the epoch, as in all records
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
    store_key: str  # of the report in `TrackedRun.store`, where a later report may have replaced it


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
    raise ValueError(f"outbox line {line['key']} has the unknown type {line['type']!r}: use the release that wrote it")


def report_record_key(content: bytes) -> str:
    """Return the outbox key of a report with the given content. A run and `penstock report --to` use the same key."""
    return f"report-{hashlib.sha256(content).hexdigest()[:16]}"


class MetricPoint(NamedTuple):
    """One value of a metric."""

    name: str
    step: int
    value: float
    at: float  # seconds since the epoch


def metric_points(record: Record) -> list[MetricPoint]:
    """Return the metrics of a record as points of the run itself (not of one of its child runs). The metrics `perf/*`
    and `rollout/*` of an evaluation become `eval/<task>/perf/*` and `eval/<task>/rollout/*`, since the training rollout
    and evaluations on other data sets have metrics with the same names."""
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


# ---- commits of a run ------------------------------------------------------------------------------------------------
# A tracker shows a run and its child runs like this:
#
# <run>                      metrics over the rounds, config, commit records, reward curve, sample tables
#   train-000000-000019      consumed rollouts; input model -> checkpoint 20
#   eval-000020-<task>       scores of a checkpoint on a data set
#   export-000020            exported model
#
# The conversion of a source model does not belong to one run, since several runs may start from the same files:
#
# convert-<fingerprint>      source model -> base, reference or teacher model

KeyAndCommit = tuple[str, Commit]


class RunCommits:
    """An index of a run's commits, up to the last commit that is being delivered to the tracker."""

    def __init__(self) -> None:
        # Kind -> index -> (key, commit), without evaluations.
        self.commits: dict[str, dict[int, KeyAndCommit]] = defaultdict(dict)
        self.evals: dict[str, Commit] = {}  # by key, since evaluations of several data sets have the same index

    def add(self, key: str, commit: Commit) -> None:
        """Add a commit without its sample previews, since the previews of all rounds take hundreds of megabytes."""
        commit = commit.model_copy(update={"state": {**commit.state, "shown": bool(commit.state.get("shown"))}})
        if commit.kind == "eval":
            self.evals[key] = commit
        else:
            self.commits[commit.kind][commit.index] = key, commit

    def child_run_name(self, key: str, commit: Commit) -> str:
        """Return the name of the tracker's child run for the commit at `key`, or "" if the parent run has it."""
        match commit.kind:
            case "rollout" | "step" | "model" | "regrade":
                return ""
            case "checkpoint":
                first = self.previous_checkpoint(commit.index)
                return f"train-{first:06d}-{max(commit.index - 1, 0):06d}"
            case "eval":
                return f"eval-{commit.index:06d}-{eval_name_from_key(key)}"
        return f"{commit.kind}-{commit.index:06d}"

    def previous_checkpoint(self, version: int) -> int:
        """Return the policy version of the last checkpoint before `version`, or 0, the base model."""
        return max((index for index in self.commits["checkpoint"] if index < version), default=0)

    def since_previous_checkpoint(self, kind: str, version: int) -> list[KeyAndCommit]:
        """Return keys and commits of the rollouts or steps (`kind`) since the checkpoint before policy `version`."""
        commits = self.commits[kind]
        return [commits[r] for r in range(self.previous_checkpoint(version), version) if r in commits]

    def evaluations(self, versions: range) -> list[KeyAndCommit]:
        """Return keys and commits of the evaluations of the policy versions in `versions`."""
        return [(key, commit) for key, commit in self.evals.items() if commit.policy_version in versions]

    def is_copy(self, key: str, commit: Commit) -> bool:
        """Return whether the run is a fork and copied the commit at `key` from its parent."""
        if commit.kind == "step" and not commit.attempt and commit.index in self.commits["rollout"]:
            key, commit = self.commits["rollout"][commit.index]
        return key.startswith("runs/") and commit.writer not in ("", key.split("/")[1])


def eval_name_from_key(commit_key: str) -> str:
    """Return the name of the evaluated data set, from the key of the commit."""
    return commit_key.rsplit("/", 1)[-1].removesuffix(".commit.json")


# ---- trackers --------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """The connection of one run to a tracker. Methods may raise any error; the caller (delivery.py) retries."""

    # Whether delivery restarts with the first record: a crash, or the deletion of the tracker's database, may have lost
    # delivered records. The tracker skips those that it still has.
    wants_all: bool = False
    # Whether the tracker may lose delivered records if the process is killed before it has delivered the run's end.
    buffers: ClassVar[bool] = False
    page: str | None = None  # URL of the run in the tracker's UI, if the tracker has a UI and the run exists

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Send records in the given order. `commits` has all commits of the run up to the last one in `records`. A
        record may be sent again: use the times and steps in the record, and find an existing run by its
        `TrackedRun.identity`."""

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that the tracker would refuse the same record again; the
        caller then skips the record."""
        return False


class OptionsOfTracker(StageConfig):
    """Base class of the options of one tracker. Each subclass is a row of the table in trackers.py. Its module must not
    import the tracker's client library at the top."""

    scheme: ClassVar[str]  # of the tracker's URIs
    title: ClassVar[str]  # name of the tracker in log lines

    connect: ClassVar[Callable[[str, TrackedRun], Tracker]]  # returns the connection of a run to the tracker at a URI

    def uri_of(self, store: Store) -> str | None:
        """Return the tracking URI, which may contain credentials, or None if the options do not choose the tracker."""
        return None

    def machine_rules(self) -> Iterator[tuple[object, str]]:
        """Yield (is violated, error message) for each thing that the tracker needs of this machine, if the options
        choose it."""
        yield from ()


# ---- local files and packages ----------------------------------------------------------------------------------------


def tracking_directory(store: Store, run: str) -> Path:
    """Return the local directory of a run's outbox: in the store if it is local, else in the user's state directory."""
    return Path(store.path(f"runs/{run}/tracking")) if store.is_local else trackers_directory(store) / run


def trackers_directory(store: Store) -> Path:
    """Return the local directory for the files of trackers without a server: the store if it is local, else a directory
    below $XDG_STATE_HOME."""
    if store.is_local:
        return Path(store.root)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # The endpoint distinguishes buckets of the same name on different servers.
    endpoint = store.options.get("endpoint_url") or store.options.get("client_kwargs", {}).get("endpoint_url") or ""
    return state / "penstock" / hashlib.sha256(f"{store.uri}{endpoint}".encode()).hexdigest()[:12]


def package_rule(package: str, flag: str) -> tuple[object, str]:
    """Return the rule (is violated, error message) that the optional package of the option `flag` is installed."""
    spec = find_spec(package)
    return (
        spec is None or spec.origin is None,  # W&B's output directory `wandb` is found as a package without an origin
        f"{flag} needs the package {package}, which is not installed: pip install 'penstock-rl[{package}]', or omit "
        f"{flag}",
    )
