"""--num-epoch: the number of rounds from the number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.config import Plan
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.errors import OptionError
from penstock.storage.store import Store

STORE = Store("memory://", probe=False)
BATCH = ["--rollout-batch-size", "4"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 10)
    return ["--hf-checkpoint", "m", "--prompt-data", str(tmp_path / "prompts.jsonl"), "--input-key", "prompt"]


@pytest.mark.parametrize(("epochs", "batch", "rounds"), [(1, 4, 2), (2, 4, 5), (3, 10, 3)])
def test_rounds_are_epochs_times_rows_divided_by_the_batch(
    words: list[str], epochs: int, batch: int, rounds: int
) -> None:
    given = [*words, "--num-epoch", str(epochs), "--rollout-batch-size", str(batch)]
    for more in ([], ["--num-rollout", str(rounds)]):
        assert resolve("train", parse_config([*given, *more]), STORE).run.num_rollout == rounds


def test_learning_rate_decays_over_the_rounds_of_the_epochs(words: list[str]) -> None:
    plan = resolve("train", parse_config([*words, "--num-epoch", "2", *["--lr-decay-style", "cosine"], *BATCH]), STORE)
    assert (plan.run.num_rollout, plan.train.lr_decay_iters) == (5, 5)


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
        (["--num-epoch", "2"], 5),
        (["--num-epoch", "2", "--global-batch-size", "32"], 5),
        (["--num-epoch", "3"], 15),
        (["--num-epoch", "3"], 15),
        (["--num-rollout", "7"], 7),
    ):
        again = plan(*more)
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
