"""The terminal output: one machine-readable line per round, and the summary."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from penstock.flows.reporting.log_format import log_context, round_of_task
from penstock.flows.runtime.display import Display, format_round_line, format_sample_preview, summary_rows
from penstock.storage.refs import Commit
from penstock.storage.tracking.lineage import eval_rewards


def config(num_rollout: int = 3, *, rollout_only: bool = False, log_format: str = "text") -> SimpleNamespace:
    return SimpleNamespace(
        run=SimpleNamespace(num_rollout=num_rollout, debug_rollout_only=rollout_only, log_format=log_format),
        convert=SimpleNamespace(hf_checkpoint="/models/tiny"),
        rollout=SimpleNamespace(prompt_data=["/data/[train].jsonl"]),  # brackets are rich's markup
        eval=SimpleNamespace(eval_prompt_data=[("heldout", "/data/heldout.jsonl")]),
    )


def rollout(index: int, reward: float) -> Commit:
    summary = {"rollout/raw_reward": reward, "rollout/response_len/mean": 3.25, "perf/tokens_per_gpu_per_sec": 1234.5}
    return Commit(kind="rollout", index=index, summary=summary, seconds={"generate": 0.5, "reward": 0.1, "write": 0.02})


def step(index: int) -> Commit:
    summary = {
        "train/loss": -0.0021,
        "train/ppo_kl": 0.5,
        "train/kl_loss": 1.2e-5,
        "train/train_rollout_logprob_abs_diff": 3e-6,
    }
    seconds = {"restore": 0.01, "train": 0.4, "read": 0.1, "update": 0.3}
    return Commit(kind="step", index=index, policy_version=index + 1, summary=summary, seconds=seconds)


def shown(display_of: int = 3, *, terminal: bool = False, commits: list[Commit] | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, soft_wrap=True, highlight=False)
    display = Display(
        "r1", "post_train", config(display_of), "/store", "sqlite:////store/mlflow/mlflow.db", console=console
    )
    for commit in commits or []:
        display.print_commit(commit)
    display.print_summary()
    return out.getvalue()


def test_round_is_printed_on_one_line() -> None:
    line = format_round_line(step(2), rollout(2, 0.53125), 20, [9.0, 0.02]).plain
    assert line == (
        "round  3/20  reward 0.531  loss -0.0021  kl 1.2e-05  gap 3.0e-06  length 3.2  tokens/s 1,234  "
        "rollout 0.62s  train 0.40s  publish 0.02s"
    )


def test_sft_round_shows_only_its_own_columns() -> None:
    commit = Commit(
        kind="step", index=0, summary={"train/loss": 1.5, "perf/actor_train_tok_per_s": 10_000}, seconds={"train": 2.0}
    )
    assert format_round_line(commit, None, 4).plain == "round 1/4  loss 1.5000  tokens/s 10,000  train 2.00s"


def test_a_round_without_training_is_printed_when_it_is_generated() -> None:
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False)
    display = Display("r1", "post_train", config(2, rollout_only=True), "/store", console=console)
    assert display.print_commit(rollout(1, 0.5)) == "round 2/2  reward 0.500  length 3.2  rollout 0.62s"


def test_without_a_tty_every_round_is_a_plain_line() -> None:
    text = shown(commits=[commit for r in range(3) for commit in (rollout(r, 0.1 * r), step(r))])
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("round ")]
    assert [re.search(r"reward (\S+)", line).group(1) for line in lines] == ["0.000", "0.100", "0.200"]  # type: ignore[union-attr]
    assert "/data/[train].jsonl" in text
    assert "penstock runs --store /store" in text


def test_on_a_tty_the_progress_bar_is_removed_at_the_end() -> None:
    text = shown(terminal=True, commits=[rollout(0, 0.5), step(0)])
    assert "training on round 1" in text or "0/3" in text or "1/3" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden, and is back


def test_progress_is_shown_only_on_a_tty() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        display = Display("r1", "sft", config(), "/store", console=Console(file=out, force_terminal=terminal))
        with display.progress("rollout 1") as report:
            report(1, 8)
        with pytest.raises(RuntimeError, match="engine"), display.progress("rollout 2") as report:
            raise RuntimeError("engine")
        display.close()
        assert ("rollout 1" in out.getvalue()) is terminal


def test_summary_sums_the_seconds_of_all_commits() -> None:
    commits = [commit for r in range(3) for commit in (rollout(r, 0.25 * (r + 1)), step(r))]
    commits += [
        Commit(
            kind="eval",
            index=version,
            summary={"eval/heldout": 0.3 * version, "eval/heldout-pass@8": 1.0},
            seconds={"generate": 1.0},
        )
        for version in (3, 0)
    ]
    commits += [
        Commit(kind="checkpoint", index=v, attempt=f"runs/r1/checkpoints/{v:06d}/attempt-x", seconds={"save": 2.0})
        for v in (1, 3)
    ]
    rows = summary_rows(commits, [0.5, 0.25], "s3://bucket")
    assert rows["rounds"] == "3"
    assert rows["reward"] == "0.250 in round 1, 0.750 in round 3"
    assert rows["eval heldout"] == "0.000 after 0 rounds, 0.900 after 3 rounds"
    assert rows["checkpoint"] == "s3://bucket/runs/r1/checkpoints/000003/attempt-x"
    assert rows["seconds"] == "rollout 1.9, train 1.2, publish 0.8, save 4.0, eval 2.0"


def test_evaluation_line_shows_reward_before_other_metrics() -> None:
    summary = {
        "eval/aime-24": 0.5,
        "eval/aime-24-pass@4": 1.0,
        "eval/aime-24/response_len/mean": 9.0,
        "perf/rollout_time": 2.0,
    }
    commit = Commit(kind="eval", index=2, summary=summary)
    assert eval_rewards(commit) == {"aime-24": 0.5}
    assert "  evaluated after 2 rounds: aime-24 0.500 (pass@4 1.000)\n" in shown(commits=[commit])


def with_samples(commit: Commit, *rows: tuple[float | None, str, str]) -> Commit:
    shown = [{"reward": reward, "prompt": prompt, "response": response} for reward, prompt, response in rows]
    return commit.model_copy(update={"state": {"shown": shown}})


def test_best_and_worst_sample_are_shown_below_the_round() -> None:
    rows = [(1.0, "[bold]2+3[/bold]=", "5\n\n[red]!"), (0.5, "between", "x"), (0.0, "4+4=", "9"), (None, "failed", "")]
    text = shown(commits=[with_samples(rollout(0, 0.5), *rows), step(0)])
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("best 1.000  [bold]2+3[/bold]= -> 5 [red]!")
    assert lines[at - 1].startswith("round 1/3")
    assert lines[at + 1] == "worst 0.000  4+4= -> 9"
    long = with_samples(rollout(0, 0.5), (1.0, "a question " * 4, "an answer " * 4))
    assert [line.plain.strip() for line in format_sample_preview(long, 80)] == [
        "best 1.000  " + "a question " * 3 + "a question",
        "->  " + "an answer " * 3 + "an answer",
    ]
    assert "[bold]2+3[/bold]=" in shown(terminal=True, commits=[with_samples(rollout(0, 0.5), *rows), step(0)])
    assert "best" not in shown(commits=[rollout(0, 0.5), step(0)])  # --num-shown-samples 0


def test_control_characters_of_a_sample_stay_on_its_line() -> None:
    nasty = "\x1b[2J\x1b]0;title\x07\r\n\u202e" + "算" * 3000 + "the end\x00\ud800"
    lines = format_sample_preview(with_samples(rollout(0, 0.5), (1.0, nasty, "word " * 9000)), 80)
    assert len(lines) == 2  # no other sample
    for line in lines:
        assert line.cell_len <= 80
        assert line.plain.isprintable()
    assert "the end" in lines[0].plain
    assert lines[1].plain.endswith("word word word")


@pytest.mark.parametrize("terminal", [False, True])
def test_json_lines_have_run_round_stage_and_message(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, soft_wrap=True, highlight=False)
    display = Display("r1", "post_train", config(log_format="json"), "/store", console=console)
    with log_context("train", 3):
        display.note('[bold] a "note" ' + "long " * 50)
        display.print_commit(step(2))
    display.warn("two\nlines")
    display.print_summary()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(list(line) == ["time", "level", "run", "round", "stage", "message"] for line in lines)
    assert {line["run"] for line in lines} == {"r1"}
    [note] = [line for line in lines if "note" in line["message"]]
    assert (note["round"], note["stage"], note["level"]) == (3, "train", "info")
    assert note["message"].startswith('[bold] a "note" long long')
    assert any(line["message"].startswith("round 3/3") and line["stage"] == "train" for line in lines)
    [warning] = [line for line in lines if line["level"] == "warning"]
    assert (warning["message"], warning["round"], warning["stage"]) == ("two\nlines", None, None)


@pytest.mark.parametrize(
    "name, number",
    [
        ("rollout-000000", 1),
        ("train-000004", 5),
        ("checkpoint-000005", 5),
        ("eval-000005-gsm8k", 5),
        ("publish-for-eval-000002", 2),
        ("publish-000002", 2),
        ("convert", None),
    ],
)
def test_round_is_read_from_the_name_of_a_task_run(name: str, number: int | None) -> None:
    assert round_of_task(name) == number
