"""A run's record in the store: created once, compared at every start, read by `penstock resume` and `penstock runs`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flows import flags
from flows.config import PostTrainConfig, RunConfig, config_hash, flag, part, validated
from flows.paths import absolute, relative
from storage.errors import InputError, OptionError, RunError, StoreError
from storage.keys import is_run_name
from storage.leases import Lease, live_drivers
from storage.refs import Commit, RunKeys
from storage.removal import being_removed, is_removed, remove_run
from storage.retention import fork_key
from storage.store import Store, committed_prefixes

RECORD_VERSION = 1
_CHANGE = re.compile(r"\d{6}\.json")


def open_store(config: RunConfig, *, probe: bool = True) -> Store:
    """Return the store of a run.

    Args:
        config: names it.
        probe: try now whether it can be written. Without, nothing is written: for commands that only read or delete.

    Raises:
        StoreError: it cannot hold a run.
    """
    if "://" not in config.store:
        place = next(path for path in (Path(config.store), *Path(config.store).absolute().parents) if path.exists())
        if not place.is_dir():
            raise StoreError(
                f"store {config.store!r} is not writable: {place} is not a directory; give --store a directory or a URI"
            )
    return Store(config.store, config.store_options, single_writer=config.store_single_writer, probe=probe)


def run_keys(run: str) -> RunKeys:
    """Return the keys of a run.

    Raises:
        RunError: no run can have this name.
    """
    if not is_run_name(run):
        raise RunError(f"{run[:60]!r} cannot name a run: use at most 200 letters, digits, dots, dashes and underscores")
    return RunKeys(run)


def existing_run(store: Store, run: str) -> RunKeys:
    """Return the keys of a run of which something lies in the store.

    Raises:
        RunError: there is nothing; the message names the runs that there are.
    """
    keys = run_keys(run)
    if not store.list(keys.prefix):
        raise unknown_run(store, run)
    return keys


def unknown_run(store: Store, run: str) -> RunError:
    """Return the error of a run that does not exist."""
    names = store.list("runs")
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"
    return RunError(f"store {store.uri} has no run {run!r} (it has: {shown}): check the name, or give --store")


# ---- starting ---------------------------------------------------------------------------------------------------------------


def open_run(store: Store, flow: str, config: PostTrainConfig, *, lease: Lease | None = None) -> RunKeys:
    """Create the run's record, or check that this config may continue it; a changed schedule is recorded under `runs/<run>/changes/`.

    A record with other options is replaced as long as nothing is committed and nobody else drives the run.

    Args:
        store: where the run lies.
        flow: that starts.
        config: of this start.
        lease: the caller's own, so that it does not count as another driver.

    Raises:
        RunError: see `check_run`.
    """
    keys, own, config = run_keys(config.run.run), lease.key if lease else None, absolute(config)
    while True:
        check_run(store, flow, config, own=own)
        if not is_removed(store, keys):
            if create_record(store, flow, config):
                return keys
            record = read_record(store, keys)
            if record is not None and difference(record, flow, config) is None:
                _record_schedule(store, keys, record, part(config, "schedule"))
                return keys
        discard(store, keys, but=own)


def discard(store: Store, keys: RunKeys, *, but: str | None = None) -> int:
    """Remove a run with its files, also those on their way to MLflow. Returns the number of bytes that were deleted.

    Raises:
        RunError: somebody drives it, or a fork needs its files.
    """
    files = remove_run(store, keys, but=but)
    if not store.is_local:  # of a local store they lie in the run
        from storage.tracking import tracking_directory

        shutil.rmtree(tracking_directory(store, keys.run), ignore_errors=True)
    return sum(file.bytes for file in files)


def create_record(store: Store, flow: str, config: PostTrainConfig, **more: Any) -> bool:
    """Write a run's record, `more` included, unless it has one. True if this call wrote it."""
    config = absolute(config)
    kept = config.model_dump(
        mode="json", exclude={"run": {"store_options"}}
    )  # they hold credentials, and every start gives them anew
    record = {
        "record_version": RECORD_VERSION,
        "flow": flow,
        "config": kept,
        "config_hash": config_hash(config),
        "directory": str(Path.cwd()),  # in which the run was started: a project may be moved
        "code_version": code_version(),
        "created_at": time.time(),
        "id": uuid.uuid4().hex,  # so that of two starts at once one has written it
        **more,
    }
    return store.create(RunKeys(config.run.run).record, json.dumps(record, indent=1).encode())


def check_run(store: Store, flow: str, config: PostTrainConfig, *, own: str | None = None) -> None:
    """Check that this config may begin or continue the run of its name.

    Args:
        store: where the run lies.
        flow: that starts.
        config: of this start.
        own: key of the caller's lease, if it has one.

    Raises:
        RunError: another flow or another identity field, while something is committed or somebody drives the run; a lost record.
    """
    keys, config = run_keys(config.run.run), absolute(config)
    if other := being_removed(store, keys):
        raise RunError(f"run {keys.run!r} is being removed by {other}: wait until it is done")
    if is_removed(store, keys):
        return
    record = read_record(store, keys)
    if record is None:
        _check_unrecorded(store, keys, flow, config)
        return
    problem = difference(record, flow, config)
    if problem is None:
        return
    if record.get("parent"):
        raise RunError(f"{problem}: a fork keeps it; fork again with other options, or give --run another name")
    if prefixes := committed_prefixes(store, keys):
        steps = [prefix for prefix in prefixes if "/steps/" in prefix]
        other_way = (
            f"`penstock fork {keys.run}` changes it from a round on" if steps else f"`penstock rm {keys.run}` removes the run"
        )
        raise RunError(f"{problem}: a run keeps it for life; {other_way}, or start a new one with another --run")
    if drivers := live_drivers(store, keys, but=own):
        raise RunError(f"{problem}, and it is driven by {drivers[0]}: stop that first, or give --run another name")


def difference(record: dict[str, Any], flow: str, config: PostTrainConfig) -> str | None:
    """Return the first thing that a run keeps for life and that this command says otherwise, in words; None if all is equal."""
    run = config.run.run
    if record["flow"] != flow:
        return f"run {run!r} was started by `{record['flow']}`, not `{flow}`"
    before, now = absolute(_config_of(record)), absolute(config)
    old, new = part(before, "identity"), part(now, "identity")
    moved_old = part(relative(before, record.get("directory") or str(Path.cwd())), "identity")
    moved_new = part(relative(now, str(Path.cwd())), "identity")
    for field, value in new.items():
        if old[field] != value and moved_old[field] != moved_new[field]:
            return f"run {run!r} has {flag(field.split('.')[1])} {_short(old[field])}, this command says {_short(value)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_unrecorded(store: Store, keys: RunKeys, flow: str, config: PostTrainConfig) -> None:
    """Check that a run without a record is a new one, or has lost the record that this very command would write again."""
    prefixes = committed_prefixes(store, keys)
    if not prefixes:
        return
    if store.read(fork_key(keys)) is not None:
        raise RunError(f"run {keys.run!r} is a fork that is not finished: give the same `penstock fork` again, or another --run")
    commits = [commit for prefix in prefixes if (commit := store.committed(prefix))]
    shared = any(commit.attempt and not commit.attempt.startswith(f"{keys.prefix}/") for commit in commits)
    rollouts = [commit for commit in commits if commit.kind == "rollout"]
    same_flow = flow == ("sft" if rollouts[0].policy_version == -1 else "post_train") if rollouts else flow == "evaluate"
    ours = {config_hash(config), config_hash(relative(config, str(Path.cwd())))}  # the second: as older releases recorded it
    if not shared and same_flow and {commit.config_hash for commit in commits} <= ours:
        return  # these are the options that the commits were made with
    raise RunError(
        f"run {keys.run!r} has {len(commits)} commits, but {store.path(keys.record)} is lost: restore it from a backup, "
        "or give exactly the options that the run was started with, or another --run"
    )


# ---- reading ----------------------------------------------------------------------------------------------------------------


def read_record(store: Store, keys: RunKeys) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has none.

    Raises:
        RunError: it is damaged.
        StoreError: it is not JSON.
    """
    record = store.read_json(keys.record)
    if record is None:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict) or not isinstance(record.get("flow"), str):
        raise RunError(f"{store.path(keys.record)} is damaged: restore it from a backup")
    parent = record.get("parent")
    while parent is not None:
        if not isinstance(parent, dict) or not is_run_name(str(parent.get("run"))) or not isinstance(parent.get("at"), int):
            raise RunError(f"{store.path(keys.record)} names a parent that cannot be a run: restore it from a backup")
        parent = parent.get("parent")
    return record


def _config_of(record: dict[str, Any]) -> PostTrainConfig:
    try:
        return validated(record["config"])
    except InputError as error:
        run = (record["config"].get("run") or {}).get("run", "")
        raise RunError(
            f"the options of run {run!r} are not valid in this release ({error}): use the release that wrote them"
        ) from error


def latest_schedule(store: Store, keys: RunKeys) -> dict[str, Any]:
    """Return the schedule fields as last recorded.

    Raises:
        RunError: the run has no record, or it is damaged.
    """
    record = read_record(store, keys)
    if record is None:
        raise unknown_run(store, keys.run)
    schedule = part(_config_of(record), "schedule")
    if names := _changes(store, keys):
        change = store.read_json(f"{keys.prefix}/changes/{names[-1]}")
        if not isinstance(change, dict) or not isinstance(change.get("schedule"), dict):
            raise RunError(f"{keys.prefix}/changes/{names[-1]} is damaged: restore it from a backup")
        schedule |= {field: value for field, value in change["schedule"].items() if field in schedule}
    return schedule


def _changes(store: Store, keys: RunKeys) -> list[str]:
    return [name for name in store.list(f"{keys.prefix}/changes") if _CHANGE.fullmatch(name)]


def _record_schedule(store: Store, keys: RunKeys, record: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Record a changed schedule under the next free number: of two starts at once the later number counts, and both are kept."""
    before = part(absolute(_merged(record, latest_schedule(store, keys))), "schedule")
    if schedule == before:
        return
    change = {"at": time.time(), "id": uuid.uuid4().hex, "schedule": schedule}
    number = max((int(name.removesuffix(".json")) for name in _changes(store, keys)), default=-1) + 1
    while not store.create(f"{keys.prefix}/changes/{number:06d}.json", json.dumps(change, indent=1).encode()):
        number += 1


def _merged(record: dict[str, Any], schedule: dict[str, Any]) -> PostTrainConfig:
    """Return the config of a record with another schedule."""
    values = {section: dict(fields) for section, fields in record["config"].items()}
    for field, value in schedule.items():
        section, name = field.split(".")
        values[section][name] = value
    return _config_of({"config": values})


def recorded(where: RunConfig, run: str) -> tuple[str, PostTrainConfig]:
    """Return flow and config of a run, with its latest schedule, in the store that `where` names. Writes nothing.

    Raises:
        RunError: no such run, or its record is lost or damaged.
    """
    store, keys = open_store(where, probe=False), run_keys(run)
    if is_removed(store, keys):
        raise RunError(f"run {run!r} was removed, but not completely: `penstock gc --delete` finishes it")
    record = read_record(store, keys)
    if record is None:
        if committed_prefixes(store, keys):
            raise RunError(
                f"run {run!r} has commits, but {store.path(keys.record)} is lost: restore it from a backup, "
                "or start the run with exactly the options that it was started with"
            )
        raise unknown_run(store, run)
    config = _merged(record, latest_schedule(store, keys))
    stores = {"store": where.store, "store_options": where.store_options, "store_single_writer": where.store_single_writer}
    return record["flow"], config.model_copy(update={"run": config.run.model_copy(update=stores)})


def resumed(run: str, argv: Sequence[str]) -> tuple[str, PostTrainConfig]:
    """Return flow and config of a run with the options of a command line: schedule and placement may change.

    Raises:
        OptionError: an option does not fit.
        RunError: no such run, or an option that a run keeps for life.
    """
    given = flags.values_of(argv)
    if "run" in given.get("run", {}):
        raise OptionError("penstock resume takes the run's name as its first word: leave out --run")
    stores = {name: value for name, value in given.get("run", {}).items() if name.startswith("store")}
    flow, config = recorded(validated({"run": stores}).run, run)
    return flow, with_options(config, argv)


def with_options(config: PostTrainConfig, argv: Sequence[str]) -> PostTrainConfig:
    """Return a config with the options of a command line; batch sizes that follow from each other follow again.

    Raises:
        OptionError: an option does not fit.
    """
    given, values = flags.values_of(argv), config.model_dump(mode="json")
    sizes = {"rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"}
    if sizes & {
        *given.get("rollout", {}),
        *given.get("train", {}),
    }:  # what the config has filled in must not contradict what is given
        values["train"]["global_batch_size"] = None
    elif "global_batch_size" in given.get("train", {}):
        values["train"]["num_steps_per_rollout"] = None
    return validated(flags.values_of(argv, values))


def run_commits(store: Store, keys: RunKeys) -> list[Commit]:
    """Return everything a run has committed, in the order it was made."""
    found = [commit for prefix in committed_prefixes(store, keys) if (commit := store.committed(prefix))]
    return sorted(found, key=lambda commit: commit.created_at)


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
