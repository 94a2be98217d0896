"""What lies in a store and is needed by nothing: attempts of killed writers, expired checkpoints, journals of finished rounds, ...

Only files are found here, and only by what the commits of *all* runs name, since a fork's commits name its parent's files. Nothing younger
than the caller says is found, but for checkpoints that a tombstone has announced; what a live writer or driver needs stays (leases.py).
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from storage.disk import in_parallel
from storage.errors import RunError, StoreError
from storage.faults import reach
from storage.leases import claim_key, condemn, holder, lease_key, live_drivers, pardon, store_time
from storage.refs import Commit, RunKeys, commit_key, parsed
from storage.removal import remove_run
from storage.retention import Expired, fork_key
from storage.store import Store

NUM_READS = 16  # small ones at a time; on an object store each waits for the network

Record = TypeVar("Record", bound=BaseModel)

_COMMIT = commit_key("")
_AT_ONCE = ("expired checkpoint", "removed run")  # somebody has decided that they go
_TEMPORARY = re.compile(r"\.[0-9a-f]{12}\.tmp$")  # Store.create on a local disk
_ATTEMPT = re.compile(r"^(?P<unit>(?P<prefix>.+)/attempt-[^/]+?)(\.parts)?/")
_JOURNAL = re.compile(r"^(?P<unit>(?P<prefix>.+)\.journal)/")
_GUARD = re.compile(r"^(?P<unit>.+/attempt-[^/]+)\.(lease|claim)$")  # leases.py
_LEASE = re.compile(r"^runs/[^/]+/(drivers/[^/]+|removing)\.lease$")
_WEIGHTS = re.compile(r"^(?P<unit>runs/[^/]+/published/weights-[^/]+)/")  # on their way to engines by disk
_RUN = re.compile(r"^runs/(?P<run>[^/]+)/")


@dataclass(frozen=True)
class Leftover:
    """Some files that belong together and that nothing needs."""

    kind: str
    key: str  # of the directory or file
    files: tuple[str, ...]
    bytes: int
    modified: float  # of the newest file, seconds since the epoch


def leftovers(store: Store, run: str | None = None, *, older_than: float, now: float | None = None) -> list[Leftover]:
    """Everything that nothing needs, the largest first.

    Args:
        store: to look through.
        run: only what lies under this run; everything, converted models included, if not given.
        older_than: seconds without a change before something counts. Expired checkpoints and removed runs have no such time of grace.
        now: the current time by the store's clock (`leases.store_time`); by this machine's if not given.

    Raises:
        StoreError: a commit record cannot be read, so nobody knows which files it names.
    """
    limit = (time.time() if now is None else now) - older_than
    found = {entry.key: entry for entry in store.walk("")}
    tombstones = _parsed(store, [key for key in found if key.endswith(".expired.json")], Expired)
    expired = {tombstone.commit.attempt for tombstone in tombstones.values()}
    half_made = _half_made(found)
    named = _named(store, found, expired)
    committed = {match["unit"] for key in named if (match := _ATTEMPT.match(key))}
    units: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in found:
        if key not in named and (kind_and_unit := _kind(key, found, expired, half_made, committed)):
            units[kind_and_unit].append(key)
    out = [
        Leftover(kind, unit, tuple(sorted(keys)), sum(found[key].bytes for key in keys), max(found[key].modified for key in keys))
        for (kind, unit), keys in units.items()
        if run is None or unit.startswith(f"runs/{run}/") or unit == f"runs/{run}"
    ]
    old = [leftover for leftover in out if leftover.kind in _AT_ONCE or leftover.modified <= limit]
    return sorted(old, key=lambda leftover: (-leftover.bytes, leftover.key))


def remove(store: Store, leftover: Leftover, now: float | None = None) -> bool:
    """Delete a leftover, unless it has come to be needed since it was found. Whether it was deleted.

    Args:
        store: where it lies.
        leftover: from `leftovers`.
        now: the current time by the store's clock; asked for if not given.

    Raises:
        StoreError: the store cannot be written.
    """
    now = store_time(store) if now is None else now
    if leftover.kind == "unfinished attempt":
        return _remove_attempt(store, leftover, now)
    run = _RUN.match(leftover.key + "/")
    if leftover.kind == "removed run" and run:
        try:
            remove_run(store, RunKeys(run["run"]))
        except RunError:  # another process removes it
            return False
        return True
    if leftover.kind == "half-made fork" and run and store.exists(RunKeys(run["run"]).record):
        return False
    if leftover.kind == "published weights" and run and live_drivers(store, RunKeys(run["run"])):
        return False
    if leftover.kind == "old lease" and holder(store, leftover.key, now):
        return False
    attempt = _ATTEMPT.match(leftover.files[0])
    if attempt and leftover.kind == "expired checkpoint" and not _named_at(store, attempt["prefix"]).isdisjoint(leftover.files):
        return False
    store.delete(leftover.files)
    return True


def _remove_attempt(store: Store, leftover: Leftover, now: float) -> bool:
    """Delete the files of a writer that is gone. See leases.py for what happens if it is not."""
    reach("gc-before-condemn")
    if not condemn(store, leftover.key, now):
        return False
    if not _named_at(store, leftover.key.rpartition("/")[0]).isdisjoint(leftover.files):
        pardon(store, leftover.key)  # its writer was only slow
        return False
    reach("gc-condemned")
    guards = [lease_key(leftover.key), claim_key(leftover.key)]
    store.delete([key for key in leftover.files if key not in guards])
    store.delete(guards)
    return True


def _named_at(store: Store, prefix: str) -> set[str]:
    """The files that the commit of an attempt names. A model's attempt lies beside all models: its name is known at its end only."""
    names = [name for name in store.list(prefix) if name.endswith(_COMMIT)] if prefix == "models" else []
    prefixes = [f"{prefix}/{name.removesuffix(_COMMIT)}" for name in names] or [prefix]
    commits = in_parallel(store.committed, prefixes, NUM_READS)
    return {record.path for commit in commits if commit is not None for record in commit.files}


def _named(store: Store, found: Iterable[str], expired: set[str | None]) -> set[str]:
    """The files that commits name. A commit whose checkpoint has expired under the same run no longer counts."""
    records = [key for key in found if key.endswith(_COMMIT) and not _JOURNAL.match(key)]
    commits = _parsed(store, records, Commit)
    present = set(found)
    return {
        record.path
        for key, commit in commits.items()
        if not (commit.attempt in expired and key.removesuffix(_COMMIT) + ".expired.json" in present)
        for record in commit.files
    }


def _kind(
    key: str, found: Mapping[str, object], expired: set[str | None], half_made: set[str], committed: set[str]
) -> tuple[str, str] | None:
    """What a file that no commit names is part of: (kind, key of the whole), or None if it belongs where it is."""
    run = _RUN.match(key)
    if run and f"runs/{run['run']}/removed.json" in found:
        return "removed run", f"runs/{run['run']}"
    if run and run["run"] in half_made:
        return "half-made fork", f"runs/{run['run']}"
    if journal := _JOURNAL.match(key):  # a round that is still being made reads its journal
        return ("journal of a finished round", journal["unit"]) if commit_key(journal["prefix"]) in found else None
    if _TEMPORARY.search(key) or (run and key == fork_key(RunKeys(run["run"]))):
        return "temporary file", key
    if guard := _GUARD.match(key):
        return ("temporary file", key) if guard["unit"] in committed else ("unfinished attempt", guard["unit"])
    if _LEASE.match(key):
        return "old lease", key
    if attempt := _ATTEMPT.match(key):
        return ("expired checkpoint" if attempt["unit"] in expired else "unfinished attempt"), attempt["unit"]
    if weights := _WEIGHTS.match(key):
        return "published weights", weights["unit"]
    if key.startswith(".penstock-probe-"):
        return "probe file", key
    return None


def _half_made(found: Iterable[str]) -> set[str]:
    """Runs whose fork was begun and not finished."""
    present = set(found)
    runs = {match["run"] for key in present if (match := _RUN.match(key))}
    return {run for run in runs if fork_key(RunKeys(run)) in present and RunKeys(run).record not in present}


def _parsed(store: Store, keys: list[str], model: type[Record]) -> dict[str, Record]:
    """Records by key; those that are gone meanwhile are left out."""

    def parse(key: str) -> Record | None:
        data = store.read(key)
        try:
            return None if data is None else parsed(model, key, data)
        except StoreError as error:
            raise StoreError(
                f"{error}; which files it names is unknown, so nothing is deleted (`penstock verify` says more)"
            ) from error

    return {key: record for key, record in zip(keys, in_parallel(parse, keys, NUM_READS), strict=True) if record is not None}
