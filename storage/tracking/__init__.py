"""Tracking: a run's commits and metrics are sent to experiment trackers: MLflow, TensorBoard, Weights & Biases.

All records are derived from the store, so they can be sent again at any time; no stage reads them back.

    delivery.py   the interface for flows: append records to the outbox, deliver them in a background thread
    outbox.py     the durable queue of records that are not delivered yet, one JSON line per record
    tracker.py    the interface of a tracker, its records, and the table of trackers
    lineage.py    relations between the commits of a run, for all trackers
    points.py     the metric points of a record, for all trackers
    retell.py     send a run's commits to a tracker from the store alone, without an outbox
    mlflow.py, tensorboard.py, wandb.py   the trackers
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlencode

from penstock.storage.errors import OptionError
from penstock.storage.refs import RunKeys
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import register_credentials
from penstock.storage.store import Store


def tracking_directory(store: Store, run: str) -> Path:
    """Return the local directory of a run's outbox: in the store if it is local, else in this user's state
    directory."""
    if store.is_local:
        return Path(store.path(RunKeys(run).prefix)) / "tracking"
    return _state_directory(store) / run


def trackers_directory(store: Store) -> Path:
    """Return the local directory for the files of trackers without a server: the store if it is local, else a directory
    below this user's state directory."""
    return Path(store.root) if store.is_local else _state_directory(store)


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


def tensorboard_uri(store: Store, directory: str | None = None, subdirectories: Sequence[str] = ()) -> str:
    """Return the tracking URI of TensorBoard: the given directory, TENSORBOARD_DIR, or `tensorboard` in the store, and
    in it the subdirectories, outermost first."""
    path = directory or os.environ.get("TENSORBOARD_DIR") or trackers_directory(store) / "tensorboard"
    return f"tensorboard://{Path(path, *subdirectories).expanduser().absolute()}"


def wandb_uri(store: Store, options: dict[str, str | None]) -> str:
    """Return the tracking URI of Weights & Biases. It may contain the API key, so it must not be displayed.

    Args:
        store: contains W&B's files by default.
        options: project, entity, group, id, mode, dir, host and key (see wandb.py); None stands for the default.
    """
    values = {name: resolve_secrets(value) for name, value in options.items() if value}
    path = values.get("dir") or os.environ.get("WANDB_DIR") or trackers_directory(store)
    return f"wandb://?{urlencode({**values, 'dir': str(Path(path).expanduser().absolute())})}"


def check_package(package: str, flag: str) -> None:
    """Check that an optional package is installed, which the option `flag` needs.

    Raises:
        OptionError: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # W&B's directory `wandb` also counts as a package, one without an origin
        raise OptionError(
            f"{flag} needs the package {package}, which is not installed: pip install 'penstock-rl[{package}]', or "
            f"omit {flag}"
        )


def _state_directory(store: Store) -> Path:
    """Return the directory for a store's tracking files below $XDG_STATE_HOME."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # The endpoint distinguishes buckets of the same name on different servers.
    endpoint = store.options.get("endpoint_url") or store.options.get("client_kwargs", {}).get("endpoint_url") or ""
    return state / "penstock" / hashlib.sha256(f"{store.uri}{endpoint}".encode()).hexdigest()[:12]
