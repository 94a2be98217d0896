"""A continual run: every start adds its rounds once, however often it is killed."""

import json
from pathlib import Path

import pytest

from flows.config import PostTrainConfig, part, validated
from flows.continual import resolved
from flows.runs import open_run
from storage.refs import Commit, RunKeys
from storage.store import Store

KEYS = RunKeys("nightly")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def config(per_start: int | None = 3, **run: object) -> PostTrainConfig:
    return validated({"run": {"run": KEYS.run, "num_rollout_per_start": per_start, **run}})


def start(store: Store, config: PostTrainConfig) -> int:
    """What a session does first; returns the target."""
    config = resolved(store, config)
    open_run(store, "post_train", config)
    return config.run.num_rollout


def train(store: Store, rounds: range, *, export: bool = False) -> None:
    for r in rounds:
        store.commit(KEYS.step(r), Commit(kind="step", index=r, policy_version=r + 1))
    if export:
        store.commit(KEYS.export(rounds.stop), Commit(kind="export", index=rounds.stop, policy_version=rounds.stop))


def test_each_start_adds_its_rounds_once(store: Store) -> None:
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


def test_a_run_of_fixed_length_may_become_continual_and_back(store: Store) -> None:
    assert start(store, config(None, num_rollout=4)) == 4
    train(store, range(0, 4), export=True)
    assert start(store, config()) == 7
    train(store, range(4, 7), export=True)
    assert start(store, config(None, num_rollout=8)) == 8
    train(store, range(7, 8), export=True)
    assert start(store, config()) == 11


@pytest.mark.parametrize("recorded", [6, 8])  # 8: what the fork's first start is to reach, by chance
def test_a_fork_counts_from_where_it_begins(store: Store, recorded: int) -> None:
    values = config(3, num_rollout=recorded).model_dump(mode="json")
    store.create(KEYS.record, json.dumps({"flow": "post_train", "config": values, "parent": {"run": "p", "at": 5}}).encode())
    train(store, range(0, 5))
    assert start(store, config()) == 8
    train(store, range(5, 6))
    assert start(store, config()) == 8
    train(store, range(6, 8), export=True)
    assert start(store, config()) == 11


def test_other_runs_are_left_alone(store: Store) -> None:
    fixed = config(None, num_rollout=4)
    assert resolved(store, fixed) is fixed
    assert part(resolved(store, config()), "identity") == part(config(), "identity")
