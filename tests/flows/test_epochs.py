"""The number of rounds: of --num-epoch, from the number of rows; of --num-rollout-per-start, also after kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_records import parent_record, run_json

from penstock.flows.config import Plan, PostTrainConfig, derive, validate_config
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError
from penstock.storage.store import Store

STORE = Store("memory://", probe=False)
BATCH = ["--rollout-batch-size", "4"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 10)
    return ["--hf-checkpoint", "m", "--prompt-data", str(tmp_path / "prompts.jsonl"), "--input-key", "prompt"]


@pytest.mark.parametrize(("epochs", "rounds"), [(1, 2), (2, 5)])
def test_rounds_are_epochs_times_rows_divided_by_the_batch(words: list[str], epochs: int, rounds: int) -> None:
    for more in ([], ["--num-rollout", str(rounds)]):
        given = [*words, *BATCH, "--num-epoch", str(epochs), "--lr-decay-style", "cosine", *more]
        plan = resolve("train", parse_config(given), STORE)
        assert plan.run.num_rollout == plan.train.lr_decay_iters == rounds


def test_run_keeps_its_rounds_and_its_schedule_when_rows_or_rounds_are_added(words: list[str], tmp_path: Path) -> None:
    def plan(*more: str) -> Plan:
        store = Store(str(tmp_path / "store"))
        given = [*words, "--run", "r", "--store", store.root, "--lr-decay-style", "cosine", *BATCH, *more]
        plan = resolve("train", parse_config(given), store)
        open_run(store, plan)
        return plan

    assert plan("--num-epoch", "2").run.num_rollout == 5
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 20)
    for more, rounds in (
        ("--num-epoch 2", 5),
        ("--num-epoch 2 --global-batch-size 32", 5),
        ("--num-epoch 3", 15),
        ("--num-epoch 3", 15),
        ("--num-rollout 7", 7),
    ):
        again = plan(*more.split())
        assert (again.run.num_rollout, again.train.lr_decay_iters) == (rounds, 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-rollout", "4"], "= 5 rounds, but --num-rollout is 4: omit --num-rollout"),
        (["--num-rollout-per-start", "2"], "--num-epoch cannot be combined with --num-rollout-per-start"),
        (["--data-source-path", "s.py"], "--num-epoch cannot be combined with --data-source-path"),
        (["--rollout-batch-size", "32"], "2 x 10 rows of --prompt-data // --rollout-batch-size 32 = 0 rounds"),
    ],
)
def test_epochs_that_give_no_number_of_rounds_are_refused(words: list[str], more: list[str], message: str) -> None:
    config = parse_config([*words, "--num-epoch", "2", "--rollout-batch-size", "4", *more])
    with pytest.raises(OptionError, match=message):
        resolve("train", config, STORE)


# ---- --num-rollout-per-start: every start adds its rounds once -------------------------------------------------------


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
        commit = Commit(kind="export", index=rounds.stop, policy_version=rounds.stop)
        store.commit(KEYS.export_prefix(rounds.stop), commit)


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
    for per_start, num_rollout, before, target in ((None, 4, 0, 4), (3, None, 4, 7), (None, 8, 7, 8), (3, None, 8, 11)):
        fixed = {"num_rollout": num_rollout} if num_rollout else {}
        assert start(store, config(per_start, **fixed)) == target
        train(store, range(before, target), export=True)


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
