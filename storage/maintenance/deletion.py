"""Deletion of checkpoints, runs and orphans; safe while drivers and forks are active, and repeatable after a kill.

A checkpoint expires in this order: create a tombstone (`checkpoints/000020.expired.json`, which contains the commit),
delete the commit record, delete the files, unless another run's commit lists them (forks share files). If a kill
interrupts this, the next call deletes what remains of the checkpoints with a tombstone.

The creation of a fork may race with an expiry. The fork writes its record, then looks for the checkpoint's record; the
expiry deletes the checkpoint's record, then looks for the fork's record. So at least one of them sees the other: either
the files are kept, or the fork starts without this checkpoint.

The removal of a run creates the lease `removing.lease` and then looks for drivers and forks; a driver or a fork
registers itself and then looks for `removing.lease`. So at least one of them sees the other. The run counts as removed
once `removed.json` exists. If the removal is killed, the next `penstock rm`, `penstock gc --delete` or start of a run
with the same name deletes the remaining files, `removed.json` last.

Blobs (blobs.py) belong to no run: one that no commit of any run lists is unused. Before a driver refers to a blob, it
has its own lease and looks for `blobs/collecting.lease`; the deletion of blobs creates that lease and then looks for
drivers. So at least one of them sees the other: the driver waits, or no blob is deleted.

An orphan is a file that no commit of *any* run lists (a fork's commits list files of its parent) and no live writer or
driver uses (leases.py): a file of a killed writer, an expired checkpoint, the journal of a finished round, ... Files
younger than the caller's limit are skipped, except those of expired checkpoints and removed runs.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pydantic import model_validator

from penstock.storage.blobs import COLLECTION_LEASE, DIRECTORY, blob_key
from penstock.storage.commit import JOURNAL, Commit, Frozen, Record, RunKeys, commit_key, split_stage_key
from penstock.storage.errors import RunError, StoreError, check_rules
from penstock.storage.failpoints import failpoint
from penstock.storage.file_store import StoredFile
from penstock.storage.history.run_record import ForkRecord, read_run_record
from penstock.storage.leases import (
    TTL,
    Lease,
    claim_key,
    describe_lease_holder,
    describe_live_drivers,
    lease_key,
    store_time,
    try_claim_for_deletion,
    withdraw_deletion_claim,
)
from penstock.storage.store import Store, committed_prefixes

_ATTEMPT = re.compile(r"runs/[^/]+/checkpoints/\d+/attempt-[^/]+")
_REMOVAL_LEASE = "removing.lease"
_RUN_LEASE = re.compile(rf"runs/[^/]+/({re.escape(_REMOVAL_LEASE)}|drivers/[^/]+\.lease)")
_COMMIT = commit_key("")
_BLOB = re.compile(rf"{DIRECTORY}/[0-9a-f]{{64}}")
_UNUSED_BLOBS = "unused images"


class Tombstone(Frozen):
    """The tombstone of a checkpoint: the deleted commit, and why and when the checkpoint expired."""

    why: str
    expired_at: float  # seconds since the epoch
    commit: Commit

    @model_validator(mode="after")
    def _check_commit(self) -> Tombstone:
        if self.commit.kind != "checkpoint" or not _ATTEMPT.fullmatch(self.commit.attempt or ""):
            raise ValueError(
                f"the tombstone contains {self.commit.kind} {self.commit.attempt!r}, which is not a checkpoint of a run"
            )
        return self


def tombstone_key(prefix: str) -> str:
    """Return the key of the tombstone, the record that marks the checkpoint under `prefix` as deleted."""
    return f"{prefix}.expired.json"


def read_tombstone(store: Store, prefix: str) -> Tombstone | None:
    """Return the tombstone of the checkpoint under `prefix`, or None if the checkpoint has not expired."""
    return store.read_record(Tombstone, tombstone_key(prefix))


def expired_versions(store: Store, keys: RunKeys) -> list[int]:
    """Return the policy versions whose checkpoints have expired, ascending. Their files may not be deleted yet."""
    matches = (re.fullmatch(r"(\d+)\.expired\.json", name) for name in store.list(f"{keys.prefix}/checkpoints"))
    return sorted(int(match[1]) for match in matches if match)


def expire_checkpoints(
    store: Store,
    keys: RunKeys,
    *,
    num_to_keep: int,
    best_metric: str | None = None,
    keep_versions: Collection[int] = frozenset(),
) -> list[int]:
    """Delete the checkpoints of a run that need not be kept, and return their policy versions, ascending. Kept are the
    newest `num_to_keep`, those from which forks start, those whose base weights later adapters need, and those that the
    other arguments name. Can be called at any time, and repeated after a kill.

    Args:
        best_metric: an evaluation metric, for instance `eval/addition`; the checkpoint with its highest value is kept.
        keep_versions: further policy versions to keep.
    """
    assert num_to_keep >= 1, "without a checkpoint, a run restarts from the beginning after a crash"
    finish_interrupted_expiries(store, keys)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints")
    candidates = [version for version in versions[:-num_to_keep] if version not in keep_versions]
    if not candidates:
        return []
    kept = set(versions[-num_to_keep:]) | fork_point_versions(store, keys, versions)
    commits = (store.committed(keys.checkpoint_prefix(version)) for version in versions)
    bases = {commit.inputs.get("base") for commit in commits if commit}
    kept |= {version for version in versions if commit_key(keys.checkpoint_prefix(version)) in bases}
    if best_metric is not None and (winner := best_version(store, keys, best_metric, versions)) is not None:
        kept.add(winner)
    expiring = [version for version in candidates if version not in kept]
    why = f"beyond the newest {num_to_keep}" + (f" and not the best by {best_metric}" if best_metric else "")
    for version in expiring:
        _expire_checkpoint(store, keys, version, why)
    return expiring


def finish_interrupted_expiries(store: Store, keys: RunKeys) -> list[int]:
    """Finish interrupted deletions of expired checkpoints. Return the policy versions of these checkpoints."""
    names = set(store.list(f"{keys.prefix}/checkpoints"))
    unfinished = [
        version
        for version in expired_versions(store, keys)
        if names & {f"{version:06d}", commit_key(f"{version:06d}")}  # a checkpoint's directory or commit record
    ]
    for version in unfinished:
        tombstone = read_tombstone(store, keys.checkpoint_prefix(version))
        assert tombstone is not None, "a tombstone is deleted only after its checkpoint"
        _delete_expired_checkpoint(store, keys, version, tombstone)
    return unfinished


def best_version(store: Store, keys: RunKeys, metric: str, versions: Collection[int]) -> int | None:
    """Return the policy version in `versions` whose evaluations have the highest `metric` (of equal ones the
    newest), or None if no evaluation of these versions has the metric."""
    scores: dict[int, float] = {}
    for version in versions:
        directory = f"{keys.prefix}/evals/{version:06d}"
        for name in store.committed_names(directory):
            commit = store.committed(f"{directory}/{name}")
            value = commit.summary.get(metric, math.nan) if commit else math.nan
            if not math.isnan(value):
                scores[version] = value
    return max(scores, key=lambda version: (scores[version], version)) if scores else None


def fork_point_versions(store: Store, keys: RunKeys, versions: Collection[int]) -> set[int]:
    """Return the versions among `versions` from whose checkpoints forks of the run start. If the run is a fork itself,
    the checkpoint from which it starts is included. A fork at round N starts from the newest checkpoint up to version
    N."""
    points: list[int] = []
    for run in store.list("runs"):
        other = RunKeys(run)
        with suppress(StoreError):  # a damaged record: `is_checkpoint_used` keeps the files that the fork lists
            record = read_run_record(store, other) or store.read_record(ForkRecord, other.fork)
            if record and record.parent and keys.run in (record.parent.run, run):
                points.append(record.parent.at)
    return {max(below) for point in points if (below := [version for version in versions if version <= point])}


def is_checkpoint_used(store: Store, keys: RunKeys, version: int, attempt: str | None) -> bool:
    """Return whether the commit of a run's checkpoint, or a copy of the commit in a fork, lists the files of `attempt`.
    The run's commit is read first: after its deletion no fork can begin to use the files."""

    def has_attempt(run: str) -> bool:
        commit = store.committed(RunKeys(run).checkpoint_prefix(version))
        return commit is not None and commit.attempt == attempt

    return has_attempt(keys.run) or any(has_attempt(run) for run in store.list("runs"))


def _expire_checkpoint(store: Store, keys: RunKeys, version: int, why: str) -> None:
    prefix = keys.checkpoint_prefix(version)
    commit = store.committed(prefix)
    if commit is None:
        return  # another driver has deleted the checkpoint
    tombstone = Tombstone(why=why, expired_at=time.time(), commit=commit)
    data = tombstone.model_dump_json(indent=1).encode()
    while not store.create(tombstone_key(prefix), data):
        existing = read_tombstone(store, prefix)
        if existing is not None and existing.commit.attempt == commit.attempt:
            break  # another driver has created the same tombstone; both may delete the checkpoint
        if existing is not None:  # from an earlier expiry of this version, whose checkpoint was saved again afterwards
            _delete_expired_checkpoint(store, keys, version, existing)
            store.delete([tombstone_key(prefix)])
    _delete_expired_checkpoint(store, keys, version, tombstone)


def _delete_expired_checkpoint(store: Store, keys: RunKeys, version: int, tombstone: Tombstone) -> None:
    """Delete a checkpoint with a tombstone: first its commit record, so that no reader opens files being deleted."""
    prefix, attempt = keys.checkpoint_prefix(version), tombstone.commit.attempt
    commit = store.committed(prefix)
    if commit is not None and commit.attempt == attempt:
        store.delete([commit_key(prefix)])
    if not is_checkpoint_used(store, keys, version, attempt):
        store.delete([record.path for record in tombstone.commit.files])


# ---- removal of a run ------------------------------------------------------------------------------------------------


def is_removed(store: Store, keys: RunKeys) -> bool:
    """Return whether a run was removed. Some of its files may remain."""
    return store.exists(keys.removed)


def describe_removing_process(store: Store, keys: RunKeys) -> str | None:
    """Return a description of the process that is removing a run, or None."""
    key = f"{keys.prefix}/{_REMOVAL_LEASE}"
    return describe_lease_holder(store, key, store_time(store)) if store.exists(key) else None


def remove_run(
    store: Store, keys: RunKeys, *, own_lease: str | None = None, only_remains: bool = False
) -> list[StoredFile]:
    """Delete all files of a run and return them. Can be repeated after a kill. Raises RunError if a process uses the
    run, or if a fork uses its files.

    Args:
        own_lease: key of the caller's lease, if the caller is a driver that restarts the run from scratch.
        only_remains: remove only the files that remain of an earlier removal or an unfinished fork.
    """
    if other := describe_removing_process(store, keys):
        raise RunError(f"run {keys.run!r} is being removed by {other}: wait until that process ends")
    lease = Lease(store, f"{keys.prefix}/{_REMOVAL_LEASE}").take()
    try:
        if not is_removed(store, keys):
            check_rules(_removal_rules(store, keys, own_lease, only_remains), RunError)
            store.create(keys.removed, b"")  # empty, so that it can be created on a full disk
        kept = {keys.removed, lease.key, own_lease}
        files = [file for file in store.walk(keys.prefix) if file.key not in kept]
        store.delete([file.key for file in files])
        store.remove_empty_directories(keys.prefix)
        store.delete([keys.removed])
    finally:
        lease.release()
    return files


def _removal_rules(
    store: Store, keys: RunKeys, own_lease: str | None, only_remains: bool
) -> Iterator[tuple[object, str]]:
    """Yield the rules that a run must meet to be removed (see `remove_run`)."""
    driver = next(iter(describe_live_drivers(store, keys, own_lease=own_lease)), None)
    yield driver, f"run {keys.run!r} has a running driver, {driver}: stop it first"
    others = (run for run in store.list("runs") if run != keys.run)
    fork = next((run for run in others if _run_uses_files_of(store, RunKeys(run), keys)), None)
    yield fork, f"run {keys.run!r} has files that its fork {fork!r} needs: remove the fork first"
    # Checked after the drivers, since a driver that has just ended may have created the record.
    exists = only_remains and store.exists(keys.record)
    yield exists, f"run {keys.run!r} exists: remove it with `penstock rm {keys.run}`"


@contextmanager
def translate_write_errors(store: Store) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"store {store.uri} cannot be written ({reason}): mount it writable, free disk space, or run as its owner"
        ) from error


def _run_uses_files_of(store: Store, user: RunKeys, owner: RunKeys) -> bool:
    """Return whether a run, or an unfinished fork, lists files of the run `owner` in its commits."""
    try:
        fork = store.read_record(ForkRecord, user.fork)
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


# ---- orphans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orphan:
    """One file, or the files of one directory, that no commit and no live process needs. They are deleted together."""

    kind: str  # from `_Contents.orphan_kind_and_key`, for instance "unfinished attempt"
    key: str  # of the directory or file
    files: tuple[str, ...]
    bytes: int
    modified: float  # modification time of the newest file, seconds since the epoch


def find_orphans(store: Store, run: str | None = None, *, older_than: float, now: float | None = None) -> list[Orphan]:
    """Return all orphans (files that no record needs), the largest first. Raises StoreError if a record cannot be read:
    it is then unknown which files this record needs.

    Args:
        run: return only orphans of this run; default: of all runs and converted models.
        older_than: minimum age in seconds. It does not apply to expired checkpoints and removed runs.
        now: the current time by the store's clock (`leases.store_time`); default: by the local clock.
    """
    now = time.time() if now is None else now
    limit, limit_of_probes = now - older_than, now - max(older_than, TTL)  # a probe file has no lease
    contents = _Contents(store)
    units: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
    for key, file in contents.files.items():
        if key in contents.committed_files or (kind_and_unit := contents.orphan_kind_and_key(key)) is None:
            continue
        if kind_and_unit[0] != _UNUSED_BLOBS or file.modified <= limit:  # the unused blobs are one orphan
            units[kind_and_unit].append(file)
    orphans = [
        Orphan(
            kind, unit, tuple(sorted(f.key for f in files)), sum(f.bytes for f in files), max(f.modified for f in files)
        )
        for (kind, unit), files in units.items()
        if run is None or f"{unit}/".startswith(f"runs/{run}/")
    ]
    limits = {"expired checkpoint": math.inf, "removed run": math.inf, "probe file": limit_of_probes}
    old = [orphan for orphan in orphans if orphan.modified <= limits.get(orphan.kind, limit)]
    return sorted(old, key=lambda orphan: (-orphan.bytes, orphan.key))


def remove_orphan(store: Store, orphan: Orphan, now: float) -> bool:
    """Delete an orphan (files that no record needs), unless a process has begun to use it since `find_orphans`. Return
    whether it was deleted. `now` is the current time by the store's clock (`leases.store_time`)."""
    if orphan.kind == "unfinished attempt":
        return _remove_unfinished_attempt(store, orphan, now)
    if orphan.kind == _UNUSED_BLOBS:
        return _remove_unused_blobs(store, orphan)
    in_use = False
    match orphan.kind, orphan.key.split("/"):
        case "removed run" | "half-made fork", [_, run]:
            try:
                remove_run(store, RunKeys(run), only_remains=True)
            except RunError:  # another process is removing it, or has started it again or completed the fork
                return False
            return True
        case "published weights", [_, run, *_]:
            in_use = bool(describe_live_drivers(store, RunKeys(run)))
        case "old lease", _:
            in_use = describe_lease_holder(store, orphan.key, now) is not None
        case "expired checkpoint", [_, run, _, version, _]:
            in_use = is_checkpoint_used(store, RunKeys(run), int(version), orphan.key)
    if not in_use:
        store.delete(orphan.files)
    return not in_use


def _remove_unfinished_attempt(store: Store, orphan: Orphan, now: float) -> bool:
    """Delete an attempt, unless its writer is alive or has committed it (the protocol is described in leases.py)."""
    failpoint("gc-before-condemn")
    if not try_claim_for_deletion(store, orphan.key, now):
        return False
    prefix = orphan.key.rpartition("/")[0]
    # The commit of a model's attempt (`models/attempt-...`) cannot be found by its prefix, which contains a fingerprint
    # that is only known after the conversion: all converted models are searched.
    prefixes = [f"models/{name}" for name in store.committed_names("models")] if prefix == "models" else [prefix]
    commits = store.map_requests(store.committed, prefixes)
    committed = {record.path for commit in commits if commit is not None for record in commit.files}
    if not committed.isdisjoint(orphan.files):
        withdraw_deletion_claim(store, orphan.key)  # the writer committed the attempt before the claim
        return False
    failpoint("gc-condemned")
    guards = [lease_key(orphan.key), claim_key(orphan.key)]
    store.delete([key for key in orphan.files if key not in guards])
    store.delete(guards)
    return True


def _remove_unused_blobs(store: Store, orphan: Orphan) -> bool:
    """Delete blobs that no commit lists, unless a driver of any run is alive, which may have begun to use them."""
    lease = Lease(store, COLLECTION_LEASE).take()
    try:
        if any(describe_live_drivers(store, RunKeys(run)) for run in store.list("runs")):
            return False
        if not _Contents(store).committed_files.isdisjoint(orphan.files):  # a driver has begun and ended since
            return False
        store.delete(orphan.files)
        return True
    finally:
        lease.release()


class _Contents:
    """All files of a store, and what its records say about them."""

    def __init__(self, store: Store) -> None:
        self.files = files = {file.key: file for file in store.walk("")}
        # Only records of stages: copies of commit records are also among MLflow's artifacts and in users' files.
        records = [key for key in files if split_stage_key(key) == (key, [])]
        tombstones = _read_records(store, [key for key in records if key.endswith(tombstone_key(""))], Tombstone)
        self.expired = {tombstone.commit.attempt for tombstone in tombstones.values()}  # keys of attempts
        runs = {key.split("/")[1] for key in files if key.startswith("runs/")}
        self.half_made = {  # runs: forks whose creation was not finished
            run for run in runs if RunKeys(run).fork in files and RunKeys(run).record not in files
        }
        commits = [  # all but those of checkpoints that have expired in the same run
            commit
            for key, commit in _read_records(store, [key for key in records if key.endswith(_COMMIT)], Commit).items()
            if commit.attempt not in self.expired or tombstone_key(key.removesuffix(_COMMIT)) not in files
        ]
        journals = [  # entries of the journals of unfinished rounds
            key
            for key in files
            if (prefix := split_stage_key(key)[0]).endswith(JOURNAL)
            and re.fullmatch(rf"{re.escape(prefix)}/\d+{re.escape(_COMMIT)}", key)
            and commit_key(prefix.removesuffix(JOURNAL)) not in files
        ]
        self.committed_files = {record.path for commit in commits for record in commit.files}
        for commit in [*commits, *_read_records(store, journals, Commit).values()]:
            self.committed_files |= {blob_key(digest) for digest in commit.blobs}
        self.committed = {commit.attempt for commit in commits}  # keys of attempts

    def orphan_kind_and_key(self, key: str) -> tuple[str, str] | None:
        """Return kind and key of the orphan to which an uncommitted file belongs, or None if it is not an orphan."""
        match key.split("/"):
            case ["runs", run, _, *_] if RunKeys(run).removed in self.files:
                return "removed run", RunKeys(run).prefix
            case ["runs", run, _, *_] if run in self.half_made:
                return "half-made fork", RunKeys(run).prefix
            case ["runs", run, _] if key == RunKeys(run).fork:
                return "temporary file", key
            case ["runs", run, _] if key == RunKeys(run).status and RunKeys(run).record not in self.files:
                return "temporary file", key  # a driver wrote it after its run was removed
            case _ if key == COLLECTION_LEASE or _RUN_LEASE.fullmatch(key):
                return "old lease", key
            case ["runs", run, "published", weights, _, *_]:  # weights that engines load from disk
                return "published weights", f"{RunKeys(run).prefix}/published/{weights}"
            case [name] if name.startswith(".penstock-probe-"):
                return "probe file", key
            case [_, _] if _BLOB.fullmatch(key):
                return _UNUSED_BLOBS, DIRECTORY
        return self._orphan_of_stage(key)

    def _orphan_of_stage(self, key: str) -> tuple[str, str] | None:
        """Return the result of `orphan_kind_and_key` for a file below the prefix of a stage, or a temporary file."""
        prefix, names = split_stage_key(key)
        if names and prefix.endswith(JOURNAL):  # needed until its round is committed
            finished = commit_key(prefix.removesuffix(JOURNAL)) in self.files
            return ("journal of a finished round", prefix) if finished else None
        if re.search(r"\.[0-9a-f]{12}\.tmp$", key):  # of `disk.create` and `disk.replace`
            return "temporary file", key
        match names:
            case [name] if name.startswith("attempt-") and name.endswith((".lease", ".claim")):
                attempt = f"{prefix}/{name.rpartition('.')[0]}"
                return ("temporary file", key) if attempt in self.committed else ("unfinished attempt", attempt)
            case [name, _, *_] if name.startswith("attempt-"):
                attempt = f"{prefix}/{name.removesuffix('.parts')}"
                return "expired checkpoint" if attempt in self.expired else "unfinished attempt", attempt
        return None


def _read_records(store: Store, keys: list[str], model: type[Record]) -> dict[str, Record]:
    """Return the records at `keys` by key. Records that no longer exist are skipped."""

    def read(key: str) -> Record | None:
        try:
            return store.read_record(model, key)
        except StoreError as error:
            raise StoreError(
                f"{error}; it is unknown which files this record needs, so nothing is deleted "
                "(details: `penstock verify`)"
            ) from error

    records = store.map_requests(read, keys)
    return {key: record for key, record in zip(keys, records, strict=True) if record is not None}
