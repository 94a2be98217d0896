"""--help of every command prints its usage and starts nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.flows import cli
from penstock.flows.config import OPTIONS, recipe_names
from penstock.flows.options.argv import flag_of_field
from penstock.flows.options.help import SHORT, first_sentence


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_every_command_is_printed(
    command: str, printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (["--help"], ["--help-all"], ["ghost", "--store", "/dev/null/x", "-h"])  # nothing of it is read
    for words in ([command, *words] for words in given):
        out = printed(*words)
        assert f"penstock {command}" in out.partition("\n")[0]
        flags = {"--store", "--cron", "--directory", "--torch", "--output"} & set(re.findall(r"--\w+", out))
        assert flags or command == "down"
        assert words[1:] == ["--help-all"] or len(out.splitlines()) <= 54
    assert list(tmp_path.iterdir()) == []


def test_usage_names_every_command(printed: Callable[..., str]) -> None:
    said = printed("--help")
    assert all(f"\n  {command} " in said for command in cli.COMMANDS)
    assert [line for line in said.splitlines() if re.fullmatch("[a-z ]+", line)] == [
        "start", "look", "keep", "operate", "set up",
    ]  # fmt: skip
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    ("word", "first", "others"),
    [
        ("learning-rate", "--lr", {"--lr-warmup-iters", "--min-lr"}),  # the name of other trainers, then descriptions
        ("STALENESS", "--max-staleness", set()),
        ("config", "--config", {"--eval-config", "--custom-config-path"}),
        ("--config", "--config", {"--eval-config"}),
        ("dry-run", "--dry-run", set()),
        ("traceback", "--verbose", set()),
    ],
)
def test_help_with_a_word_finds_options(word: str, first: str, others: set[str], printed: Callable[..., str]) -> None:
    out = printed("train", "--help", word)
    flags = re.findall(r"^  (--[\w-]+)", out, re.MULTILINE)
    assert flags[0] == first and {*flags} >= others and "--rollout-batch-size" not in flags
    assert out.startswith(f"{len(flags)} option{'s' if len(flags) > 1 else ''} of penstock train about ")


def test_help_with_an_unknown_word_says_so(printed: Callable[..., str]) -> None:
    assert printed("sft", "--help", "zebra") == "no option is about 'zebra'\n"


@pytest.mark.parametrize("command", sorted(SHORT))
def test_short_help_is_one_screen_and_help_all_has_every_option(command: str, printed: Callable[..., str]) -> None:
    short = printed(command, "--help").splitlines()
    assert len(short) <= 54 and max(map(len, short)) <= 120
    assert any(f"penstock {command} --help-all lists all" in line for line in short)
    assert all(flag in "\n".join(short) for flags in SHORT[command].options.values() for flag in flags.split())
    every = printed(command, "--help-all")
    assert all(f"\n  {flag_of_field(name)}" in every for _, name, _ in OPTIONS)
    assert all(f"\n  {flag}" in every for flag in ("--config FILE.toml|RECIPE", "--dry-run", "--verbose"))
    assert all(name in every for name in recipe_names())


def test_help_all_of_resume_has_only_options_that_may_change(printed: Callable[..., str]) -> None:
    out = printed("resume", "--help-all")
    assert "\n  --num-rollout" in out and "\n  --lr" not in out
    assert "\n  --recompute-granularity" in out and "\n  --grad-reduce-in-fp32" not in out


@pytest.mark.parametrize("form", ["eval --compare", "regrade"])
def test_help_of_eval_refers_to_that_of_compare_and_regrade(form: str, printed: Callable[..., str]) -> None:
    assert printed(*form.split(), "--help").startswith(f"penstock {form} ")
    assert f"penstock {form} --help" in printed("eval", "--help")


def test_first_sentence_of_an_option_is_cut_outside_parentheses() -> None:
    assert first_sentence("Files with prompts. Parquet or JSONL.") == "Files with prompts"
    assert first_sentence("ahead: one after another; streaming: without a pause") == (
        "ahead: one after another; streaming: without a pause"
    )
    long = "Prompts per rollout (in SFT; rows) and so on: " + "details " * 20
    assert first_sentence(long) == "Prompts per rollout (in SFT; rows) and so on"


def test_help_of_sft_says_of_an_option_what_it_does_there_and_does_not_describe_rollouts(
    printed: Callable[..., str],
) -> None:
    out = printed("sft", "--help")
    for flag, text in (
        ("--num-rollout", "Number of rounds to train (default 0)"),
        ("--num-epoch", "Number of passes over the rows of --prompt-data, instead of --num-rollout"),
        ("--prompt-data", "Prompts (sft: conversations) as JSON, CSV, Parquet, Arrow or `save_to_disk` data"),
        ("--input-key", "Column of prompts (sft: conversations): text, messages or JSON text (default input)"),
        ("--rollout-batch-size", "Rows of --prompt-data per round (default 32)"),
        ("--rollout-shuffle", "Visit the rows in a new random order every epoch"),
    ):
        [line] = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.split()[:1] == [flag]]
        assert line.startswith(text)
    options = out.partition("run:")[2].partition("penstock sft --help-all")[0]
    assert not {"generate", "rollout", "response", "responses", "rollouts", "reward"} & {*options.split()}
