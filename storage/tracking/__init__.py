"""Tracking: a run's commits and metrics are sent to an experiment tracker such as MLflow.

All records are derived from the store, so they can be sent again at any time; no stage reads them back.

    delivery.py   the interface for flows: append records to the outbox, deliver them in a background thread
    outbox.py     the durable queue of records that are not delivered yet, one JSON line per record
    tracker.py    the interface of a tracker, its records, and the table of trackers
    lineage.py    relations between the commits of a run, for all trackers
    mlflow.py     the tracker for MLflow
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from penstock.storage.refs import RunKeys
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.store import Store


def tracking_directory(store: Store, run: str) -> Path:
    """Return the local directory of a run's outbox: in the store if it is local, else in this user's state
    directory."""
    if store.is_local:
        return Path(store.path(RunKeys(run).prefix)) / "tracking"
    return _state_directory(store) / run


def tracking_uri(store: Store, configured: str | None = None) -> str:
    """Return the tracking URI: the configured one, MLFLOW_TRACKING_URI, or an SQLite file in the store.

    Without a local store the SQLite file is in this user's state directory. The URI may contain credentials, so it must
    not be displayed.
    """
    if uri := resolve_secrets(configured) or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    database = (Path(store.root) if store.is_local else _state_directory(store)) / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{database}"


def _state_directory(store: Store) -> Path:
    """Return the directory for a store's tracking files below $XDG_STATE_HOME."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # The endpoint distinguishes buckets of the same name on different servers.
    endpoint = store.options.get("endpoint_url") or store.options.get("client_kwargs", {}).get("endpoint_url") or ""
    return state / "penstock" / hashlib.sha256(f"{store.uri}{endpoint}".encode()).hexdigest()[:12]
