"""Comparison of two policies by `penstock eval --compare`."""

import random
from pathlib import Path

import numpy as np
import pytest
from evaluated_run import config_of, evaluate, write_sums

from penstock.flows import cli
from penstock.stages.eval.scores import bootstrap_intervals, compare_rewards
from penstock.storage.store import Store

WORSE = [["0", "1"], ["1", "1"], ["4", "4"], ["5", "5"]]
BETTER = [["0", "0"], ["2", "1"], ["4", "1"], ["5", "?"]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "sums.jsonl")


def command(store: Store, *words: str) -> int:
    return cli.main(["eval", "--compare", *words, "--store", store.root])


def test_comparison_of_two_versions_of_a_run(store: Store, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(store, data, "r")
    evaluate(store, config, 20, WORSE)
    evaluate(store, config, 40, BETTER)
    before = sorted(found.key for found in store.walk(""))
    assert command(store, "r/20", "r/40") == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("sums"))
    # prompt means: A 0.5 0 1 0, B 1 0.5 0.5 0
    assert row[:5] == ["sums", "4", "0.375", "0.500", "+0.125"] and row[-3:] == ["2", "1", "1"]
    low, high = float(row[5]), float(row[7])
    assert low < 0.125 < high
    assert sorted(found.key for found in store.walk("")) == before, "nothing is written"
    assert command(store, "r/40", "r") == 0, "a run alone is its newest version"
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("sums"))
    assert row[2:] == ["0.500", "0.500", "+0.000", "+0.000", "to", "+0.000", "0", "0", "4"]


def test_comparison_of_two_runs_with_different_data_sets(
    store: Store, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = config_of(store, data, "a", "--eval-prompt-data", "more", str(data))
    evaluate(store, more, 0, WORSE)
    evaluate(store, more, 0, WORSE, name="more")
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(data.read_bytes())
    evaluate(store, config_of(store, moved, "b"), 3, BETTER)
    assert command(store, "a", "b") == 0
    shown = capsys.readouterr().out
    assert "A = a/0, B = b/3" in shown and "only a/0 was evaluated on more" in shown


def test_pairing_narrows_the_interval() -> None:
    """A small improvement on every prompt is significant, although the prompts differ widely in difficulty."""
    rng = random.Random(0)
    a = {prompt: rng.random() for prompt in range(200)}
    b = {prompt: reward + 0.02 + 0.01 * rng.random() for prompt, reward in a.items()}
    found = compare_rewards(a, b)
    assert 0.02 <= found.low < found.difference < found.high <= 0.03 and found.wins == 200
    low, high = bootstrap_intervals(np.array([[value] for value in a.values()]))
    assert high[0] - low[0] > 10 * (found.high - found.low)
    mirrored = compare_rewards(b, a)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low)) and mirrored.losses == 200


def test_only_common_prompts_count() -> None:
    found = compare_rewards({0: 1.0, 1: 0.0, 2: 0.0}, {1: 1.0, 2: 0.0, 3: 0.0})
    assert (found.num_prompts, found.mean_a, found.mean_b) == (2, 0.0, 0.5)
    assert (found.wins, found.losses, found.ties) == (1, 0, 1)


def test_changed_data_set_is_refused_in_one_sentence(
    store: Store, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(store, data, "r")
    evaluate(store, config, 20, WORSE)
    data.write_text(data.read_text().replace("3 + 3", "3 + 4"))
    evaluate(store, config, 40, BETTER)
    assert command(store, "r/20", "r/40") == 2
    said = capsys.readouterr().err.strip()
    assert "had 4 rows in the first evaluation, and 4 rows with different content" in said and "\n" not in said
