"""Runs that go on for ever: every start trains so many rounds more (`--num-rollout-per-start`), for instance each night by a schedule.

A start has one target, the number of rounds at which it ends. The target is recorded with the schedule (run.json for the first start,
`changes/` for later ones) before anything is trained, so a start that continues a killed one keeps its target: retries add no rounds.
"""

from __future__ import annotations

from typing import Any

from flows.config import PostTrainConfig
from storage.refs import RunKeys
from storage.removal import is_removed
from storage.store import Store

TARGET, PER_START = "run.num_rollout", "run.num_rollout_per_start"


def resolved(store: Store, config: PostTrainConfig) -> PostTrainConfig:
    """The config with the target of this start as `num_rollout`; unchanged if the run has no --num-rollout-per-start."""
    if config.run.num_rollout_per_start is None:
        return config
    run = config.run.model_copy(update={"num_rollout": target(store, RunKeys(config.run.run), config)})
    return config.model_copy(update={"run": run})


def target(store: Store, keys: RunKeys, config: PostTrainConfig) -> int:
    """Rounds at which this start of a continual run ends: those of the start before if it did not finish, else so many more."""
    per_start = config.run.num_rollout_per_start
    assert per_start is not None, "only continual runs have targets"
    done = len(store.committed_indices(f"{keys.prefix}/steps"))
    before = _target_before(store, keys, per_start)
    if before is not None and not _finished(store, keys, before, done):
        return before
    return done + per_start


def _target_before(store: Store, keys: RunKeys, per_start: int) -> int | None:
    """Target of the latest start, if it was one of a continual run."""
    from flows.runs import latest_schedule, read_record

    record = None if is_removed(store, keys) else read_record(store, keys)
    if record is None:
        return None
    if parent := _unstarted_fork(store, keys, record):
        return int(parent["at"]) + per_start  # its record tells the parent's schedule
    schedule = latest_schedule(store, keys)
    return schedule[TARGET] if schedule.get(PER_START) else None


def _unstarted_fork(store: Store, keys: RunKeys, record: dict[str, Any]) -> dict[str, Any] | None:
    parent: dict[str, Any] | None = record.get("parent")
    return parent if parent and not store.list(f"{keys.prefix}/changes") else None


def _finished(store: Store, keys: RunKeys, target: int, done: int) -> bool:
    """Whether a start got to its end: all rounds are trained, and the export, its last stage, is committed."""
    return done >= target and (target == 0 or store.committed(keys.export(target)) is not None)
