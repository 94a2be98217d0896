"""The line of an evaluation: every metric with its interval."""

import io
from types import SimpleNamespace

from rich.console import Console

from penstock.flows.runtime.display import Display
from penstock.flows.terminal.lines import format_with_interval
from penstock.storage.commit import Commit, eval_rewards

SUMMARY = {
    "eval/aime": 0.5, "eval/aime-ci_low": 0.4123, "eval/aime-ci_high": 0.5877,
    "eval/aime-pass@4": 0.75, "eval/aime-pass@4-ci_low": 0.7, "eval/aime-pass@4-ci_high": 0.8,
    "eval/aime-failed_ratio": 0.0, "eval/aime/response_len/mean": 9.0,
}  # fmt: skip


def line_of(summary: dict[str, float]) -> str:
    config = SimpleNamespace(
        run=SimpleNamespace(num_rollout=3, debug_rollout_only=False, log_format="text"),
        convert=SimpleNamespace(hf_checkpoint="m"),
        rollout=SimpleNamespace(prompt_data=["x"]),
        eval=SimpleNamespace(data_sets=[]),
    )
    display = Display("r", "evaluate", config, "/store", console=Console(file=io.StringIO()))
    return display.print_commit(Commit(kind="eval", index=2, summary=summary))


def test_evaluation_line_shows_intervals_after_their_metrics() -> None:
    assert line_of(SUMMARY) == (
        "  evaluated after 2 rounds: aime 0.500 [0.412, 0.588] (pass@4 0.750 [0.700, 0.800], failed_ratio 0.000)"
    )
    assert format_with_interval({"a": 0.25}, "a") == "0.250"


def test_rescored_evaluation_is_shown_as_its_own_data_set() -> None:
    again = {name.replace("aime", "aime@0123abcd"): value for name, value in SUMMARY.items()}
    commit = Commit(kind="eval", index=2, summary=again)
    assert eval_rewards(commit) == {"aime@0123abcd": 0.5}
    assert line_of(again).startswith("  evaluated after 2 rounds: aime@0123abcd 0.500 [0.412, 0.588] (pass@4")
