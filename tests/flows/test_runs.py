"""A run's record: identity stays, schedule changes are recorded, placement is free, and nothing is found that is not there."""

from pathlib import Path

import pytest

from flows.flags import parse
from flows.runs import latest_schedule, open_run, open_store, recorded


def config(store: Path, *words: str):
    return parse(["--hf-checkpoint", "model", "--run", "r", "--store", str(store), *words])


def test_a_run_keeps_its_identity(tmp_path: Path) -> None:
    first = config(tmp_path, "--num-rollout", "3", "--lr", "1e-3")
    store = open_store(first.run)
    keys = open_run(store, "post_train", first)
    assert open_run(store, "post_train", first).run == keys.run, "the same command again is welcome"
    with pytest.raises(ValueError, match=r"run 'r' has --lr 0.001, this command says 0.01"):
        open_run(store, "post_train", config(tmp_path, "--num-rollout", "3", "--lr", "1e-2"))
    with pytest.raises(ValueError, match=r"was started by `post_train`, not `sft`"):
        open_run(store, "sft", first)


def test_schedule_changes_are_recorded_and_placement_is_free(tmp_path: Path) -> None:
    first = config(tmp_path, "--num-rollout", "3")
    store = open_store(first.run)
    keys = open_run(store, "post_train", first)
    open_run(store, "post_train", config(tmp_path, "--num-rollout", "3", "--trainer-threads", "1"))
    assert store.list(f"{keys.prefix}/changes") == []
    for rounds in ("5", "7"):
        open_run(store, "post_train", config(tmp_path, "--num-rollout", rounds))
    assert store.list(f"{keys.prefix}/changes") == ["000000.json", "000001.json"]
    assert latest_schedule(store, keys)["run.num_rollout"] == 7
    flow, resumed = recorded(first.run, "r")
    assert (flow, resumed.run.num_rollout, resumed.train) == ("post_train", 7, first.train)


def test_an_unknown_run_names_those_that_exist(tmp_path: Path) -> None:
    first = config(tmp_path)
    open_run(open_store(first.run), "post_train", first)
    with pytest.raises(ValueError, match=r"has no run 'x' \(it has: r\)"):
        recorded(first.run, "x")
