"""--num-epoch: the number of rounds from the number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.schedule import with_rounds_of_epochs
from penstock.storage.errors import OptionError


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
        assert with_rounds_of_epochs("post_train", parse_config([*given, *more])).run.num_rollout == rounds


def test_config_without_epochs_is_unchanged(words: list[str]) -> None:
    config = parse_config([*words, "--num-rollout", "7"])
    assert with_rounds_of_epochs("post_train", config) is config


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-rollout", "4"], "= 5 rounds, but --num-rollout is 4: omit one of them"),
        (["--num-rollout-per-start", "2"], "--num-epoch cannot be combined with --num-rollout-per-start"),
        (["--data-source-path", "s.py"], "--num-epoch cannot be combined with --data-source-path"),
        (["--rollout-batch-size", "32"], "2 x 10 rows of --prompt-data // --rollout-batch-size 32 = 0 rounds"),
    ],
)
def test_epochs_that_give_no_number_of_rounds_are_refused(words: list[str], more: list[str], message: str) -> None:
    config = parse_config([*words, "--num-epoch", "2", "--rollout-batch-size", "4", *more])
    with pytest.raises(OptionError, match=message):
        with_rounds_of_epochs("post_train", config)
