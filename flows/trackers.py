"""The trackers of a run: their URIs from the run's options, checks before the start, the run's identity."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from penstock.flows.run_config import RunConfig
from penstock.storage.errors import OptionError
from penstock.storage.history.run_record import RunRecord, read_run_record
from penstock.storage.refs import RunKeys
from penstock.storage.secrets import redact
from penstock.storage.store import Store
from penstock.storage.tracking import check_package, tensorboard_uri, tracking_uri, wandb_uri
from penstock.storage.tracking.tracker import TrackedRun

_WANDB_HOST = "https://api.wandb.ai"


def tracked_run(store: Store, keys: RunKeys, record: RunRecord, num_traces: int | None = None) -> TrackedRun:
    """Return a run as its trackers identify and show it.

    Args:
        store: of the run.
        keys: of the run.
        record: of the run (run.json).
        num_traces: samples of each round that MLflow shows as traces; default: as recorded by the run.
    """
    if num_traces is None:
        num_traces = record.config["run"]["mlflow_trace_samples"]
    return TrackedRun(keys.run, record.id, store.uri, store=store, num_traces=num_traces)


def tracking_uris(store: Store, run: RunConfig) -> list[str]:
    """Return the URIs of a run's trackers, MLflow first. They may contain credentials."""
    uris = [tracking_uri(store, run.mlflow_tracking_uri)]
    if run.use_tensorboard:
        uris.append(tensorboard_uri_of_run(store, run))
    if run.use_wandb and run.wandb_mode != "disabled":
        uris.append(wandb_uri_of_run(store, run))
    return uris


def tensorboard_uri_of_run(store: Store, run: RunConfig) -> str:
    """Return the URI of TensorBoard for a run's options."""
    return tensorboard_uri(store, run.tb_dir, [name for name in (run.tb_project_name, run.tb_experiment_name) if name])


def wandb_uri_of_run(store: Store, run: RunConfig) -> str:
    """Return the URI of Weights & Biases for a run's options. It may contain the API key."""
    options = {"project": run.wandb_project, "entity": run.wandb_team, "group": run.wandb_group}
    options |= {"id": run.wandb_run_id}
    options |= {"mode": run.wandb_mode, "dir": run.wandb_dir, "host": run.wandb_host}
    key = run.wandb_key if run.wandb_mode == "online" else None
    return wandb_uri(store, {**options, "key": key})


def update_mlflow_registry(store: Store, model: str, policy_run: str) -> str | None:
    """Show the decisions about a model in MLflow: its registered versions and aliases.

    Args:
        store: with the decisions.
        model: about which a decision was made.
        policy_run: run of the policy of the decision; its MLflow is updated if it knows the run.

    Returns:
        why MLflow was not updated, or None if it was.
    """
    keys = RunKeys(policy_run)
    record = read_run_record(store, keys)
    if record is None:
        return f"run {policy_run!r} has no record"
    uri = tracking_uri(store, record.config.get("run", {}).get("mlflow_tracking_uri"))
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return f"{redact(uri)} does not exist"
    from penstock.storage.tracking.mlflow.tracker import MlflowTracker

    try:
        MlflowTracker(uri, tracked_run(store, keys, record)).update_registry(model)
    except Exception as error:  # clients have their own error types
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]
    return None


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
    if run.wandb_mode == "online" and not run.wandb_key and not has_wandb_key(run.wandb_host):
        raise OptionError(
            "--use-wandb found no API key: set WANDB_API_KEY, or give --wandb-key env:NAME or secret-file:PATH, or "
            "--wandb-mode offline"
        )


def has_wandb_key(configured_host: str | None) -> bool:
    """Return whether W&B finds an API key without an option: in WANDB_API_KEY or ~/.netrc."""
    host = configured_host or os.environ.get("WANDB_BASE_URL") or _WANDB_HOST
    try:
        in_netrc = netrc.netrc().authenticators(urlsplit(host).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        in_netrc = False
    return in_netrc or bool(os.environ.get("WANDB_API_KEY"))
