"""The trackers of a run: their URIs from the run's options, checks before the start, the run's identity."""

from __future__ import annotations

import netrc
import os
from typing import Any
from urllib.parse import urlsplit

from penstock.flows.run_config import RunConfig
from penstock.storage.errors import OptionError
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store
from penstock.storage.tracking import check_package, tensorboard_uri, tracking_uri, wandb_uri
from penstock.storage.tracking.tracker import TrackedRun

_WANDB_HOST = "https://api.wandb.ai"


def tracked_run(store: Store, keys: RunKeys, record: dict[str, Any]) -> TrackedRun:
    """Return the identity of a run in its trackers. `record` is the run's record (run.json)."""
    recorded_store = str(record["config"].get("run", {}).get("store") or "")
    id = str(record.get("id") or "")
    return TrackedRun(keys.run, store.uri, run_id=id, recorded_store=recorded_store, store=store)


def tracking_uris(store: Store, run: RunConfig) -> list[str]:
    """Return the URIs of a run's trackers, MLflow first. They may contain credentials."""
    uris = [tracking_uri(store, run.mlflow_tracking_uri)]
    if run.use_tensorboard:
        uris.append(tensorboard_uri(store, run.tb_dir))
    if run.use_wandb and run.wandb_mode != "disabled":
        uris.append(wandb_uri_of_run(store, run))
    return uris


def wandb_uri_of_run(store: Store, run: RunConfig) -> str:
    """Return the URI of Weights & Biases for a run's options. It may contain the API key."""
    options = {"project": run.wandb_project, "entity": run.wandb_team, "group": run.wandb_group}
    options |= {"mode": run.wandb_mode, "dir": run.wandb_dir, "host": run.wandb_host}
    key = run.wandb_key if run.wandb_mode == "online" else None
    return wandb_uri(store, {**options, "key": key})


def check_trackers(run: RunConfig) -> None:
    """Check that the packages of the run's trackers are installed, and that W&B has an API key if it is online.

    Raises:
        OptionError: a package or the key is missing.
    """
    if run.use_tensorboard:
        check_package("tensorboard", "--use-tensorboard")
        if run.tb_dir and "://" in run.tb_dir:
            raise OptionError(f"--tb-dir {run.tb_dir[:80]!r} is a URI, but a local directory is needed: give its path")
    if not run.use_wandb or run.wandb_mode == "disabled":
        return
    check_package("wandb", "--use-wandb")
    if run.wandb_mode == "online" and not run.wandb_key and not _has_wandb_key(run.wandb_host):
        raise OptionError(
            "--use-wandb found no API key: set WANDB_API_KEY, or give --wandb-key env:NAME or secret-file:PATH, or "
            "--wandb-mode offline"
        )


def _has_wandb_key(configured_host: str | None) -> bool:
    """Return whether W&B finds an API key without an option: in WANDB_API_KEY or ~/.netrc."""
    host = configured_host or os.environ.get("WANDB_BASE_URL") or _WANDB_HOST
    try:
        in_netrc = netrc.netrc().authenticators(urlsplit(host).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        in_netrc = False
    return in_netrc or bool(os.environ.get("WANDB_API_KEY"))
