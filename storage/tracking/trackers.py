"""The table of trackers, and the choice of a run's trackers from its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from penstock.storage.errors import check_rules
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
from penstock.storage.tracking.tensorboard import TensorBoardOptions
from penstock.storage.tracking.tracker import OptionsOfTracker, TrackedRun
from penstock.storage.tracking.wandb import WandbOptions

if TYPE_CHECKING:
    from penstock.storage.commit import RunKeys
    from penstock.storage.history.run_record import RunRecord
    from penstock.storage.store import Store


class TrackerOptions(MlflowOptions, TensorBoardOptions, WandbOptions):
    """The options of all trackers. Each base is a row of the table."""

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        for prefix, switch in (("tb_", "use_tensorboard"), ("wandb_", "use_wandb")):
            for name in sorted(name for name in self.model_fields_set if name.startswith(prefix)):
                flag, needed = (f"--{option.replace('_', '-')}" for option in (name, switch))
                yield (
                    not getattr(self, switch) and getattr(self, name) != type(self).model_fields[name].default,
                    f"{flag} has no effect without {needed}: add {needed}, or omit {flag}",
                )


# Scheme of the tracking URI, also the name in `penstock report --to` -> row.
TRACKERS = {row.scheme: row for row in cast("tuple[type[OptionsOfTracker], ...]", TrackerOptions.__bases__)}


def tracker_of(uri: str) -> type[OptionsOfTracker]:
    """Return the row of the tracker of a URI. Schemes without a row (http, sqlite, databricks) belong to MLflow."""
    return TRACKERS.get(uri.partition("://")[0], MlflowOptions)


def tracking_uris(store: Store, options: TrackerOptions) -> list[str]:
    """Return the URIs of a run's trackers, MLflow first. They may contain credentials: do not display them."""
    return [uri for row in TRACKERS.values() if (uri := row.uri_of(options, store))]


def check_trackers(options: TrackerOptions) -> None:
    """Check that this machine can use the run's trackers. Raises OptionError if a package or a key is missing."""
    check_rules(rule for row in TRACKERS.values() for rule in row.machine_rules(options))


def tracked_run(store: Store, keys: RunKeys, record: RunRecord, num_traces: int | None = None) -> TrackedRun:
    """Return a run as trackers see it. `num_traces` is the number of samples of each round that MLflow shows as traces;
    default: the recorded --mlflow-trace-samples."""
    if num_traces is None:
        num_traces = record.config["run"]["mlflow_trace_samples"]
    return TrackedRun(keys.run, record.id, store.uri, store=store, num_traces=num_traces)
