"""The GSM8K recipes: the preparation of the data, and the reward of the prepared rows."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.flows.options.flags import parse_config
from penstock.stages.rewards.builtin import grade_math

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "examples" / "gsm8k" / "prepare.py"))
ROWS = [
    {
        "question": "Two bags hold 600 nails each. How many nails?",
        "answer": "600 + 600 = <<600+600=1200>>1200\n#### 1,200",
    },
    {"question": " It was 3 degrees and fell by 8.\n", "answer": "3 - 8 = -5\n#### -5"},
]


@pytest.mark.parametrize("layout", ["parquet", "jsonl"])
def test_prepared_rows_have_instruction_and_plain_number(layout: str, tmp_path: Path) -> None:
    source = tmp_path / "gsm8k"
    (source / "main").mkdir(parents=True)
    (source / "socratic").mkdir()
    (source / "socratic" / "train-00000.jsonl").write_text("not read")
    for split in ("train", "test"):
        if layout == "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), source / "main" / f"{split}-00000-of-00001.parquet")
        else:
            (source / "main" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert script["prepare"](source, tmp_path / "data") == {"train": 2, "test": 2}
    rows = [json.loads(line) for line in (tmp_path / "data" / "test.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["1200", "-5"]
    assert rows[1]["prompt"] == "It was 3 degrees and fell by 8.\n\n" + script["INSTRUCTION"]


def test_command_prints_the_files_and_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = str(ROOT / "examples/gsm8k/prepare.py")
    monkeypatch.setattr(sys, "argv", [file, str(tmp_path), str(tmp_path / "data")])
    runpy.run_path(file, run_name="__main__")
    assert capsys.readouterr().out == "".join(
        f"{tmp_path}/data/{split}.jsonl: 2 problems\n" for split in ("train", "test")
    )
    monkeypatch.setattr(sys, "argv", [file, str(tmp_path)])
    with pytest.raises(SystemExit, match=r"usage: python examples/gsm8k/prepare\.py"):
        runpy.run_path(file, run_name="__main__")


def test_missing_split_and_answer_without_a_number_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="train"):
        script["prepare"](tmp_path, tmp_path / "data")
    with pytest.raises(ValueError, match="####"):
        script["prompt_of"]({"question": "?", "answer": "no number"})


@pytest.mark.parametrize("model", ["0.6B", "4B"])
def test_reward_of_the_recipe_accepts_the_number_and_nothing_else(model: str) -> None:
    rollout = parse_config(["--config", str(ROOT / f"configs/recipes/gsm8k-qwen3-{model}.toml")]).rollout
    assert (rollout.rm_type, rollout.rm_evaluated_integers) == ("math", True)
    assert rollout.apply_chat_template_kwargs == {"enable_thinking": False}
    answers = {
        r"So \boxed{1200}": 1.0,
        r"\boxed{1,200}": 1.0,
        r"\boxed{2 \cdot 600}": 0.0,
        "1200": 0.0,
        r"\boxed{120}": 0.0,
    }
    assert {text: grade_math(text, "1200", evaluated_integers=True) for text in answers} == answers
