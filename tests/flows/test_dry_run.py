"""`penstock train --dry-run` shows the first prompt, the rewards of test responses, and whether the run is ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.flows.cli import main

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "demo-grpo.toml"


def planned(
    model: Path, rows: list[dict[str, object]], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Return the lines of the plan of the demo's recipe for a data set and further options."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["train", "--config", str(RECIPE), "--run", "r", "--hf-checkpoint", str(model), "--prompt-data", str(data)]
    assert main([*argv, *words.split(), "--dry-run"]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("prompt", "words", "shown"),
    [
        ("1+2=", "", "'<|user|>1+2=<|end|><|assistant|>'"),
        ([{"role": "user", "content": "1+2="}], "", "'<|user|>1+2=<|end|><|assistant|>'"),
        ("[/b] a [b]\n", "--apply-chat-template false", r"'[/b] a [b]\n'"),
    ],
)
def test_first_prompt_is_shown_as_the_model_gets_it(
    prompt: object, words: str, shown: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = planned(tiny_model, [{"prompt": prompt, "label": 3}, {"prompt": "?", "label": 4}], words, tmp_path, capsys)
    assert f"first prompt   {shown}" in lines and "its label      '3'" in lines


def test_math_reward_without_boxed_in_the_prompts_is_a_warning(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    planned(tiny_model, [{"prompt": r"1+2= in \boxed{}", "label": 3}], "--rm-type math", tmp_path, capsys)
    assert caplog.text == ""
    planned(tiny_model, [{"prompt": "1+2=", "label": 3}], "--rm-type math", tmp_path, capsys)
    assert r"none of the first 1 prompts contains \boxed" in caplog.text


REWARDS = """
def half(args, sample, **kwargs):
    return 0.5 * (sample.response == sample.label)

def broken(args, sample, **kwargs):
    return 1 / len(sample.response)

async def later(args, sample, **kwargs):
    return {"score": 2.0, "length": 1.0}
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--rm-type exact_number", ["'' gets 0.0", "'3' gets 1.0", r"'\\boxed{3}' gets 1.0"]),
        ("--rm-type boxed_exact_number", ["'' gets 0.0", "'3' gets 0.0", r"'\\boxed{3}' gets 1.0"]),
        ("--rm-type none --custom-rm-path {code}:half", ["'' gets 0.0", "'3' gets 0.5", r"'\\boxed{3}' gets 0.0"]),
        (
            "--rm-type none --custom-rm-path {code}:broken",
            ["'' gets ZeroDivisionError: ", "'3' gets 1.0", r"'\\boxed{3}' gets 0.111"],
        ),
        (
            "--rm-type none --custom-rm-path {code}:later --reward-key score",
            ["'' gets 2.0", "'3' gets 2.0", r"'\\boxed{3}' gets 2.0"],
        ),
    ],
)
def test_rewards_of_the_test_responses_are_printed(
    words: str, shown: list[str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(REWARDS)
    words = words.format(code=tmp_path / "code.py")
    rows = [{"prompt": "1+2=", "label": 3}, {"prompt": "2+2=", "label": 4}, {"prompt": "2+3=", "label": 5}]
    lines = planned(tiny_model, rows, words, tmp_path, capsys)
    first = next(index for index, line in enumerate(lines) if line.startswith("test rewards"))
    for line, text in zip(lines[first : first + 3], shown, strict=True):
        assert line.removeprefix("test rewards").strip().startswith(text)


def planned_sft(
    messages: list[dict], model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    """Return exit code, lines and errors of a dry run of `penstock sft` with one good conversation and `messages`."""
    good = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": good}] * 200 + [{"messages": messages}] + [{"messages": good}] * 200
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["sft", "--run", "r", "--hf-checkpoint", str(model), "--prompt-data", str(folder / "chats.jsonl")]
    code = main([*argv, "--input-key", "messages", "--num-rollout", "1", "--dry-run"])
    out, err = capsys.readouterr()
    return code, [line.rstrip() for line in out.splitlines()], err


def test_first_conversation_is_printed_with_what_is_trained(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    code, lines, _ = planned_sft(good, tiny_model, tmp_path, capsys)
    [shown] = [line for line in lines if line.startswith("first row ")]
    assert code == 0 and shown.endswith(" <|user|>1+1=<|end|><|assistant|>«2<|end|>»")
    assert not any(line.startswith("test rewards") for line in lines)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([("user", "1" * 5000), ("assistant", "2")], "tokens, but the model has only"),
        ([("user", "1"), ("assistant", "2" * 5000)], "tokens, but the model has only"),
        (
            [("user", "1"), ("assistant", "2"), ("user", "3" * 5000), ("assistant", "4")],
            "tokens, but the model has only",
        ),
        ([("user", "1"), ("untrained", "2")], "trains no token"),
        ([("user", "1"), ("untrained", "2"), ("user", "1"), ("untrained", "3")], "trains no token"),
    ],
)
def test_sft_refuses_rows_that_are_too_long_or_train_nothing(
    messages: list[tuple], said: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"role": "assistant" if role == "untrained" else role, "content": text} for role, text in messages]
    for row, (role, _) in zip(rows, messages):
        row |= {"step_loss_mask": 0} if role == "untrained" else {}
    code, _, err = planned_sft(rows, tiny_model, tmp_path, capsys)
    assert code == 2 and "chats.jsonl row 200: " in err and said in err and err.count("\n") == 1


ALL = {"hf-checkpoint": "{model}", "prompt-data": "{data}", "rm-type": "random", "num-rollout": "1", "run": "r"}
ALL |= {"rollout-max-response-len": "16"}


@pytest.mark.parametrize(
    ("changed", "last"),
    [
        ({}, "ready: the same command without --dry-run starts the run"),
        ({"prompt-data": "absent.jsonl"}, "not ready here: --prompt-data absent.jsonl does not exist here; "),
        ({"prompt-data": "absent/rows.jsonl"}, "not ready here: --prompt-data absent/rows.jsonl does not exist here; "),
        (
            {"hf-checkpoint": "/models/absent"},
            "not ready here: --hf-checkpoint /models/absent (weights) does not exist",
        ),
        ({"custom-rm-path": "mine.py:f", "rm-type": "none"}, "not ready here: --custom-rm-path mine.py does not exist"),
        ({"use-wandb": "true", "wandb-key": "env:ABSENT"}, "not ready here: the trackers: "),
    ],
)
def test_last_line_says_whether_the_run_is_ready(
    changed: dict[str, str],
    last: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"input": "1+1="}\n')
    words = [word for flag, value in (ALL | changed).items() for word in (f"--{flag}", value)]
    words = [word.format(model=tiny_model, data="data.jsonl") for word in words]
    assert main(["train", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(last)
    assert "per GPU" not in out, "no table of GPUs on a machine without one"


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ("--hf-checkpoint Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("--hf-checkpoint ./Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("--ref-load meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"),
        (
            "--use-opd --opd-type megatron --opd-teacher-load Qwen/Qwen3-4B",
            "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B",
        ),
        ("--prompt-data openai/gsm8k", "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k"),
        ("--eval-prompt-data a openai/gsm8k", "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k"),
    ],
)
def test_name_on_the_hub_is_refused_with_the_download_command(
    flags: str,
    command: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"input": "1+1="}\n')
    words = [word for flag, value in ALL.items() if f"--{flag}" not in flags.split() for word in (f"--{flag}", value)]
    words = [word.format(model=tiny_model, data="data.jsonl") for word in words]
    for start in (["--dry-run"], ["--store", "s"]) if "hf-checkpoint" in flags else (["--dry-run"],):
        assert main(["train", *words, *flags.split(), *start]) == 2
        error = capsys.readouterr().err
        assert command in error and error.count("\n") == 1
    assert not (tmp_path / "s" / "runs").exists()
