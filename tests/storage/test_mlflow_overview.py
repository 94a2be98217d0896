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


def titles(commit: Commit, *before: tuple[str, Commit]) -> dict[str, float]:
    index = RunCommits()
    for key, other in before:
        index.add(key, other)
    points = overview_points(Committed("key", commit.created_at, commit), index)
    assert {(point.step, point.at) for point in points} <= {(commit.index, commit.created_at)}
    return {point.name.removeprefix(f"{SECTION}/"): point.value for point in points}


def test_main_metrics_come_first_and_costs_last_in_the_order_of_names() -> None:
    # Sections of the documented metrics, in a table's first column, except those that MLflow has a tab for.
    sections = {
        f"{name}/" for row in re.findall(r"^\| (`.*?)\|", METRICS, re.M) for name in re.findall(r"`(\w+)/", row)
    }
    others = sorted(sections - {"system/"})
    assert {"eval/", "rollout/", "train/"} < set(others)
    assert sorted([SECTION, *others])[0] == SECTION and others[-1] == "usage/"


def test_reward_length_and_speed_of_a_rollout() -> None:
    summary = {
        "rollout/raw_reward": 0.5,
        "rollout/response_len/mean": 3.0,
        "perf/tokens_per_gpu_per_sec": 9.0,
        "x": 1.0,
    }
    rollout = Commit(kind="rollout", index=7, created_at=1e9, summary=summary)
    assert titles(rollout) == {"1 reward": 0.5, "7 response length": 3.0, "3 tokens per second": 9.0}


@pytest.mark.parametrize("extra", [{}, {"train/kl_loss": 0.25}])
def test_kl_of_the_reference_model_else_of_the_old_policy(extra: dict[str, float]) -> None:
    summary = {"train/ppo_kl": 0.5, "train/entropy_loss": 2.0, "train/loss": 1.0, **extra}
    step = Commit(kind="step", created_at=1e9, summary=summary)
    assert titles(step) == {"4 KL": extra.get("train/kl_loss", 0.5), "6 entropy": 2.0}


def test_loss_and_speed_of_training_on_demonstrations() -> None:
    step = Commit(kind="step", created_at=1e9, summary={"train/loss": 1.5, "perf/actor_train_tok_per_s": 9.0})
    demonstrations = Commit(kind="rollout", policy_version=-1, created_at=1e9)
    assert titles(step, ("runs/demo/rollouts/000000.commit.json", demonstrations)) == {
        "1 loss": 1.5,
        "3 tokens per second": 9.0,
    }
    assert titles(step) == {}


def test_an_evaluation_is_shown_but_not_one_that_graded_old_samples_again() -> None:
    commit = Commit(kind="eval", created_at=1e9, summary={"eval/aime": 0.5, "eval/aime-pass@4": 0.75})
    assert titles(commit) == {"2 evaluation aime": 0.5}
    assert titles(commit.model_copy(update={"inputs": {"samples": "runs/demo/evals/000002/aime"}})) == {}


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


def test_the_view_has_columns_for_the_evaluations_of_all_runs(database: Path, tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{database}")
    track(tmp_path / "one", database, commits())
    expected = ["1 reward", "2 evaluation heldout", "3 tokens per second"]
    assert view_columns(client) == [*(f"metrics.`{SECTION}/{name}`" for name in expected), "tags.`penstock.rounds`"]
    other = commits()[-1][1].model_copy(update={"summary": {"eval/a@b": 0.5}})
    track(tmp_path / "two", database, [("runs/demo/evals/000004/a@b.commit.json", other)])
    expected.insert(1, "2 evaluation a_at_b")
    assert view_columns(client) == [*(f"metrics.`{SECTION}/{name}`" for name in expected), "tags.`penstock.rounds`"]


def test_the_description_begins_with_the_results_so_far_and_links_below_the_users_text(
    database: Path, tmp_path: Path
) -> None:
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


def test_a_conversion_is_a_child_of_the_first_run_that_starts_from_its_model(database: Path, tmp_path: Path) -> None:
    track(tmp_path / "out", database, commits())
    runs = {run.info.run_name: run for run in MlflowClient(f"sqlite:///{database}").search_runs(["1"])}
    top = [name for name, run in runs.items() if "mlflow.parentRunId" not in run.data.tags]
    assert top == ["demo"] and "convert-f00d" in runs


def test_results_of_a_run_without_commits_and_of_supervised_fine_tuning() -> None:
    index = RunCommits()
    assert describe_results(index) == "**Results:** none yet"
    for r in range(2):
        index.add(commit_key(f"runs/demo/steps/{r:06d}"), Commit(kind="step", index=r, summary={"train/loss": 2.0 - r}))
    assert describe_results(index) == "**Results:** 2 rounds, **loss 2.000 -> 1.000**"
