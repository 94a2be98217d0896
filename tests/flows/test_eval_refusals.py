"""Preflight checks every data set of --eval-config with its own settings."""

import json
from pathlib import Path

import pytest

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import plan_of, preflight


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path) -> list[str]:
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "1+1=", "label": "2"}) + "\n")
    where = ["--run", "r", "--store", str(tmp_path / "store"), "--hf-checkpoint", str(tiny_model)]
    return [
        *where,
        "--eval-config",
        str(tmp_path / "evals.toml"),
        "--eval-max-response-len",
        "8",
        "--rm-type",
        "exact_number",
    ]


def write(directory: Path, more: str) -> None:
    (directory / "evals.toml").write_text(f'[[datasets]]\nname = "own"\npath = "{directory / "own.jsonl"}"\n{more}')


def test_preflight_checks_every_data_set_with_its_own_settings(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, 'input_key = "question"\nlabel_key = "label"')
    preflight(plan_of("evaluate", parse_config(words)))
    write(tmp_path, 'label_key = "label"')
    with pytest.raises(ValueError, match="'input'"):
        preflight(plan_of("evaluate", parse_config(words)))
    write(tmp_path, 'input_key = "question"\nrm_type = "maths"')
    with pytest.raises(ValueError, match="did you mean math"):
        preflight(plan_of("evaluate", parse_config(words)))
    write(tmp_path, 'input_key = "question"\nrm_type = "dapo"')
    with pytest.raises(ValueError, match="--reward-key"):
        preflight(plan_of("evaluate", parse_config(words)))


def test_group_reward_without_an_evaluation_reward_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward_func(args, samples):\n    return [0.0] * len(samples)\n")
    group = [*words[:-2], "--custom-rm-path", str(tmp_path / "mine.py"), "--group-rm"]
    write(tmp_path, 'input_key = "question"')
    with pytest.raises(ValueError, match=r"--group-rm .*--eval-rm-type"):
        preflight(plan_of("evaluate", parse_config(group)))
    write(tmp_path, 'input_key = "question"\nrm_type = "random"')
    preflight(plan_of("evaluate", parse_config(group)))
