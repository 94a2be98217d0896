"""What MLflow shows first: the main metrics, the columns of the list of runs, the results in a run's description."""

import json
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from tracked_run import commits, track

from penstock.storage.commit import Commit, commit_key
from penstock.storage.tracking.mlflow.mlflow_runs import SECTION, VIEW_TAG, describe_results, overview_points
from penstock.storage.tracking.tracker import Committed, RunCommits

METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_main_metrics_come_first_and_costs_last_in_the_order_of_names() -> None:
    # Sections of the documented metrics, in a table's first column, except those that MLflow has a tab for.
    sections = {
        f"{name}/" for row in re.findall(r"^\| (`.*?)\|", METRICS, re.M) for name in re.findall(r"`(\w+)/", row)
    }
    others = sorted(sections - {"system/"})
    assert {"eval/", "rollout/", "train/"} < set(others)
    assert sorted([SECTION, *others])[0] == SECTION and others[-1] == "usage/"


ROLLOUT = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 3.0, "perf/tokens_per_gpu_per_sec": 9.0, "x": 1.0}
STEP = {"train/ppo_kl": 0.5, "train/entropy_loss": 2.0, "train/loss": 1.5, "perf/actor_train_tok_per_s": 9.0}
EVALUATION = {"eval/aime": 0.5, "eval/aime-pass@4": 0.75}
DEMONSTRATIONS = Commit(kind="rollout", index=7, policy_version=-1, created_at=1e9)


@pytest.mark.parametrize(
    ("kind", "summary", "fields", "before", "expected"),
    [
        ("rollout", ROLLOUT, {}, None, {"1 reward": 0.5, "7 response length": 3.0, "3 tokens per second": 9.0}),
        ("step", STEP, {}, None, {"4 KL": 0.5, "6 entropy": 2.0}),
        ("step", STEP | {"train/kl_loss": 0.25}, {}, None, {"4 KL": 0.25, "6 entropy": 2.0}),
        ("step", {"train/loss": 1.5, "perf/actor_train_tok_per_s": 9.0}, {}, DEMONSTRATIONS,
         {"1 loss": 1.5, "3 tokens per second": 9.0}),
        ("eval", EVALUATION, {}, None, {"2 evaluation aime": 0.5}),
        ("eval", EVALUATION, {"inputs": {"samples": "runs/demo/evals/000002/aime"}}, None, {}),
    ],
    ids=["rollout", "KL of the old policy", "KL of the reference", "loss of demonstrations",
         "evaluation", "graded again"],
)  # fmt: skip
def test_main_metrics_of_a_commit(
    kind: str, summary: dict[str, float], fields: dict, before: Commit | None, expected: dict[str, float]
) -> None:
    index, commit = RunCommits(), Commit(kind=kind, index=7, created_at=1e9, summary=summary, **fields)
    if before:
        index.add("runs/demo/rollouts/000007.commit.json", before)
    points = overview_points(Committed("key", commit.created_at, commit), index)
    assert {(point.step, point.at) for point in points} <= {(7, 1e9)}
    assert {point.name.removeprefix(f"{SECTION}/"): point.value for point in points} == expected


def view_columns(client: MlflowClient) -> list[str]:
    """The columns of the stored view, as MLflow's page reads it."""
    view = json.loads(client.get_experiment_by_name("penstock").tags[VIEW_TAG])
    assert isinstance(view["name"], str) and isinstance(view["createdAt"], int)
    state = json.loads(view["state"])
    assert set(state["selectedColumns"]) < set(state["columnOrder"]) == set(state["columnWidths"])
    metrics = [name for name in state["selectedColumns"] if name.startswith("metrics.")]
    first = ["attributes.`Run Name`", "runDateAndNestInfo"]
    assert state["columnOrder"] == [*first, *metrics, "tags.`penstock.rounds`", "duration"]
    return state["selectedColumns"]


def test_description_and_view_grow_with_the_commits(database: Path, tmp_path: Path) -> None:
    """The description begins with the results so far, below the user's text; the view has a column for each
    evaluation of all runs."""
    client = MlflowClient(f"sqlite:///{database}")

    def main_run() -> Run:
        [run] = client.search_runs(["1"], "tags.`penstock.part` = 'run'")
        return run

    track(tmp_path / "out", database, commits()[:3])
    run = main_run()
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**Results:** 1 round, **reward 0.000**\n\n[charts](#/experiments/1/runs/")
    assert f"runs/{run.info.run_id}/model-metrics" in note and "viewStateShareKey=penstock" in note
    assert run.data.tags["penstock.rounds"] == "1"

    client.set_tag(run.info.run_id, "mlflow.note.content", f"My own words.\n\n{note}")
    track(tmp_path / "out", database, commits())
    run = main_run()
    lines = run.data.tags["mlflow.note.content"].split("\n\n")
    assert lines[:2] == [
        "My own words.",
        "**Results:** 4 rounds, **reward 0.000 -> 0.750**, **evaluation heldout 0.500 -> 0.500**",
    ]
    assert sum(line.startswith("**Results:**") for line in lines) == 1 and "#### Links" in lines
    assert run.data.tags["penstock.rounds"] == "4"

    expected = ["1 reward", "2 evaluation heldout", "3 tokens per second"]
    assert view_columns(client) == [*(f"metrics.`{SECTION}/{name}`" for name in expected), "tags.`penstock.rounds`"]
    other = commits()[-1][1].model_copy(update={"summary": {"eval/a@b": 0.5}})
    track(tmp_path / "two", database, [("runs/demo/evals/000004/a@b.commit.json", other)])
    expected.insert(1, "2 evaluation a_at_b")
    assert view_columns(client) == [*(f"metrics.`{SECTION}/{name}`" for name in expected), "tags.`penstock.rounds`"]


def test_results_of_a_run_without_commits_and_of_supervised_fine_tuning() -> None:
    index = RunCommits()
    assert describe_results(index) == "**Results:** none yet"
    for r in range(2):
        index.add(commit_key(f"runs/demo/steps/{r:06d}"), Commit(kind="step", index=r, summary={"train/loss": 2.0 - r}))
    assert describe_results(index) == "**Results:** 2 rounds, **loss 2.000 -> 1.000**"
