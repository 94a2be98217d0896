"""Options of asynchronous training: defaults that depend on the mode, and refusals. `rows_of_async` in
bad_inputs.py tries those that need more than the options."""

from __future__ import annotations

import pytest

from penstock.flows.config import config_hash, derive
from penstock.flows.options.flags import parse_config
from penstock.storage.errors import OptionError

STREAMING = "--async-mode streaming"


@pytest.mark.parametrize(
    ("words", "found", "advice"),
    [
        ("--async-buffer-size 3 --offload-train", "--async-buffer-size 3 .*--offload-train", "or these options"),
        (f"{STREAMING} --offload-rollout", f"{STREAMING} .*--offload-rollout", "or these options"),
        ("--eval-mode apart --colocate", "--eval-mode apart .*--colocate", "or these options"),
        ("--eval-mode apart", "nothing is evaluated", "add --eval-prompt-data, or omit --eval-mode"),
        ("--eval-num-engines 2", "--eval-num-engines .*without --eval-mode apart", "add --eval-mode apart, or omit"),
        ("--max-staleness 3", f"--max-staleness .*without {STREAMING}", "add --async-mode streaming, or omit"),
        ("--pause-generation-mode in_place", f"without {STREAMING}", "add --async-mode streaming, or omit"),
        (f"{STREAMING} --async-buffer-size 1", "--async-buffer-size cannot be combined", f"or {STREAMING}"),
        (f"{STREAMING} --partial-rollout", "--partial-rollout cannot be combined", f"or {STREAMING}"),
        (f"{STREAMING} --data-source-path source.py:Source", "--data-source-path cannot", f"or {STREAMING}"),
        (f"{STREAMING} --check-weight-update-equal", "overwrites the weights", "omit --check-weight-update-equal"),
        ("--update-weights-interval 3 --colocate", "interval 3 leaves weights", "or omit these options"),
        (f"{STREAMING} --update-weights-interval 4", "interval 4 .*--max-staleness 2", "an interval of at most 3"),
    ],
)
def test_contradicting_options_are_refused_with_advice(words: str, found: str, advice: str) -> None:
    with pytest.raises(OptionError, match=f"{found}.*: .*{advice}( --[a-z-]+)?$"):
        parse_config(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--async-buffer-size 2 --update-weights-interval 5",
        "--async-buffer-size 1 --partial-rollout --over-sampling-batch-size 64",
        f"{STREAMING} --max-staleness 1 --update-weights-interval 2 --pause-generation-mode in_place",
        "--max-staleness 2 --pause-generation-mode retract",  # the defaults
        "--eval-mode apart --eval-num-engines 2 --eval-prompt-data heldout data.jsonl",
        "--update-weights-interval 3 --offload-train",
    ],
)
def test_possible_combination_is_accepted(words: str) -> None:
    parse_config(words.split())


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("", 0),
        ("--async-buffer-size 1", 1),
        ("--update-weights-interval 3", 2),
        ("--async-buffer-size 2 --update-weights-interval 3", 4),
        (STREAMING, 2),
        (f"{STREAMING} --max-staleness 5 --update-weights-interval 2", 5),
    ],
)
def test_corrections_are_on_if_tokens_may_be_stale(words: str, limit: int) -> None:
    config = derive(parse_config(words.split()))
    assert config.run.staleness_limit == limit
    assert config.train.use_tis == (limit > 0)
    assert not parse_config([*words.split(), "--no-use-tis"]).train.use_tis, "as given"
    assert not parse_config([*words.split(), "--use-rollout-logprobs"]).train.use_tis, "it needs no correction"


def test_no_rollout_ahead_is_the_synchronous_config() -> None:
    """The same config, so the same flow: K = 0 and N = 1 is the synchronous loop."""
    words = "--lr 1e-4 --rollout-batch-size 8 --n-samples-per-prompt 4 --seed 3"
    config, synchronous = parse_config([*words.split(), "--async-buffer-size", "0"]), parse_config(words.split())
    assert config == synchronous and config_hash(config) == config_hash(synchronous)
    assert not config.run.generates_ahead and config.run.staleness_limit == 0
