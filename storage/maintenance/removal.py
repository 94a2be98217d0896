"""Removal of a run. Refused while a driver runs or a fork needs the run's files; can be repeated after a kill.

A removal creates the lease `removing.lease` and then looks for drivers and forks; a driver or a fork registers itself
and then looks for `removing.lease`. So at least one of them sees the other. The run counts as removed once
`removed.json` exists. If the removal is killed, the next `penstock rm`, `penstock gc --delete` or start of a run with
the same name deletes the remaining files, `removed.json` last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.storage.commits import committed_prefixes
from penstock.storage.errors import RunError, StoreError
from penstock.storage.history.run_record import ForkRecord, read_run_record
from penstock.storage.maintenance.leases import Lease, describe_lease_holder, describe_live_drivers, store_time
from penstock.storage.maintenance.retention import unfinished_fork_key
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store, StoredFile


def removal_marker_key(keys: RunKeys) -> str:
    """Return the key of the file whose existence marks a run as removed."""
    return f"{keys.prefix}/removed.json"


def is_removed(store: Store, keys: RunKeys) -> bool:
    """Return whether a run was removed. Some of its files may remain."""
    return store.exists(removal_marker_key(keys))


def describe_removing_process(store: Store, keys: RunKeys) -> str | None:
    """Return a description of the process that is removing a run, or None."""
    key = _removal_lease_key(keys)
    return describe_lease_holder(store, key, store_time(store)) if store.exists(key) else None


def remove_run(
    store: Store, keys: RunKeys, *, own_lease: str | None = None, only_remains: bool = False
) -> list[StoredFile]:
    """Delete all files of a run and return them. Can be repeated after a kill.

    Args:
        store: the run's store.
        keys: of the run.
        own_lease: key of the caller's lease, if the caller is a driver that restarts the run from scratch.
        only_remains: remove only what an earlier removal or an unfinished fork has left.

    Raises:
        RunError: a driver is running, another process is removing the run, a fork needs its files, or with
            `only_remains` the run exists.
        StoreError: the store is not writable.
    """
    if other := describe_removing_process(store, keys):
        raise RunError(f"run {keys.run!r} is being removed by {other}: wait until that process ends")
    lease = Lease(store, _removal_lease_key(keys))
    try:
        if not is_removed(store, keys):
            if drivers := describe_live_drivers(store, keys, own_lease=own_lease):
                raise RunError(f"run {keys.run!r} has a running driver, {drivers[0]}: stop it first")
            if forks := dependent_runs(store, keys):
                raise RunError(f"run {keys.run!r} has files that its fork {forks[0]!r} needs: remove the fork first")
            if only_remains and store.exists(keys.record):  # after the check for drivers, which create it
                raise RunError(f"run {keys.run!r} exists: remove it with `penstock rm {keys.run}`")
            store.create(removal_marker_key(keys), b"")  # empty, so that it can be created on a full disk
        kept = {removal_marker_key(keys), lease.key, own_lease}
        files = [file for file in store.walk(keys.prefix) if file.key not in kept]
        store.delete([file.key for file in files])
        store.remove_empty_directories(keys.prefix)
        store.delete([removal_marker_key(keys)])
    finally:
        lease.release()
    return files


@contextmanager
def translate_write_errors(store: Store) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError.

    Raises:
        StoreError: the store is read-only or full, or the user is not permitted to write to it.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"store {store.uri} cannot be written ({reason}): mount it writable, free disk space, or run as its owner"
        ) from error


def dependent_runs(store: Store, keys: RunKeys) -> list[str]:
    """Return the names of runs whose commits list files of this run, including unfinished forks."""
    return [run for run in store.list("runs") if run != keys.run and _run_uses_files_of(store, RunKeys(run), keys)]


def _run_uses_files_of(store: Store, user: RunKeys, owner: RunKeys) -> bool:
    try:
        fork = store.read_record(ForkRecord, unfinished_fork_key(user))
        if fork and fork.parent.run == owner.run:
            return True
        record = read_run_record(store, user)
        parent = record.parent if record else None
        while parent and parent.run != owner.run:
            parent = parent.parent
        if record and parent is None:
            return False
    except StoreError:  # a damaged record: decide by the commits
        pass
    commits = (store.committed(prefix) for prefix in committed_prefixes(store, user))
    return any(commit is not None and (commit.attempt or "").startswith(f"{owner.prefix}/") for commit in commits)


def _removal_lease_key(keys: RunKeys) -> str:
    return f"{keys.prefix}/removing.lease"
