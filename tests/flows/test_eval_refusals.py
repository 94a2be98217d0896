"""Preflight checks every data set of --eval-config with its own settings."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import plan_of, preflight


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path) -> list[str]:
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "1+1=", "label": "2"}) + "\n")
    where = f"--run r --store {tmp_path}/store --hf-checkpoint {tiny_model} --eval-config {tmp_path}/evals.toml"
    return [*where.split(), "--eval-max-response-len", "8", "--rm-type", "exact_number"]


def write(directory: Path, more: str) -> None:
    (directory / "evals.toml").write_text(f'[[datasets]]\nname = "own"\npath = "{directory / "own.jsonl"}"\n{more}')


def test_preflight_checks_every_data_set_with_its_own_settings(words: list[str], tmp_path: Path) -> None:
    for more, error in (
        ('input_key = "question"\nlabel_key = "label"', None),
        ('label_key = "label"', "'input'"),
        ('input_key = "question"\nrm_type = "maths"', "did you mean math"),
        ('input_key = "question"\nrm_type = "dapo"', "--reward-key"),
    ):
        write(tmp_path, more)
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            preflight(plan_of("evaluate", parse_config(words)))


def test_group_reward_without_an_evaluation_reward_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward_func(args, samples):\n    return [0.0] * len(samples)\n")
    group = [*words[:-2], "--custom-rm-path", str(tmp_path / "mine.py"), "--group-rm"]
    write(tmp_path, 'input_key = "question"')
    with pytest.raises(ValueError, match=r"--group-rm .*--eval-rm-type"):
        preflight(plan_of("evaluate", parse_config(group)))
    write(tmp_path, 'input_key = "question"\nrm_type = "random"')
    preflight(plan_of("evaluate", parse_config(group)))
