"""The tracker for MLflow: receives the records of a run, and logs each as MLflow objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from penstock.storage.secrets import redact_url
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.mlflow.figure import reward_curve
from penstock.storage.tracking.mlflow.runs import MlflowRuns
from penstock.storage.tracking.mlflow.values import (
    MAX_DATASETS,
    MAX_METRICS,
    MAX_PARAMS,
    chunks,
    flatten_params,
    to_mlflow,
)
from penstock.storage.tracking.points import metric_points
from penstock.storage.tracking.tracker import Committed, Record, ReportWritten, Resend, RunEnded, RunStarted, TrackedRun
from penstock.storage.web.login import with_login

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric

_FINAL = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
}  # MLflow error codes for which retrying is useless
_CURVE_KINDS = ("checkpoint", "eval")  # kinds of commits after which the reward curve is redrawn


class MlflowTracker:
    """The tracker for MLflow, for one Penstock run."""

    name: ClassVar[str] = "MLflow"

    def __init__(self, uri: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault(
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"
        )  # MLflow would print two lines for every child run
        from mlflow import MlflowClient  # here, since importing it takes seconds and reads the variables above

        from penstock.storage.tracking.mlflow.commits import MlflowCommits
        from penstock.storage.tracking.mlflow.models import MlflowModels
        from penstock.storage.tracking.mlflow.run_page import RunPage

        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(
                logging.CRITICAL
            )  # their errors are also raised, and logged by delivery.py
        self.uri = uri
        self.run = run
        self.client = MlflowClient(with_login(uri))
        self.runs = MlflowRuns(self.client, uri, run)
        self.resend: Resend = "all" if self.runs.find_main_run(run) is None else "none"
        models = MlflowModels(self.runs)
        self.run_page = RunPage(self.runs, models)
        self.commits = MlflowCommits(self.runs, models, self.run_page)

    @property
    def page(self) -> str | None:
        """Return the URL of the run's page, or None if MLflow is a database without a server."""
        if not self.uri.startswith("http") or self.runs.main_run_id is None:
            return None
        return f"{redact_url(self.uri).rstrip('/')}/{self.runs.url('runs', self.runs.main_run_id)}"

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Send records to MLflow in the given order. Metrics and data sets of the main run are collected into few
        requests."""
        points: list[Metric] = []
        inputs: list[DatasetInput] = []
        main_run = self.runs.find_or_create_main_run(records[0].at)
        for record in records:
            match record:
                case RunStarted():
                    self._log_start(main_run, record)
                case Committed():
                    inputs += self.commits.log(main_run, record.key, record.commit, lineage)
                case ReportWritten() if self.run.store and (content := self.run.store.read(record.store_key)):
                    self.client.log_text(main_run, content.decode(), "report.html")
            points += to_mlflow(metric_points(record))
        for chunk in chunks(points, MAX_METRICS):
            self.client.log_batch(main_run, metrics=chunk)
        for datasets in chunks(inputs, MAX_DATASETS):
            self.client.log_inputs(main_run, datasets=datasets)
        ends = [record for record in records if isinstance(record, RunEnded)]
        changed = any(isinstance(record, Committed) and record.commit.kind in _CURVE_KINDS for record in records)
        if (changed or ends) and (figure := reward_curve(self.run.name, lineage)):
            self.client.log_figure(main_run, figure, "reward.png")
        if ends:
            self.run_page.log_origins(main_run, lineage)
            self.run_page.update(main_run)
            self.commits.registry.update_models_of_run()
            if records[-1] is ends[-1]:  # otherwise a start follows the end: the run was resumed
                self.client.set_terminated(main_run, ends[-1].status, int(ends[-1].at * 1000))

    def update_registry(self, model: str) -> None:
        """Derive versions and aliases of a registered model from the decisions in the store, if MLflow has the run."""
        if self.runs.find_main_run(self.run):
            self.commits.registry.update_model(model)

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
        params = dict(flatten_params(record.config))
        known = run.data.params  # MLflow parameters are immutable, so a value changed on resume becomes a tag
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for chunk in chunks(new, MAX_PARAMS):
            self.client.log_batch(run_id, params=chunk)
        for name, value in params.items():
            if known.get(name, value) != value:
                self.client.set_tag(run_id, f"changed.{name}", value)
        self.run_page.update(run_id)
