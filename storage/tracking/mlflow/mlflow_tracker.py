"""The tracker for MLflow: receives the records of a run, and logs each as MLflow objects."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from penstock.storage.commit import RunKeys
from penstock.storage.config import option
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import redact, redact_url, register_credentials
from penstock.storage.tracking.mlflow.mlflow_overview import SECTION, overview_points, store_view
from penstock.storage.tracking.mlflow.mlflow_runs import (
    CHARTS,
    MAX_DATASETS,
    MAX_METRICS,
    MAX_PARAMS,
    MlflowRuns,
    chunks,
    replace_forbidden_characters,
    to_mlflow,
)
from penstock.storage.tracking.tracker import (
    Committed,
    OptionsOfTracker,
    Record,
    ReportWritten,
    RunCommits,
    RunEnded,
    RunStarted,
    TrackedRun,
    Tracker,
    flatten_config,
    metric_points,
    trackers_directory,
)
from penstock.storage.web.login import with_login

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import DatasetInput, Metric

    from penstock.storage.store import Store

# MLflow's error codes for which retrying is useless.
_FINAL = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_MAX_PARAM = 6000  # characters of a parameter's value
_CURVE_KINDS = ("checkpoint", "eval")  # kinds of commits after which the reward curve is redrawn


class MlflowTracker(Tracker):
    """The tracker for MLflow, for one Penstock run."""

    name: ClassVar[str] = "MLflow"

    @staticmethod
    def uri_of(store: Store, options: MlflowOptions) -> str:
        """Return the tracking URI (`tracking_uri`): MLflow is always used."""
        return tracking_uri(store, options.mlflow_tracking_uri)

    def __init__(self, uri: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow would print two lines for every child run.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient  # here, since importing it takes seconds and reads the variables above

        from penstock.storage.tracking.mlflow.mlflow_commits import MlflowCommits, RunPage
        from penstock.storage.tracking.mlflow.mlflow_models import MlflowModels

        # Their errors are also raised, and logged by delivery.py.
        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.uri = uri
        self.run = run
        self.client = MlflowClient(with_login(uri))
        self.runs = MlflowRuns(self.client, uri, run)
        self.wants_all = self.runs.find_part("") is None
        models = MlflowModels(self.runs)
        self.run_page = RunPage(self.runs, models)
        self.mlflow_commits = MlflowCommits(self.runs, models, self.run_page)
        self._in_view: set[str] = set()  # metrics for which the stored view has columns

    @property
    def page(self) -> str | None:
        """Return the URL of the run's page, or None if MLflow is a database without a server."""
        if not self.uri.startswith("http") or self.runs.main_run_id is None:
            return None
        return f"{redact_url(self.uri).rstrip('/')}/{self.runs.url('runs', self.runs.main_run_id, CHARTS)}"

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Send records to MLflow in the given order. Metrics and data sets of the main run are collected into few
        requests."""
        points: list[Metric] = []
        inputs: list[DatasetInput] = []
        main_run = self.runs.find_or_create_part("", self.run.name, int(records[0].at * 1000) or None)
        self.runs.main_run_id = main_run
        for record in records:
            match record:
                case RunStarted():
                    self._log_start(main_run, record)
                case Committed():
                    inputs += self.mlflow_commits.log(main_run, record.key, record.commit, commits)
                case ReportWritten() if self.run.store and (content := self.run.store.read(record.store_key)):
                    self.client.log_text(main_run, content.decode(), "report.html")
            points += to_mlflow([*overview_points(record, commits), *metric_points(record)])
        for chunk in chunks(points, MAX_METRICS):
            self.client.log_batch(main_run, metrics=chunk)
        for datasets in chunks(inputs, MAX_DATASETS):
            self.client.log_inputs(main_run, datasets=datasets)
        if any(isinstance(record, Committed) for record in records):
            self.run_page.describe(main_run, commits)
        if new := {point.key for point in points if point.key.startswith(f"{SECTION}/")} - self._in_view:
            store_view(self.client, self.runs.experiment_id, new)
            self._in_view |= new
        ends = [record for record in records if isinstance(record, RunEnded)]
        changed = any(isinstance(record, Committed) and record.commit.kind in _CURVE_KINDS for record in records)
        if (changed or ends) and (figure := reward_curve(self.run.name, commits)):
            self.client.log_figure(main_run, figure, "reward.png")
        if ends:
            self.run_page.log_origins(main_run, commits)
            self.run_page.update(main_run)
            self.mlflow_commits.registry.update_models_of_run()
            if records[-1] is ends[-1]:  # otherwise a start follows the end: the run was resumed
                self.client.set_terminated(main_run, ends[-1].status, int(ends[-1].at * 1000))

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that MLflow would refuse the same record again."""
        return getattr(error, "error_code", None) in _FINAL

    def _log_start(self, run_id: str, record: RunStarted) -> None:
        from mlflow.entities import Param

        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        if run.data.tags.get("penstock.store") != self.run.store_uri:  # the store was moved
            self.client.set_tag(run_id, "penstock.store", self.run.store_uri)
        params: dict[str, str] = {}
        for name, value in flatten_config(record.config):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            params[replace_forbidden_characters(name)] = text[:_MAX_PARAM]
        known = run.data.params  # MLflow parameters are immutable, so a value changed on resume becomes a tag
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for chunk in chunks(new, MAX_PARAMS):
            self.client.log_batch(run_id, params=chunk)
        for name, value in params.items():
            if known.get(name, value) != value:
                self.client.set_tag(run_id, f"changed.{name}", value)
        self.run_page.update(run_id)


class MlflowOptions(OptionsOfTracker):
    """Options of MLflow."""

    scheme: ClassVar[str] = "mlflow"
    tracker: ClassVar[type[Tracker]] = MlflowTracker

    mlflow_tracking_uri: str | None = option(None, mutability="placement", secret=True)
    """MLflow server or database; default MLFLOW_TRACKING_URI, else an SQLite file in the store."""

    mlflow_trace_samples: int = option(4, mutability="placement", ge=0)
    """Number of samples of each round that MLflow shows as traces: turns, tool calls and parts of the reward."""


def tracking_uri(store: Store, configured: str | None = None) -> str:
    """Return the tracking URI: the configured one, MLFLOW_TRACKING_URI, or an SQLite file in the store.

    Without a local store the SQLite file is in this user's state directory. The URI may contain credentials, so it must
    not be displayed.
    """
    if uri := resolve_secrets(configured) or os.environ.get("MLFLOW_TRACKING_URI"):
        return register_credentials(uri)
    database = trackers_directory(store) / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{database}"


def update_mlflow_registry(store: Store, model: str, policy_run: str) -> str | None:
    """Show the decisions about a model in MLflow: its registered versions and aliases. Return why MLflow was not
    updated, or None if it was."""
    from penstock.storage.history.run_record import read_run_record  # here, so that options do not load the store

    record = read_run_record(store, RunKeys(policy_run))
    if record is None:
        return f"run {policy_run!r} has no record"
    uri = tracking_uri(store, record.config.get("run", {}).get("mlflow_tracking_uri"))
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return f"{redact(uri)} does not exist"
    try:
        tracker = MlflowTracker(uri, TrackedRun(policy_run, record.id, store.uri, store=store))
        if tracker.runs.find_part(""):
            tracker.mlflow_commits.registry.update_model(model)
    except Exception as error:  # clients have their own error types
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]
    return None


def reward_curve(run: str, commits: RunCommits) -> Figure | None:
    """Plot mean training reward and evaluation rewards over rounds. Return None if there are no rewards."""
    from matplotlib.figure import Figure  # not pyplot, which is not thread-safe

    training, evals = commits.training_rewards(), commits.eval_curves()
    if not training and not evals:
        return None
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    if training:
        axes.plot(list(training), list(training.values()), label="training, mean of a round")
    for task, rewards in sorted(evals.items()):
        axes.plot(list(rewards), list(rewards.values()), marker="o", linestyle="--", label=f"evaluation {task}")
    axes.set(title=run, xlabel="rounds trained", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
