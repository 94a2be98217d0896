"""benchmarks/peers: the report of every peer has one shape, and the parts of a round add up."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

import peers
import penstock_grpo
import verl_grpo

ROOT = Path(__file__).parents[2]


def verl_line(step, at, **data):
    parts = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.5, "update_weights": 0.25, "step": 4.5}
    means = {"critic/score/mean": 0.3, "response_length/mean": 10.0}
    return at, {"step": step, "data": {f"timing_s/{name}": value for name, value in parts.items()} | means | data}


def test_round_of_verl_lasts_from_log_line_to_log_line_without_the_evaluation():
    evaluation = (0.0, {"step": 0, "data": {"val-core/sums/reward/mean@1": 0.2}})
    lines = [evaluation, verl_line(1, 100.0), verl_line(2, 105.0), verl_line(3, 113.0, **{"timing_s/testing": 3.0})]
    rounds = verl_grpo.describe_rounds(lines)
    assert [each.total for each in rounds] == [4.5, 5.0, 5.0]
    assert rounds[1].seconds == {"generation": 2.0, "training": 2.0, "weight update": 0.25}
    assert set(rounds[1].seconds) == set(peers.PARTS)


def test_held_out_of_verl_is_read_by_task_and_step():
    means = {"correct": 0.25, "score": 0.325, "reward": 0.325}
    data = {f"val-aux/sums/{name}/mean@1": value for name, value in means.items()}
    lines = [(0.0, {"step": 0, "data": data | {"val-core/sorting/correct/mean@1": 0.5}})]
    assert verl_grpo.describe_held_out(lines, "sums") == {0: {"accuracy": 0.25, "reward": 0.325}}


def test_configuration_counts_each_setting_once_with_its_value():
    recipe = {"rollout": {"n": 8, "engine_options": {"mem_fraction_static": 0.3}}, "train": {"lr": 1e-5}}
    assert penstock_grpo.recipe_settings(recipe) == ["n=8", "mem_fraction_static=0.3", "lr=1e-05"]
    words = ["--eval-prompt-data", "sums", "file", "--colocate", "--lr", "-1"]
    assert penstock_grpo.option_settings(words) == ["--eval-prompt-data sums file", "--colocate", "--lr -1"]


def test_report_has_the_rest_of_a_round_and_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path), "--model", "/secret/model", "--data", "/secret/data", "--output", str(tmp_path / "r.json")]
    options = peers.make_peer_parser("", "peer").parse_args([*words, "--prompts", "2", "--samples", "4"])
    options.commit, options.train_options = "c0ffee", []
    seconds = {"generation": 2.0, "training": 1.0, "weight update": 0.5}
    slow, usual = peers.Round(seconds, 60.0, 0.1, 10.0), peers.Round(seconds, 4.0, 0.2, 10.0)
    with peers.GpuMemory() as memory:
        pass
    figures = dict(held_out={}, start={"update committed": 7.0}, configuration=["a=1"], differences=["order"])
    peers.report(options, [slow, slow, usual, usual], memory, **figures)
    text = (tmp_path / "r.json").read_text()
    report = json.loads(text)
    assert "/secret" not in text
    assert report["seconds of a round"] == {**seconds, "rest": 0.5, "round": 4.0}
    assert report["tokens/s"] == {"of generation": 40, "of a round": 20}
    assert report["settings of all peers"]["response_tokens"] == 64
    assert sum(report["seconds of a round"][part] for part in (*peers.PARTS, "rest")) == pytest.approx(4.0)
