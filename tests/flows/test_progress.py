"""What a start of a run says about itself on its Prefect page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from penstock.flows.reporting.prefect_page import (
    describe_progress,
    parse_flow_run_id,
    reward_curve_svg,
    run_page,
)
from penstock.storage.commit import Commit, evaluation_rewards, model_title, training_rewards


def made_commits() -> list[Commit]:
    commits = []
    for r in range(8):
        at = 100.0 * r
        reward = {"rollout/raw_reward": 0.1 * r}
        commits.append(Commit(kind="rollout", index=r, summary=reward, created_at=at))
        commits.append(Commit(kind="step", index=r, summary={"train/loss": 8.0 - r}, created_at=at + 1))
    commits.append(Commit(kind="checkpoint", index=8, created_at=800.0))
    for version, score in ((0, 0.25), (8, 0.75)):
        commits.append(Commit(kind="eval", index=version, summary={"eval/held": score}, created_at=801.0))
    return commits


def test_progress_names_the_rounds_of_this_start_and_their_rewards() -> None:
    commits = made_commits()
    assert describe_progress(commits, since=500.0) == (
        "rounds 5 to 7, reward 0.500 -> 0.700, eval held 0.250 -> 0.750, checkpoint 8"
    )
    assert describe_progress(commits, since=700.0).startswith("round 7, reward 0.700, ")
    assert describe_progress(commits, since=900.0) == "no new stage was committed"


def test_progress_of_fine_tuning_names_the_loss() -> None:
    steps = [commit for commit in made_commits() if commit.kind == "step"]
    assert describe_progress(steps) == "rounds 0 to 7, loss 8.000 -> 1.000"


def test_curve_has_a_line_for_each_series_with_a_point_for_each_value() -> None:
    commits = made_commits()
    svg = reward_curve_svg(training_rewards(commits), {**evaluation_rewards(commits), "a<b": {3: float("1")}})
    assert svg is not None
    lines = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [8, 2, 1]
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert heights == sorted(heights, reverse=True), "a higher reward is drawn further up"
    assert reward_curve_svg({}, {}) is None


def test_page_has_links_and_escapes_cell_borders() -> None:
    page = run_page("r", {"reward": "a|b"}, {"MLflow": "http://host/x", "report": "", "store": "/s"}, None)
    assert "a&#124;b" in page and "[http://host/x](http://host/x)" in page and "`/s`" in page
    assert "report" not in page and "svg" not in page


def test_flow_run_id_is_read_from_its_url_and_from_itself() -> None:
    text = "57ea80b3-7ab4-4172-a0d4-73b72f8ad573"
    assert str(parse_flow_run_id(f"http://127.0.0.1:4200/flow-runs/flow-run/{text}")) == text
    assert str(parse_flow_run_id(text)) == text and parse_flow_run_id("") is None


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/data/runs/runs/my-run/exports/000020/attempt-0a1b", "my-run/20"),
        ("/data/store/models/attempt-0a1b", "attempt-0a1b"),
    ],
)
def test_model_of_a_run_is_named_by_run_and_version(path: str, title: str) -> None:
    assert model_title(path) == title
