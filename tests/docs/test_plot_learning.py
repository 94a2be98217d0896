"""The picture of a training: any number of runs, with a peer's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from doc_pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import plot_learning
from plot_learning import COLORS, draw, multiples, tick_step

SVG = "{http://www.w3.org/2000/svg}"


def run(rewards: list[float], *tasks: str, size: int = 10) -> dict[str, Any]:
    """The report of a run that was evaluated before its first round and after its last."""
    rounds = size * len(rewards)
    evaluation = {"accuracy": 0.5, "interval": [0.4, 0.6], "reward": 0.5}
    return {
        "rounds": {f"means of {size} rounds": {"rollout/raw_reward": rewards}, "rounds with a NaN": 0},
        "held out": {task: {"0": evaluation, str(rounds): evaluation | {"accuracy": 0.9}} for task in tasks},
    }


def drawn(runs: dict[str, Any], path: Path, peer: str = "trl") -> ElementTree.Element:
    draw(runs, peer).save(path)
    return ElementTree.fromstring(path.read_text())


def curves(picture: ElementTree.Element) -> list[dict[str, str]]:
    return [line.attrib for line in picture.iter(f"{SVG}polyline") if "opacity" not in line.attrib]


def test_picture_of_the_repository_is_that_of_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["plot_learning.py", "--methods", "grpo", "trl", "--output", str(tmp_path / "curve.svg")]
    )
    plot_learning.main()
    assert (tmp_path / "curve.svg").read_text() == (ROOT / "docs/images/smollm2-curve.svg").read_text()


@pytest.mark.parametrize("number", [1, 30])
def test_every_run_has_a_curve_in_every_panel(number: int, tmp_path: Path) -> None:
    runs = {f"method{i}": run([0.1, 0.2 + i / 100], "sums", "sorting") for i in range(number)}
    picture = drawn(runs, tmp_path / "a.svg")
    assert len(curves(picture)) == 3 * number
    assert len({line["stroke"] for line in curves(picture)}) == min(number, len(COLORS))
    texts = {text.text: text.attrib for text in picture.iter(f"{SVG}text")}
    assert runs.keys() <= texts.keys()
    size = [float(value) for value in picture.attrib["viewBox"].split()[2:]]
    assert all(float(text["x"]) < size[0] and float(text["y"]) < size[1] for text in texts.values())


def test_seeds_of_a_method_share_a_color_and_a_name(tmp_path: Path) -> None:
    runs = {"grpo-seed0": run([0.1], "sums"), "grpo-seed12": run([0.2], "sums"), "gspo-seed0": run([0.3], "sums")}
    picture = drawn(runs, tmp_path / "a.svg")
    colors = [line["stroke"] for line in curves(picture)][:3]
    assert colors[0] == colors[1] != colors[2]
    assert {"grpo, 2 seeds", "gspo"} <= {text.text for text in picture.iter(f"{SVG}text")}


@pytest.mark.parametrize(("peer", "dashed"), [("trl", ["trl"]), ("verl", []), ("grpo", ["grpo", "grpo-lora"])])
def test_curves_of_a_peer_are_dashed(peer: str, dashed: list[str], tmp_path: Path) -> None:
    runs = {name: run([0.1], "sums") for name in ("grpo", "grpo-lora", "trl-seed0")}
    lines = curves(drawn(runs, tmp_path / "a.svg", peer))
    assert sum("stroke-dasharray" in line for line in lines) == 2 * len(dashed)


def test_runs_may_lack_tasks_and_have_other_lengths_and_blocks(tmp_path: Path) -> None:
    runs = {
        "long": run([0.1, 0.2, 0.3], "sums", "sorting", "spelling", size=50),
        "short": run([0.5], "sums"),
        "blocks of 5": run([0.1, 0.2], "sorting", size=5),
        "<script>": run([0.1], "sums"),
    }
    nothing = {"accuracy": 0.0, "interval": [0.0, 0.0]}
    runs["short"]["held out"]["sums"] = {"0": nothing, "10": nothing}  # no right answer
    picture = drawn(runs, tmp_path / "a.svg")
    points = [line["points"].split() for line in curves(picture)]
    assert [len(path) for path in points] == [3, 1, 2, 1, *[2] * 6]
    assert all(re.fullmatch(r"[\d.]+,[\d.]+", point) for path in points for point in path)


@pytest.mark.parametrize(("limit", "count", "step"), [(1, 4, 0.5), (0.61, 4, 0.2), (1e-3, 4, 5e-4), (3000, 3, 1000)])
def test_ticks_divide_an_axis_into_round_parts(limit: float, count: int, step: float) -> None:
    assert tick_step(limit, count) == pytest.approx(step)
    ticks = list(multiples(step, limit))
    assert ticks[0] == 0 and len(ticks) <= count + 1 and ticks[-1] <= limit * (1 + 1e-9)


def test_reports_of_several_files_are_drawn_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpo", "trl"):
        (tmp_path / name).write_text(json.dumps({"runs": {name: run([0.1, 0.2], "sums")}}))
    words = ["plot_learning.py", str(tmp_path / "grpo"), str(tmp_path / "trl"), "--output", str(tmp_path / "b.svg")]
    monkeypatch.setattr(sys, "argv", words)
    plot_learning.main()
    texts = {text.text for text in ElementTree.parse(tmp_path / "b.svg").iter(f"{SVG}text")}
    assert {"grpo", "trl"} <= texts
