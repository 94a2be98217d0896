"""The table of trackers, and which of them the options of a run choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.storage.tracking.mlflow.mlflow_tracker import MlflowOptions
from penstock.storage.tracking.tensorboard import TensorBoardOptions
from penstock.storage.tracking.tracker import OptionsOfTracker, TrackedRun, Tracker
from penstock.storage.tracking.wandb import WandbOptions

if TYPE_CHECKING:
    from penstock.storage.commit import RunKeys
    from penstock.storage.history.run_record import RunRecord
    from penstock.storage.store import Store


class TrackerOptions(MlflowOptions, TensorBoardOptions, WandbOptions):
    """The options of all trackers. Each base is a row of the table."""


# Scheme of the tracking URI, also the name in `penstock report --to` -> options, which have the tracker's class.
TRACKERS = {row.scheme: row for row in cast("tuple[type[OptionsOfTracker], ...]", TrackerOptions.__bases__)}


def tracker_class(uri: str) -> type[Tracker]:
    """Return the tracker class for a tracking URI. Schemes without a row (http, sqlite, databricks, ...) are of
    MLflow."""
    return TRACKERS.get(uri.partition("://")[0], MlflowOptions).tracker


def tracking_uris(store: Store, options: TrackerOptions) -> list[str]:
    """Return the URIs of a run's trackers, MLflow first. They may contain credentials, so they must not be
    displayed."""
    return [uri for row in TRACKERS.values() if (uri := row.tracker.uri_of(store, options))]


def check_trackers(options: TrackerOptions) -> None:
    """Check that the run's trackers can be used on this machine. Raises OptionError if a package or a key is
    missing."""
    for row in TRACKERS.values():
        row.tracker.check_options(options)


def tracked_run(store: Store, keys: RunKeys, record: RunRecord, num_traces: int | None = None) -> TrackedRun:
    """Return a run as its trackers identify and show it. `num_traces`: see TrackedRun; default: as recorded."""
    if num_traces is None:
        num_traces = record.config["run"]["mlflow_trace_samples"]
    return TrackedRun(keys.run, record.id, store.uri, store=store, num_traces=num_traces)
