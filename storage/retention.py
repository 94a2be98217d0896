"""Which checkpoints a run keeps, and how one that it does not keep goes away without anybody losing anything.

Order of truth: a tombstone (`checkpoints/000020.expired.json`, a conditional create that holds the whole commit), then the commit record
goes, then the files, unless another run's commit names them (forks share files). A kill anywhere in between leaves a tombstone,
and the next call finishes what it announces. What no tombstone and no commit knows is not owned here, but by leftovers.py.

A fork that is being made and an expiry may meet: the fork writes its record and then looks for ours, we delete ours and then look for the
fork's. So at least one of them sees the other, and either the files stay or the fork does without this checkpoint.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection

from pydantic import model_validator

from storage.refs import Commit, Frozen, RunKeys, commit_key, parsed
from storage.store import Store

_TOMBSTONE = re.compile(r"(\d+)\.expired\.json")
_ATTEMPT = re.compile(r"runs/[^/]+/checkpoints/\d+/attempt-[^/]+")


class Expired(Frozen):
    """The tombstone of a checkpoint: what it was (digest, fingerprint, files), why it went, and when."""

    why: str
    expired_at: float
    commit: Commit

    @model_validator(mode="after")
    def _check_commit(self) -> Expired:
        if self.commit.kind != "checkpoint" or not _ATTEMPT.fullmatch(self.commit.attempt or ""):
            raise ValueError(f"it announces {self.commit.kind} {self.commit.attempt!r}, which is not a checkpoint")
        return self


def expired_key(prefix: str) -> str:
    """The key of the tombstone of the checkpoint under `prefix`."""
    return f"{prefix}.expired.json"


def expired(store: Store, prefix: str) -> Expired | None:
    """The tombstone of a checkpoint, or None if it has none."""
    key = expired_key(prefix)
    data = store.read(key)
    return None if data is None else parsed(Expired, key, data)


def expired_versions(store: Store, keys: RunKeys) -> list[int]:
    """Policy versions whose checkpoints have a tombstone, ascending."""
    matches = (_TOMBSTONE.fullmatch(name) for name in store.list(f"{keys.prefix}/checkpoints"))
    return sorted(int(match[1]) for match in matches if match)


def expire_checkpoints(
    store: Store, keys: RunKeys, *, keep: int, best: str | None = None, also: Collection[int] = frozenset()
) -> list[int]:
    """Remove the checkpoints that a run no longer keeps. Safe to call at any time and again after a kill.

    Args:
        store: where the run lies.
        keys: of the run.
        keep: the newest so many stay, at least one.
        best: a metric of the evaluations (`eval/addition`); the checkpoint with the highest stays too.
        also: further versions to keep.

    Returns:
        the versions that went now, ascending.
    """
    assert keep >= 1, "a run without its newest checkpoint would begin from the start after every crash"
    finish_expiries(store, keys)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints")
    candidates = [version for version in versions[:-keep] if version not in also]
    if not candidates:
        return []
    kept = set(versions[-keep:]) | fork_points(store, keys, versions)
    if best is not None and (winner := best_version(store, keys, best, versions)) is not None:
        kept.add(winner)
    gone = [version for version in candidates if version not in kept]
    why = f"beyond the newest {keep}" + (f" and not the best by {best}" if best else "")
    for version in gone:
        _expire(store, keys, version, why)
    return gone


def finish_expiries(store: Store, keys: RunKeys) -> list[int]:
    """Finish what a killed call has announced. Returns the versions that were not gone yet."""
    names = set(store.list(f"{keys.prefix}/checkpoints"))
    unfinished = [
        version
        for version in expired_versions(store, keys)
        if names & {f"{version:06d}", commit_key(f"{version:06d}")}  # the directory of its files, or its record
    ]
    for version in unfinished:
        tombstone = expired(store, keys.checkpoint(version))
        assert tombstone is not None, "tombstones are never removed while their checkpoint lasts"
        _finish(store, keys, version, tombstone)
    return unfinished


def best_version(store: Store, keys: RunKeys, metric: str, versions: Collection[int]) -> int | None:
    """The version with the highest `metric` among its evaluations, the newest of equals; None if none was evaluated."""
    scores: dict[int, float] = {}
    for version in versions:
        directory = f"{keys.prefix}/evals/{version:06d}"
        for name in store.list(directory):
            if not name.endswith(commit_key("")):
                continue
            commit = store.committed(f"{directory}/{name.removesuffix(commit_key(''))}")
            value = commit.summary.get(metric, math.nan) if commit else math.nan
            if not math.isnan(value):
                scores[version] = value
    return max(scores, key=lambda version: (scores[version], version)) if scores else None


def fork_points(store: Store, keys: RunKeys, versions: Collection[int]) -> set[int]:
    """The checkpoints at which forks begin: those that others have made of this run, and the one this run began at itself."""
    points: list[int] = []
    for run in store.list("runs"):
        other = RunKeys(run)
        record = store.read_json(other.record) or store.read_json(fork_key(other)) or {}
        parent = record.get("parent")
        if parent and keys.run in (parent["run"], run):
            points.append(parent["at"])
    return {max(below) for point in points if (below := [version for version in versions if version <= point])}


def fork_key(keys: RunKeys) -> str:
    """Where the record of a fork stands while the fork is being made; it becomes `run.json` last."""
    return f"{keys.prefix}/fork.json"


def _expire(store: Store, keys: RunKeys, version: int, why: str) -> None:
    prefix = keys.checkpoint(version)
    commit = store.committed(prefix)
    if commit is None:
        return  # another driver was faster
    tombstone = Expired(why=why, expired_at=time.time(), commit=commit)
    data = tombstone.model_dump_json(indent=1).encode()
    while not store.create(expired_key(prefix), data):
        standing = expired(store, prefix)
        if standing is not None and standing.commit.attempt == commit.attempt:
            break  # announced by another driver: either of us may finish it
        if standing is not None:  # of an earlier life: this version was saved again after it had expired
            _finish(store, keys, version, standing)
            store.delete([expired_key(prefix)])
    _finish(store, keys, version, tombstone)


def _finish(store: Store, keys: RunKeys, version: int, tombstone: Expired) -> None:
    """Remove what a tombstone announces. Its own record goes first, so that nobody opens files that are going."""
    prefix = keys.checkpoint(version)
    commit = store.committed(prefix)
    if commit is not None and commit.attempt == tombstone.commit.attempt:
        store.delete([commit_key(prefix)])
    if not _is_shared(store, keys, version, tombstone.commit.attempt):
        store.delete([record.path for record in tombstone.commit.files])


def _is_shared(store: Store, keys: RunKeys, version: int, attempt: str | None) -> bool:
    """Whether another run's commit names these files. A fork has it under the same version."""
    others = (store.committed(RunKeys(run).checkpoint(version)) for run in store.list("runs") if run != keys.run)
    return any(other is not None and other.attempt == attempt for other in others)
