"""Runs with --num-rollout-per-start: every start adds its rounds once, also after kills."""

from pathlib import Path

import pytest
from run_records import parent_record, run_json

from penstock.flows.config import PostTrainConfig, derive, validate_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store

KEYS = RunKeys("nightly")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def config(per_start: int | None = 3, **run: object) -> PostTrainConfig:
    return validate_config({"run": {"run": KEYS.run, "num_rollout_per_start": per_start, **run}})


def start(store: Store, config: PostTrainConfig) -> int:
    """What a session does first; returns the target."""
    plan = resolve("train", config, store)
    open_run(store, plan)
    return plan.run.num_rollout


def train(store: Store, rounds: range, *, export: bool = False) -> None:
    for r in rounds:
        store.commit(KEYS.step_prefix(r), Commit(kind="step", index=r, policy_version=r + 1))
    if export:
        store.commit(
            KEYS.export_prefix(rounds.stop), Commit(kind="export", index=rounds.stop, policy_version=rounds.stop)
        )


def test_each_start_adds_num_rollout_per_start_once(store: Store) -> None:
    assert start(store, config()) == 3
    train(store, range(0, 2))  # killed
    assert start(store, config()) == 3
    train(store, range(2, 3))  # killed before the export
    assert start(store, config()) == 3
    train(store, range(2, 3), export=True)
    assert start(store, config()) == 6
    assert start(store, config()) == 6  # killed at once
    train(store, range(3, 6), export=True)
    assert start(store, config(4)) == 10
    train(store, range(6, 8))
    assert start(store, config(7)) == 10  # another N for the next start; this one keeps what it was to reach


def test_run_can_switch_between_fixed_length_and_rounds_per_start(store: Store) -> None:
    assert start(store, config(None, num_rollout=4)) == 4
    train(store, range(0, 4), export=True)
    assert start(store, config()) == 7
    train(store, range(4, 7), export=True)
    assert start(store, config(None, num_rollout=8)) == 8
    train(store, range(7, 8), export=True)
    assert start(store, config()) == 11


@pytest.mark.parametrize("recorded", [6, 8])  # 8: what the fork's first start is to reach, by chance
def test_fork_with_rounds_per_start_counts_from_its_first_round(store: Store, recorded: int) -> None:
    values = derive(config(3, num_rollout=recorded)).model_dump(mode="json")
    store.create(KEYS.record, run_json(config=values, parent=parent_record("p", 5)))
    train(store, range(0, 5))
    assert start(store, config()) == 8
    train(store, range(5, 6))
    assert start(store, config()) == 8
    train(store, range(6, 8), export=True)
    assert start(store, config()) == 11
