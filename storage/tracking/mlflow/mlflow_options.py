"""Options of MLflow, its tracking URI, and the connection of a run. MLflow is imported by the first connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from penstock.storage.commit import RunKeys
from penstock.storage.config import option
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import redact, register_credentials
from penstock.storage.tracking.tracker import OptionsOfTracker, TrackedRun, Tracker, trackers_directory

if TYPE_CHECKING:
    from penstock.storage.store import Store
    from penstock.storage.tracking.mlflow.mlflow_tracker import MlflowTracker


def connect_mlflow(uri: str, run: TrackedRun) -> MlflowTracker:
    """Return the connection of a run to MLflow."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox retries
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow would print two lines for every child run.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Here, since importing MLflow takes seconds and reads the variables above.
    from penstock.storage.tracking.mlflow.mlflow_tracker import MlflowTracker

    return MlflowTracker(uri, run)


class MlflowOptions(OptionsOfTracker):
    """Options of MLflow."""

    scheme: ClassVar[str] = "mlflow"
    title: ClassVar[str] = "MLflow"
    connect: ClassVar[Callable[[str, TrackedRun], Tracker]] = connect_mlflow

    mlflow_tracking_uri: str | None = option(None, mutability="placement", secret=True)
    """MLflow server or database; default MLFLOW_TRACKING_URI, else an SQLite file in the store."""

    mlflow_trace_samples: int = option(4, mutability="placement", ge=0)
    """Number of samples of each round that MLflow shows as traces: turns, tool calls and parts of the reward."""

    def uri_of(self, store: Store) -> str:
        """Return the tracking URI (see `tracking_uri`). It is never None: MLflow is always used."""
        return tracking_uri(store, self.mlflow_tracking_uri)


def tracking_uri(store: Store, configured: str | None = None) -> str:
    """Return MLflow's tracking URI: `configured`, MLFLOW_TRACKING_URI, or an SQLite file in the store. If the store is
    not local, the SQLite file is in this user's state directory.

    The URI may contain credentials, so it must not be displayed.
    """
    if uri := resolve_secrets(configured) or os.environ.get("MLFLOW_TRACKING_URI"):
        return register_credentials(uri)
    database = trackers_directory(store) / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{database}"


def update_mlflow_registry(store: Store, model: str, policy_run: str) -> str | None:
    """Update MLflow's registered model of `model` (versions and aliases) from the decisions in the store. Return None,
    or why it was not updated. The recorded options of the run `policy_run` say where MLflow is."""
    from penstock.storage.history.run_record import read_run_record  # here, so that options do not load the store

    record = read_run_record(store, RunKeys(policy_run))
    if record is None:
        return f"run {policy_run!r} has no record"
    uri = tracking_uri(store, record.config.get("run", {}).get("mlflow_tracking_uri"))
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return f"{redact(uri)} does not exist"
    try:
        tracker = connect_mlflow(uri, TrackedRun(policy_run, record.id, store.uri, store=store))
        if tracker.runs.find_part(""):
            tracker.models.update_registered(model)
    except Exception as error:  # clients have their own error types
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]
    return None
