"""Is a run whole? Every record, every hash, every reference, every sample, every prompt: what `penstock verify` looks at.

Nothing is trusted but the store, nothing is changed, and no engine or tensor library is needed. A run may go on while it is looked at.
What the samples say is read in served.py; what lies around unused is counted here (`Audit.num_orphans`), and found by leftovers.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.disk import in_parallel
from storage.errors import RunError, StoreError
from storage.leftovers import NUM_READS, leftovers
from storage.refs import ORIGINS, CheckpointRef, Commit, FileRecord, RunKeys, commit_key, is_unchanged, parsed
from storage.retention import Expired, expired, expired_key, expired_versions
from storage.served import Course, read_round
from storage.store import Store, committed_prefixes

NUM_FILES = 8  # looked at at a time
_KINDS = {"rollouts": "rollout", "steps": "step", "checkpoints": "checkpoint", "evals": "eval", "exports": "export"}


@dataclass
class Audit:
    """What was looked at, and everything wrong with it, one sentence each."""

    run: str
    problems: list[str] = field(default_factory=list)
    num_commits: Counter[str] = field(default_factory=Counter)  # by kind
    num_files: int = 0
    num_bytes: int = 0
    num_samples: int = 0  # of rollouts
    num_prompts: int = 0  # served to rollouts
    num_epochs: int = 0  # that were begun
    num_expired: int = 0
    num_without_digest: int = 0  # commit records of before record version 2
    num_orphans: int = 0
    orphan_bytes: int = 0


def audit(store: Store, keys: RunKeys, *, hashes: bool = True) -> Audit:
    """Look at everything that a run has committed.

    Args:
        store: where it lies.
        keys: of the run.
        hashes: read every byte of models, checkpoints and exports; else only their sizes. Samples are always read.

    Raises:
        RunError: no such run.
    """
    found = Audit(keys.run)
    record = _run_record(store, keys, found)
    commits = _records(store, keys, found)
    tombstones = _tombstones(store, keys, found)
    _look_at_files(store, commits, found, hashes)
    _look_at_inputs(store, commits, tombstones, found)
    _look_at_order(store, keys, commits, found)
    _look_at_samples(store, keys, record, commits, found)
    _count_orphans(store, keys, found)
    return found


# ---- records ----------------------------------------------------------------------------------------------------------------


def _run_record(store: Store, keys: RunKeys, found: Audit) -> dict[str, Any]:
    """Return run.json, or {} if it is damaged or lost, which is a problem."""
    try:
        record = store.read_json(keys.record)
    except StoreError as error:
        found.problems.append(_first_line(error))
        return {}
    if isinstance(record, dict):
        return record
    if record is None and not store.list(keys.prefix):
        raise RunError(f"store {store.uri} has no run {keys.run!r}: check the name, or give --store")
    state = "is missing" if record is None else "is not an object"
    found.problems.append(f"{keys.record} {state}: restore it from a backup")
    return {}


def _records(store: Store, keys: RunKeys, found: Audit) -> dict[str, Commit]:
    """Every commit of the run by prefix, the model it began with included."""
    prefixes = committed_prefixes(store, keys)
    origins = {name: data for name in ORIGINS if (data := store.read(keys.origin(name)))}
    if prefixes and "base" not in origins:
        found.problems.append(f"{keys.origin('base')} is missing: the run does not say which model it began with")
    keys_of_models: set[str] = set()
    for name, data in origins.items():
        try:
            keys_of_models.add(parsed(CheckpointRef, keys.origin(name), data).key)
        except StoreError as error:
            found.problems.append(_first_line(error))
    prefixes += sorted(key.removesuffix(commit_key("")) for key in keys_of_models)
    commits: dict[str, Commit] = {}
    for prefix, data in zip(prefixes, in_parallel(lambda prefix: store.read(commit_key(prefix)), prefixes, NUM_READS)):
        try:
            if data is not None:
                commits[prefix] = parsed(Commit, commit_key(prefix), data)
                _look_at_digest(commit_key(prefix), data, found)
            elif prefix.startswith("models/"):
                found.problems.append(f"{commit_key(prefix)} is missing, a model that the run was given: convert it again")
        except StoreError as error:
            found.problems.append(_first_line(error))
    found.num_commits.update(commit.kind for commit in commits.values())
    return commits


def _look_at_digest(key: str, data: bytes, found: Audit) -> None:
    """A commit record is what its writer has written."""
    unchanged = is_unchanged(data)
    found.num_without_digest += unchanged is None
    if unchanged is False:
        found.problems.append(f"{key} has changed since it was written (its digest differs): restore it from a backup")


def _tombstones(store: Store, keys: RunKeys, found: Audit) -> dict[str, Expired]:
    """Tombstones of expired checkpoints, by the key of the commit that stood there."""
    out: dict[str, Expired] = {}
    for version in expired_versions(store, keys):
        prefix = keys.checkpoint(version)
        try:
            if tombstone := expired(store, prefix):
                out[commit_key(prefix)] = tombstone
        except StoreError as error:
            found.problems.append(_first_line(error))
    found.num_expired = len(out)
    return out


def _look_at_files(store: Store, commits: dict[str, Commit], found: Audit, hashes: bool) -> None:
    """Size and hash of every committed file but sample shards, which are read later anyway."""
    found.num_files = sum(len(commit.files) for commit in commits.values())
    found.num_bytes = sum(record.bytes for commit in commits.values() for record in commit.files)

    def problem(job: tuple[str, Commit, FileRecord]) -> str | None:
        prefix, commit, record = job
        sentence = _damage(store, commit, record, hashes)
        gone = sentence and store.read(commit_key(prefix)) is None  # the checkpoint has expired while we looked
        return None if gone else sentence

    others = {prefix: commit for prefix, commit in commits.items() if commit.kind not in ("rollout", "eval")}
    jobs = [(prefix, commit, record) for prefix, commit in others.items() for record in commit.files]
    found.problems += [sentence for sentence in in_parallel(problem, jobs, NUM_FILES) if sentence]


def _damage(store: Store, commit: Commit, record: FileRecord, hashes: bool) -> str | None:
    """What is wrong with one committed file."""
    if not hashes:
        size = store.size(record.path)
        state = "is missing" if size is None else f"has {size} bytes"
        return None if size == record.bytes else f"{record.path} {state}, committed with {record.bytes} bytes"
    try:
        with store.reading(commit.model_copy(update={"files": [record]})):  # one by one: a checkpoint may not fit into scratch
            return None
    except StoreError as error:
        return str(error)


def _look_at_inputs(store: Store, commits: dict[str, Commit], tombstones: dict[str, Expired], found: Audit) -> None:
    """Whatever a commit consumed must be there, but for checkpoints that have expired."""
    known = {commit_key(prefix) for prefix in commits} | tombstones.keys()
    for prefix, commit in commits.items():
        for role, key in commit.inputs.items():
            if not key.endswith(commit_key("")) or key in known:
                continue
            if store.read(key) is None and store.read(expired_key(key.removesuffix(commit_key("")))) is None:
                found.problems.append(f"{commit_key(prefix)} was made from {role} {key}, which is not there")


def _look_at_order(store: Store, keys: RunKeys, commits: dict[str, Commit], found: Audit) -> None:
    """Rounds follow each other without a gap, every record stands where its content says, and every version is a trained one."""
    indices: dict[str, list[int]] = defaultdict(list)
    for prefix, commit in commits.items():
        if prefix.startswith("models/"):
            continue
        directory, number = prefix.removeprefix(f"{keys.prefix}/").split("/")[:2]
        index, kind = int(number), _KINDS[directory]
        indices[kind].append(index)
        said = (commit.kind, commit.index, commit.run or keys.run)
        if said != (kind, index, keys.run):
            found.problems.append(f"{commit_key(prefix)} says that it is {said[0]} {said[1]} of run {said[2]!r}")
        if kind == "step":
            right, needed = index + 1, {"rollout": commit_key(keys.rollout(index))}
        else:
            right, needed = index, {"checkpoint": commit_key(keys.checkpoint(index))} if kind == "export" else {}
        demonstrations = kind == "rollout" and commit.policy_version == -1
        if commit.policy_version != right and not demonstrations:
            found.problems.append(f"{commit_key(prefix)} has policy version {commit.policy_version}; it must be {right}")
        for role, key in needed.items():
            if commit.inputs.get(role) != key:
                found.problems.append(f"{commit_key(prefix)} was made from {role} {commit.inputs.get(role)}; it must be {key}")
    for kind in ("rollout", "step"):
        if missing := set(range(max(indices[kind], default=-1) + 1)) - set(indices[kind]):
            found.problems.append(f"{kind} {min(missing)} is not committed, but {kind} {max(indices[kind])} is")
    num_trained = len(indices["step"])
    for kind in ("checkpoint", "eval", "export"):
        last = max(indices[kind], default=0)
        if last > num_trained and store.read(commit_key(keys.step(last - 1))) is None:  # asked again: the run may be going on
            found.problems.append(f"{kind} {last} is of a policy that was not trained: the run has {num_trained} rounds")


# ---- samples ----------------------------------------------------------------------------------------------------------------


def _look_at_samples(store: Store, keys: RunKeys, record: dict[str, Any], commits: dict[str, Commit], found: Audit) -> None:
    """Sample ids are unique, and every prompt of every epoch was served exactly once, in the order of the data source."""
    prefixes = sorted(prefix for prefix, commit in commits.items() if commit.kind in ("rollout", "eval"))
    rounds = dict(zip(prefixes, in_parallel(lambda prefix: read_round(store, prefix, commits[prefix]), prefixes, NUM_FILES)))
    for one in rounds.values():
        found.problems += one.problems
    parent = record.get("parent") or {}
    restarts = set(parent.get("restarts", [parent["at"]] if parent.get("restart_data") else []))
    course = Course(restarts)
    ids: list[np.ndarray] = []
    for prefix, one in rounds.items():
        if commits[prefix].kind == "rollout":
            found.num_samples += len(one.ids)
            found.num_prompts += len(one.served)
            found.problems += course.follow(prefix, commits[prefix], one)
            ids.append(one.ids)
        else:
            found.problems += Course(set()).follow(prefix, commits[prefix], one, whole=True)
    found.num_epochs = course.num_epochs
    hashed = np.concatenate(ids) if ids else np.empty(0, dtype=np.uint64)
    if repeated := len(hashed) - len(np.unique(hashed)):
        found.problems.append(f"{keys.prefix}: {repeated} sample ids stand in more than one round or place")


# ---- the rest ---------------------------------------------------------------------------------------------------------------


def _count_orphans(store: Store, keys: RunKeys, found: Audit) -> None:
    try:
        orphans = leftovers(store, keys.run, older_than=0.0)
    except StoreError as error:  # perhaps another run's record; our own are in the list already
        found.problems.append(_first_line(error))
        return
    found.num_orphans = sum(len(orphan.files) for orphan in orphans)
    found.orphan_bytes = sum(orphan.bytes for orphan in orphans)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
