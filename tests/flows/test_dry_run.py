"""`penstock train --dry-run` shows the first prompt as the model gets it, and warns of rewards that stay 0."""

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
