"""A run's record in the store: created once, compared at every start, read by `penstock resume` and `penstock runs`."""

from __future__ import annotations

import json
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.config import PostTrainConfig, RunConfig, config_hash, flag, part, validated
from storage.errors import StoreError
from storage.refs import Commit, RunKeys
from storage.store import Store, committed_prefixes

RECORD_VERSION = 1


def open_store(config: RunConfig, *, probe: bool = True) -> Store:
    """Return the store of a run; without `probe` nothing is written to it. Raises StoreError if it cannot hold a run."""
    store = Store(config.store, config.store_options, single_writer=config.store_single_writer, probe=probe)
    if store.is_local and Path(store.root).exists() and not Path(store.root).is_dir():
        raise StoreError(f"store {store.uri!r} is not a directory: give --store a directory or a URI")
    return store


def open_run(store: Store, flow: str, config: PostTrainConfig) -> RunKeys:
    """Create the run's record, or check that this config may continue it; a changed schedule is recorded under `runs/<run>/changes/`.

    Raises:
        ValueError: see `check_run`.
    """
    keys = RunKeys(config.run.run)
    if create_record(store, flow, config):
        return keys
    check_run(store, flow, config)
    schedule = part(config, "schedule")
    if schedule != latest_schedule(store, keys):
        number = len(store.list(f"{keys.prefix}/changes"))
        change = {"at": time.time(), "schedule": schedule}
        store.create(f"{keys.prefix}/changes/{number:06d}.json", json.dumps(change, indent=1).encode())
    return keys


def create_record(store: Store, flow: str, config: PostTrainConfig, **more: Any) -> bool:
    """Write a run's record, `more` included, unless it has one. True if this call wrote it."""
    kept = config.model_dump(
        mode="json", exclude={"run": {"store_options"}}
    )  # they hold credentials, and every start gives them anew
    record = {
        "record_version": RECORD_VERSION,
        "flow": flow,
        "config": kept,
        "config_hash": config_hash(config),
        "code_version": code_version(),
        "created_at": time.time(),
        **more,
    }
    return store.create(RunKeys(config.run.run).record, json.dumps(record, indent=1).encode())


def check_run(store: Store, flow: str, config: PostTrainConfig) -> None:
    """Whether this config may begin or continue the run of its name.

    Raises:
        ValueError: another flow or another identity field; the message names the field, both values, and the way out.
    """
    keys = RunKeys(config.run.run)
    record = store.read_json(keys.record)
    if record is None:
        return
    if record["flow"] != flow:
        raise ValueError(f"run {keys.run!r} was started by `{record['flow']}`, not `{flow}`: give --run another name")
    before = part(validated(record["config"]), "identity")
    for field, value in part(config, "identity").items():
        if before[field] != value:
            raise ValueError(
                f"run {keys.run!r} has {flag(field.split('.')[1])} {before[field]!r}, this command says {value!r}: a run keeps it for life; "
                f"start a new one with another --run, or go another way from one of its rounds with `penstock fork {keys.run}`"
            )


def latest_schedule(store: Store, keys: RunKeys) -> dict[str, Any]:
    """The schedule fields as last recorded."""
    changes = store.list(f"{keys.prefix}/changes")
    if changes:
        change = store.read_json(f"{keys.prefix}/changes/{changes[-1]}")
        assert change is not None
        return change["schedule"]
    record = store.read_json(keys.record)
    assert record is not None
    return part(validated(record["config"]), "schedule")


def recorded(where: RunConfig, run: str) -> tuple[str, PostTrainConfig]:
    """Flow and config of a run, with its latest schedule, in the store that `where` names.

    Raises:
        ValueError: no such run.
    """
    store = open_store(where, probe=False)
    keys = RunKeys(run)
    record = store.read_json(keys.record)
    if record is None:
        found = ", ".join(store.list("runs")) or "none"
        raise ValueError(f"store {store.uri} has no run {run!r} (it has: {found}): check the name, or give --store")
    values = record["config"]
    for field, value in latest_schedule(store, keys).items():
        section, name = field.split(".")
        values[section][name] = value
    values["run"] |= {
        "store": where.store,
        "store_options": where.store_options,
        "store_single_writer": where.store_single_writer,
    }
    return record["flow"], validated(values)


def run_commits(store: Store, keys: RunKeys) -> list[Commit]:
    """Everything a run has committed, in the order it was made."""
    found = [commit for prefix in committed_prefixes(store, keys) if (commit := store.committed(prefix))]
    return sorted(found, key=lambda commit: commit.created_at)


def print_runs(where: RunConfig) -> int:
    """A table of the runs in a store."""
    store = open_store(where, probe=False)
    table = Table(box=None, pad_edge=False)
    for title in ("run", "flow", "rounds", "reward first -> last", "checkpoints", "evals", "started"):
        table.add_column(title)
    for run in store.list("runs"):
        keys = RunKeys(run)
        record = store.read_json(keys.record)
        if record is None:
            continue
        rounds = store.committed_indices(f"{keys.prefix}/steps")
        rewards = [_reward(store, keys, r) for r in (rounds[:1] + rounds[-1:])]
        parent = record.get("parent")
        table.add_row(
            f"{run} (from {parent['run']} at {parent['at']})" if parent else run,
            record["flow"],
            f"{len(rounds)} of {latest_schedule(store, keys)['run.num_rollout']}",
            " -> ".join(f"{reward:.3f}" for reward in rewards if reward is not None) or "-",
            " ".join(str(number) for number in store.committed_indices(f"{keys.prefix}/checkpoints")) or "-",
            " ".join(name.lstrip("0") or "0" for name in store.list(f"{keys.prefix}/evals")) or "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record["created_at"])),
        )
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own
    console.print(table if table.row_count else f"no runs in {store.uri}; `penstock demo` makes one")
    return 0


def _reward(store: Store, keys: RunKeys, rollout_id: int) -> float | None:
    commit = store.committed(keys.rollout(rollout_id))
    return commit.summary.get("rollout/raw_reward") if commit else None


@cache
def code_version() -> str:
    """Release, and the git commit if this is a checkout."""
    try:
        release = version("penstock")
    except PackageNotFoundError:  # a checkout on PYTHONPATH, not installed
        release = "uninstalled"
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return release
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return f"{release}+{git.stdout.strip()}" if git.returncode == 0 else release
