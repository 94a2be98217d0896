"""The terminal output: one machine-readable line per round, and the summary."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from penstock.flows.runtime.display import Display
from penstock.flows.terminal.lines import (
    COLUMNS,
    RoundLines,
    format_sample_preview,
    log_context,
    round_of_task,
    summary_rows,
)
from penstock.storage.commit import Commit, eval_rewards


def config(num_rollout: int = 3, *, rollout_only: bool = False, log_format: str = "text") -> SimpleNamespace:
    return SimpleNamespace(
        run=SimpleNamespace(num_rollout=num_rollout, debug_rollout_only=rollout_only, log_format=log_format),
        convert=SimpleNamespace(hf_checkpoint="/models/tiny"),
        rollout=SimpleNamespace(prompt_data=["/data/[train].jsonl"]),  # brackets are rich's markup
        eval=SimpleNamespace(data_sets=[("heldout", "/data/heldout.jsonl")]),
    )


def rollout(index: int, reward: float) -> Commit:
    summary = {"rollout/raw_reward": reward, "rollout/response_len/mean": 3.25, "perf/tokens_per_gpu_per_sec": 1234.5}
    return Commit(kind="rollout", index=index, summary=summary, seconds={"generate": 0.5, "reward": 0.1, "write": 0.02})


def step(index: int) -> Commit:
    summary = {"train/loss": -0.0021, "train/ppo_kl": 0.5, "train/kl_loss": 1.2e-5}
    summary["train/train_rollout_logprob_abs_diff"] = 3e-6
    seconds = {"restore": 0.01, "train": 0.4, "read": 0.1, "update": 0.3}
    return Commit(kind="step", index=index, policy_version=index + 1, summary=summary, seconds=seconds)


def shown(*, commits: list[Commit]) -> str:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    display = Display("r1", "train", config(), "/store", "sqlite:////store/mlflow/mlflow.db", console=console)
    for commit in commits:
        display.print_commit(commit)
    display.print_summary()
    return out.getvalue()


def test_round_is_printed_on_one_line() -> None:
    lines = RoundLines(20)
    lines.rollouts[2], lines.publish_seconds = rollout(2, 0.53125), [9.0, 0.02]
    line = lines.format(step(2)).plain
    assert line == (
        "round  2 (3/20)   reward 0.531  loss -0.0021  kl 1.2e-5  gap 3.0e-6  len 3.2  tok/s 1,234  time 1.0s"
    )


def test_line_of_a_round_fits_its_width_and_keeps_reward_and_time() -> None:
    numbers = {name: 123456.789 for column in COLUMNS for name in column.metrics}
    commit = step(1233).model_copy(update={"summary": numbers})
    for width in (40, 60, 80, 100):
        lines = RoundLines(3000)
        lines.rollouts[1233] = rollout(1233, 0.5)
        line = lines.format(commit, width).plain
        assert len(line) <= max(width, 56)
        assert line.startswith("round 1233 (1234/3000)  reward 123456.789") and line.endswith("  time 1.0s")


def test_column_appears_when_its_number_is_not_zero_and_stays() -> None:
    lines, values = RoundLines(9), (-1e-9, 0.5, 0.0, float("nan"))
    steps = [step(r).model_copy(update={"summary": {"train/loss": loss}}) for r, loss in enumerate(values)]
    shown = [re.findall(r"loss (\S+)", lines.format(commit).plain) for commit in steps]
    assert shown == [[], ["0.5000"], ["0.0000"], ["nan"]]
    assert "loss nan" in RoundLines(9).format(steps[3]).plain
    lines = RoundLines(9)
    lines.rollouts[0] = rollout(0, 0.0)
    assert "reward 0.000" in lines.format(step(0)).plain


def test_a_round_without_training_is_printed_when_it_is_generated() -> None:
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False)
    display = Display("r1", "train", config(2, rollout_only=True), "/store", console=console)
    assert display.print_commit(rollout(1, 0.5)) == "round 1 (2/2)  reward 0.500  len 3.2  tok/s 1,234  time 0.6s"


def test_without_a_tty_every_round_is_a_plain_line() -> None:
    text = shown(commits=[commit for r in range(3) for commit in (rollout(r, 0.1 * r), step(r))])
    assert re.findall(r"^round .*reward (\S+)", text, re.MULTILINE) == ["0.000", "0.100", "0.200"]
    assert "\x1b" not in text and "/data/[train].jsonl" in text and "penstock runs --store /store" in text


def test_summary_sums_the_seconds_of_all_commits() -> None:
    commits = [commit for r in range(3) for commit in (rollout(r, 0.25 * (r + 1)), step(r))]
    for version in (3, 0):
        scores = {"eval/heldout": 0.3 * version, "eval/heldout-pass@8": 1.0}
        commits.append(Commit(kind="eval", index=version, summary=scores, seconds={"generate": 1.0}))
    for v in (1, 3):
        attempt = f"runs/r1/checkpoints/{v:06d}/attempt-x"
        commits.append(Commit(kind="checkpoint", index=v, attempt=attempt, seconds={"save": 2.0}))
    rows = summary_rows(commits, [0.5, 0.25], "s3://bucket")
    assert rows["rounds"] == "3"
    assert rows["reward"] == "0.250 in round 0, 0.750 in round 2"
    assert rows["eval heldout"] == "0.000 after 0 rounds, 0.900 after 3 rounds"
    assert rows["checkpoint"] == "s3://bucket/runs/r1/checkpoints/000003/attempt-x"
    assert rows["seconds"] == "rollout 1.9, train 1.2, publish 0.8, save 4.0, eval 2.0"


AIME = {
    "eval/aime": 0.5, "eval/aime-ci_low": 0.4123, "eval/aime-ci_high": 0.5877,
    "eval/aime-pass@4": 0.75, "eval/aime-pass@4-ci_low": 0.7, "eval/aime-pass@4-ci_high": 0.8,
    "eval/aime-failed_ratio": 0.0, "eval/aime/response_len/mean": 9.0, "perf/rollout_time": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["aime-24", "aime@0123abcd"])  # the second one was scored again
def test_evaluation_line_shows_every_metric_with_its_interval(name: str) -> None:
    commit = Commit(kind="eval", index=2, summary={key.replace("aime", name): value for key, value in AIME.items()})
    assert eval_rewards(commit) == {name: 0.5}
    others = "pass@4 0.750 [0.700, 0.800], failed_ratio 0.000"
    assert f"  evaluated after 2 rounds: {name} 0.500 [0.412, 0.588] ({others})\n" in shown(commits=[commit])


def with_samples(commit: Commit, *rows: tuple[float | None, str, str]) -> Commit:
    shown = [{"reward": reward, "prompt": prompt, "response": response} for reward, prompt, response in rows]
    return commit.model_copy(update={"state": {"shown": shown}})


def test_best_and_worst_sample_take_one_line_each() -> None:
    rows = [(1.0, "[bold]2+3[/bold]=", "5\n\n[red]!"), (0.5, "between", "x"), (0.0, "4+4=", "9"), (None, "failed", "")]
    lines = [line.plain for line in format_sample_preview(with_samples(rollout(0, 0.5), *rows), 80)]
    assert lines == ["best      1.000  [bold]2+3[/bold]= -> 5 [red]!", "worst     0.000  4+4= -> 9"]
    long = with_samples(rollout(0, 0.5), (1.0, "a question " * 4, "an answer " * 20))
    [line] = [line.plain for line in format_sample_preview(long, 80)]
    assert len(line) <= 80 and " -> an answer" in line and "a question" in line and line.endswith("an answer")
    assert format_sample_preview(rollout(0, 0.5), 80) == []  # --num-shown-samples 0


def test_control_characters_of_a_sample_stay_on_its_line() -> None:
    nasty = "\x1b[2J\x1b]0;title\x07\r\n\u202e" + "算" * 3000 + "the end\x00\ud800"
    lines = format_sample_preview(with_samples(rollout(0, 0.5), (1.0, nasty, "word " * 9000)), 80)
    [line] = lines  # no other sample
    assert line.cell_len <= 80 and line.plain.isprintable()
    assert "the end" in line.plain and line.plain.endswith("word word")


@pytest.mark.parametrize("terminal", [False, True])
def test_json_lines_have_run_round_stage_and_message(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, soft_wrap=True, highlight=False)
    display = Display("r1", "train", config(log_format="json"), "/store", console=console)
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
    assert any(line["message"].startswith("round 2 (3/3)") and line["stage"] == "train" for line in lines)
    [warning] = [line for line in lines if line["level"] == "warning"]
    assert (warning["message"], warning["round"], warning["stage"]) == ("two\nlines", None, None)


@pytest.mark.parametrize(
    "name, number",
    [
        ("train-000004", 4),
        ("eval-000005-gsm8k", 4),
        ("publish-for-eval-000002", 1),
        ("publish-000000", None),
    ],
)
def test_round_is_read_from_the_name_of_a_task_run(name: str, number: int | None) -> None:
    assert round_of_task(name) == number


def test_every_number_of_a_round_line_is_in_the_reference() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for label, metrics in [*((column.label, column.metrics) for column in COLUMNS), ("time", ())]:
        [row] = re.findall(rf"^\| `{label}` \|(.*)\|$", reference, re.MULTILINE)
        assert all(f"`{name}`" in row for name in metrics), label
