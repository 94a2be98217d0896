"""A shortened demo with the real engines and flows: the model learns."""

import json
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient
from penstock_command import penstock

from penstock.flows.cli import main
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.history.costs import compute_costs
from penstock.storage.history.lineage_graph import read_lineage
from penstock.storage.history.run_record import read_starts
from penstock.storage.store import Store
from tests.storage.mlflow_content import check_content

pytestmark = pytest.mark.integration

ROUNDS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """The store and what the terminal showed."""
    directory = tmp_path_factory.mktemp("demo")
    result = penstock("demo", "--directory", str(directory), "--num-rollout", str(ROUNDS))
    return Store(str(directory / "store")), result.stdout


def commits(store: Store, prefix: str) -> list[Commit]:
    return [commit for index in store.committed_indices(prefix) if (commit := store.committed(f"{prefix}/{index:06d}"))]


def test_demo_learns(finished: tuple[Store, str]) -> None:
    store, _ = finished
    keys = RunKeys("demo-grpo-seed0")
    rewards = [commit.summary["rollout/raw_reward"] for commit in commits(store, f"{keys.prefix}/rollouts")]
    assert len(rewards) == ROUNDS and rewards[0] < 0.5 and sum(rewards[-3:]) / 3 > rewards[0] + 0.2
    before, after = (store.committed(keys.eval_prefix(version, "heldout")) for version in (0, ROUNDS))
    assert before and after and after.summary["eval/heldout"] - before.summary["eval/heldout"] >= 0.3


def test_trainer_and_engine_agree_in_every_round(finished: tuple[Store, str], agrees) -> None:
    agrees(finished[0], RunKeys("demo-grpo-seed0"), num_rounds=ROUNDS, gap=1e-4)


def test_mlflow_has_every_point_and_the_lineage(finished: tuple[Store, str]) -> None:
    store, _ = finished
    client = MlflowClient(f"sqlite:///{store.path('mlflow/mlflow.db')}")
    [experiment] = client.search_experiments(filter_string="name = 'penstock'")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    history = client.get_metric_history(runs["demo-grpo-seed0"].info.run_id, "rollout/raw_reward")
    assert [point.step for point in sorted(history, key=lambda point: point.step)] == list(range(ROUNDS))
    trained = client.get_run(
        next(run.info.run_id for name, run in runs.items() if name.startswith("train-") and run.inputs.dataset_inputs)
    )
    assert trained.inputs.dataset_inputs and trained.outputs.model_outputs, "shards in, checkpoint out"


def test_mlflow_has_every_artifact_once_with_the_lineage_of_the_commits(
    finished: tuple[Store, str], tmp_path: Path
) -> None:
    store, _ = finished
    live, fresh = store.path("mlflow/mlflow.db"), str(tmp_path / "fresh.db")
    check_content(MlflowClient(f"sqlite:///{live}"), read_lineage(store))
    where = ["--store", store.root]
    assert main(["report", "--all", "--to", "mlflow", "--tracking-uri", f"sqlite:///{fresh}", *where]) == 0
    check_content(MlflowClient(f"sqlite:///{fresh}"), read_lineage(store))
    before, after = points(live), points(fresh)
    missing = {name for _, name, *_ in before - after}
    outbox = Path(store.path("runs/demo-grpo-seed0/tracking/outbox.jsonl")).read_text().splitlines()
    lines = [line for line in map(json.loads, outbox) if line["type"] == "metrics"]
    not_in_commits = {name for line in lines if not line["key"].startswith("cost-") for name in line["metrics"]}
    assert after < before and missing <= not_in_commits

    assert main(["fork", "demo-grpo-seed0", "--at", str(ROUNDS), "--name", "fork", *where]) == 0
    assert main(["report", "fork", "--to", "mlflow", "--tracking-uri", f"sqlite:///{fresh}", *where]) == 0
    check_content(MlflowClient(f"sqlite:///{fresh}"), read_lineage(store))


def points(database: str) -> set[tuple]:
    """Return all points of metrics, except NaN: run, name, step, value, time."""
    query = "select name, key, step, value, timestamp from metrics join runs using (run_uuid) where not is_nan"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return set(connection.execute(query).fetchall())


def test_each_metric_has_one_point_a_step(finished: tuple[Store, str]) -> None:
    store, _ = finished
    with sqlite3.connect(f"file:{store.path('mlflow/mlflow.db')}?mode=ro", uri=True) as database:
        points = database.execute("select run_uuid, key, step, count(*) from metrics group by 1, 2, 3").fetchall()
    names = {key for _, key, _, _ in points}
    assert {"perf/rollout_time", "eval/heldout/perf/rollout_time", "perf/update_weights_time"} <= names
    assert [point for point in points if point[3] > 1 and not point[1].startswith("system/")] == []


def test_stages_and_idle_time_of_each_device_add_up_to_the_wall_time(finished: tuple[Store, str]) -> None:
    store, _ = finished
    keys = RunKeys("demo-grpo-seed0")
    costs = compute_costs(store, keys)
    [(start, end)] = read_starts(store, keys)
    assert end is not None and costs.wall_seconds == pytest.approx(end.at - start.at)
    assert store.committed(keys.export_prefix(ROUNDS)).created_at <= end.at
    for devices, stages in costs.device_seconds.items():
        assert sum(stages.values()) == pytest.approx(costs.num_devices[devices] * costs.wall_seconds, rel=0.02)
    rounds = [commits(store, f"{keys.prefix}/{kind}") for kind in ("rollouts", "steps")]
    rollout, training = (sum(sum(commit.seconds.values()) for commit in kind) for kind in rounds)
    assert costs.device_seconds["engines"]["rollout"] == pytest.approx(rollout, rel=0.02)
    assert costs.device_seconds["trainer"]["training"] == pytest.approx(training, rel=0.02)


def test_terminal_shows_rounds_and_results(finished: tuple[Store, str]) -> None:
    _, shown = finished
    assert f"round {ROUNDS - 1} ({ROUNDS}/{ROUNDS})  reward " in shown and "evaluated after 0 rounds: heldout" in shown
    assert "What the reward curve means" in shown and "penstock up" in shown and "Traceback" not in shown
