"""The file of --eval-config: precedence of settings, and one error sentence for each kind of mistake."""

import json
from pathlib import Path

import pytest

from penstock.flows.config import PostTrainConfig, options_by_mutability, validate_config
from penstock.flows.options.flags import parse_config, parse_values
from penstock.storage.errors import OptionError

FILE = """
[defaults]
temperature = 0.6
rm_type = "math"
pass_threshold = 0.5

[[datasets]]
name = "aime"
path = "aime.jsonl"
n_samples_per_eval_prompt = 16
temperature = 0.0
input_key = "problem"

[[datasets]]
name = "gpqa"
path = "gpqa.jsonl"
rm_type = "gpqa"
metadata_key = "extra"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "evals.toml"
    file.write_text(FILE)
    return file


def read(file: Path, *words: str) -> PostTrainConfig:
    return parse_config(["--eval-config", str(file), *words])


def test_a_setting_comes_from_the_data_set_then_the_defaults_then_the_flag(file: Path) -> None:
    evals = read(
        file,
        *("--eval-prompt-data", "mine", "mine.jsonl", "--eval-temperature", "0.9", "--eval-top-p", "0.7"),
        *("--n-samples-per-eval-prompt", "4", "--custom-rm-path", "mine.py", "--pass-threshold", "2"),
    ).eval
    assert evals.data_sets == [("mine", "mine.jsonl"), ("aime", "aime.jsonl"), ("gpqa", "gpqa.jsonl")]
    aime, gpqa, mine = (evals.rollout_overrides("p", name) for name in ("aime", "gpqa", "mine"))
    assert [one["rollout_temperature"] for one in (aime, gpqa, mine)] == [0.0, 0.6, 0.9], "set, defaults, flag"
    assert [one["n_samples_per_prompt"] for one in (aime, gpqa, mine)] == [16, 4, 4]
    assert [one.get("rm_type") for one in (aime, gpqa, mine)] == ["math", "gpqa", None]
    assert [one.get("custom_rm_path", "the rollout's") for one in (aime, gpqa, mine)] == [None, None, "the rollout's"]
    assert [one["rollout_top_p"] for one in (aime, gpqa, mine)] == [0.7] * 3
    assert (aime["input_key"], gpqa["metadata_key"]) == ("problem", "extra")
    assert "input_key" not in gpqa and "metadata_key" not in aime
    assert [evals.data_set_settings(name)["pass_threshold"] for name in ("aime", "gpqa", "mine")] == [0.5, 0.5, 2.0]


def test_a_config_keeps_the_content_of_a_deleted_file(file: Path) -> None:
    config = read(file, "--eval-prompt-data", "mine", "mine.jsonl")
    file.unlink()
    for dumped in (config.model_dump(mode="json"), json.loads(config.model_dump_json()), config.model_dump()):
        assert validate_config(dumped) == config
    assert options_by_mutability(config, "schedule")["eval.eval_prompt_data"] == [["mine", "mine.jsonl"]]


def test_another_file_replaces_the_first_one(file: Path, tmp_path: Path) -> None:
    before = read(file, "--eval-prompt-data", "mine", "mine.jsonl").model_dump(mode="json")
    other = tmp_path / "other.toml"
    other.write_text('[[datasets]]\nname = "new"\npath = "new.jsonl"')
    after = validate_config(parse_values(["--eval-config", str(other)], before)).eval
    assert after.data_sets == [("mine", "mine.jsonl"), ("new", "new.jsonl")]


SET = '[[datasets]]\nname = "a"\npath = "p"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SET}temprature = 1", "data set a has the unknown setting 'temprature': did you mean temperature"),
        (
            f"{SET}[defaults]\nxyz = 1",
            r"\[defaults\] has the unknown setting 'xyz'.*the settings are n_samples_per_eval_prompt, temperature",
        ),
        ("- a", "not a mapping"),
        ("datasets:\n- {name: a, paht: b}", "unknown setting 'paht'"),
    ],
)
def test_an_invalid_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / f"evals.{'yaml' if text.startswith(('- a', 'datasets:')) else 'toml'}"
    file.write_text(text)
    with pytest.raises(OptionError, match=f"^--eval-config .*{message}") as raised:
        read(file, "--eval-prompt-data", "mine", "mine.jsonl")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("evals.yaml", "eval:\n  defaults: {temperature: 0.6}\n  datasets: [{name: a, path: a.jsonl, top_p: 0.7}]\n"),
        ("evals.yml", "defaults:\n  temperature: 0.6\ndatasets:\n  a:\n    path: a.jsonl\n    top_p: 0.7\n"),
        ("evals.json", '{"defaults": {"temperature": 0.6}, "datasets": {"a": {"path": "a.jsonl", "top_p": 0.7}}}'),
    ],
)
def test_yaml_and_json_are_read_like_toml(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    evals = read(tmp_path / name).eval
    assert evals.data_sets == [("a", "a.jsonl")]
    assert evals.data_set_settings("a").items() >= {"temperature": 0.6, "top_p": 0.7}.items()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^--eval-config '.*none.toml'"):
        read(tmp_path / "none.toml")
