"""Command lines that descriptions of slime print are checked and planned, with small local files."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.flows.cli import main

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from real_models import REAL_MODELS

LINES = (Path(__file__).parent / "printed_commands.txt").read_text(encoding="utf-8").splitlines()
COMMANDS = dict(line.split(": ", 1) for line in LINES if not line.startswith("#"))
CODE = """
async def generate(args, sample, sampling_params):
    return sample

async def reward_func(args, sample, **kwargs):
    return 1.0

class CustomRewardModel:
    def __init__(self, model_path):
        pass

    def compute_reward(self, prompts, responses):
        return [1.0] * len(prompts)

def pop_first(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flow, model, *words = COMMANDS[name].split()
    row = {"prompt": "1+1=", "question": "1+1=", "label": "2", "final_answer": "2", "input": "1+1="}
    for path in ("data.jsonl", "eval.jsonl"):
        (tmp_path / path).write_text(json.dumps(row) + "\n")
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [REAL_MODELS[model].architecture], **REAL_MODELS[model].config})
    )
    paths = {"data": "data.jsonl", "eval": "eval.jsonl", "code": "code.py", "dir": str(tmp_path)}
    words = [word.format(**paths) for word in words]
    needed = {
        "--hf-checkpoint": str(tmp_path),
        "--prompt-data": "data.jsonl",
        "--num-rollout": "2",
        "--run": "r",
        "--actor-num-gpus-per-node": "8",
        "--rollout-batch-size": "32",
        "--n-samples-per-prompt": "8",
    }
    if "--save" in words:
        del needed["--run"]
    words += [word for flag, value in needed.items() if flag not in words for word in (flag, value)]
    code = main([flow, *words, "--dry-run"])
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "optimizer steps" in out.out
    for flag, value in pairwise(words):
        if flag in ("--actor-num-gpus-per-node", "--update-weights-interval", "--async-buffer-size", "--max-turns"):
            assert f"{flag} {value}" in out.out
