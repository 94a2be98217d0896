"""Tracking: a run's commits and metrics are sent to experiment trackers: MLflow, TensorBoard, Weights & Biases.

All records are derived from the store, so they can be sent again at any time; no stage reads them back. To add a
tracker, write one module with its options and an implementation of `Tracker`, and add a row to trackers.py.

    trackers.py     the table of trackers, and which of them the options of a run choose
    tracker.py      the interface of a tracker, its records, and the metric points in them
    delivery.py     the interface for flows: append records to the outbox, deliver them in a background thread
    outbox.py       the durable queue of records that are not delivered yet, one JSON line per record
    run_commits.py  the commits of a run for all trackers
    mlflow/, tensorboard.py, wandb.py   the trackers
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.storage.errors import OptionError

if TYPE_CHECKING:
    from penstock.storage.store import Store


def tracking_directory(store: Store, run: str) -> Path:
    """Return the local directory of a run's outbox: in the store if it is local, else in this user's state
    directory."""
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


def check_package(package: str, flag: str) -> None:
    """Check that an optional package is installed, which the option `flag` needs."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # W&B's directory `wandb` also counts as a package, one without an origin
        raise OptionError(
            f"{flag} needs the package {package}, which is not installed: pip install 'penstock-rl[{package}]', or "
            f"omit {flag}"
        )
