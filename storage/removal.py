"""How a run is removed: refused while somebody drives it or needs its files, and finished by the next call after a kill.

A remover holds the lease `removing.lease` and then looks for drivers and forks; a driver or a fork shows itself first and then looks for the
lease. So at least one of them sees the other. `removed.json` is the decision: from then on the run does not exist, and whoever comes by
(`penstock rm`, `penstock gc`, the next start under its name) deletes what is left of it; the decision goes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.errors import RunError, StoreError
from storage.leases import Lease, holder, live_drivers, store_time
from storage.refs import RunKeys
from storage.retention import fork_key
from storage.store import Found, Store, committed_prefixes


def removed_key(keys: RunKeys) -> str:
    """Return the key of the decision that a run is removed."""
    return f"{keys.prefix}/removed.json"


def is_removed(store: Store, keys: RunKeys) -> bool:
    """Whether a run was removed, perhaps not yet all of its files."""
    return store.exists(removed_key(keys))


def being_removed(store: Store, keys: RunKeys) -> str | None:
    """Return who removes a run now, in words, or None if nobody does."""
    key = _lease_key(keys)
    return holder(store, key, store_time(store)) if store.exists(key) else None


def remove_run(store: Store, keys: RunKeys, *, but: str | None = None) -> list[Found]:
    """Remove a run with everything under its name. Safe to call again after a kill.

    Args:
        store: where it lies.
        keys: of the run.
        but: key of the caller's own lease, if it is a driver that starts the run anew.

    Returns:
        the files that were deleted.

    Raises:
        RunError: somebody drives it, removes it, or needs its files.
        StoreError: the store cannot be written.
    """
    if other := being_removed(store, keys):
        raise RunError(f"run {keys.run!r} is being removed by {other}: wait until it is done")
    lease = Lease(store, _lease_key(keys))
    try:
        if not is_removed(store, keys):
            if drivers := live_drivers(store, keys, but=but):
                raise RunError(f"run {keys.run!r} is driven by {drivers[0]}: stop it first")
            if forks := dependents(store, keys):
                raise RunError(f"run {keys.run!r} has files that its fork {forks[0]!r} needs: remove the fork first")
            store.create(removed_key(keys), b"")  # empty: a full disk has room for a name
        kept = {removed_key(keys), lease.key, but}
        found = [file for file in store.walk(keys.prefix) if file.key not in kept]
        store.delete([file.key for file in found])
        store.prune(keys.prefix)
        store.delete([removed_key(keys)])
    finally:
        lease.release()
    return found


@contextmanager
def changing(store: Store) -> Iterator[None]:
    """Turn what the file system refuses inside the block into one sentence.

    Raises:
        StoreError: the store is read-only or full, or this user may not write there.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"store {store.uri} cannot be changed ({reason}): mount it writable, make room, or run as its owner"
        ) from error


def dependents(store: Store, keys: RunKeys) -> list[str]:
    """Return the runs whose commits name files of this run, and forks of it that are being made."""
    return [run for run in store.list("runs") if run != keys.run and _depends(store, RunKeys(run), keys)]


def _depends(store: Store, other: RunKeys, keys: RunKeys) -> bool:
    try:
        half_made = store.read_json(fork_key(other))
        if isinstance(half_made, dict) and (half_made.get("parent") or {}).get("run") == keys.run:
            return True
        record = store.read_json(other.record)
        if isinstance(record, dict) and keys.run not in _ancestors(record):
            return False
    except StoreError:  # damaged: its commits tell
        pass
    commits = (store.committed(prefix) for prefix in committed_prefixes(store, other))
    return any(commit is not None and (commit.attempt or "").startswith(f"{keys.prefix}/") for commit in commits)


def _ancestors(record: dict[str, Any]) -> Iterator[Any]:
    while isinstance(parent := record.get("parent"), dict):
        yield parent.get("run")
        record = parent


def _lease_key(keys: RunKeys) -> str:
    return f"{keys.prefix}/removing.lease"
