"""Kills of runs that generate while they train: rollouts ahead of the trainer, and a stream with weight updates in
flight. matrix.py with `--mode` does all targets, boundaries and stores."""

from __future__ import annotations

from datetime import datetime

import pytest
from harness import MODES, Pipeline, World, points_of, tiny_flags
from matrix import ROUNDS, kill_at, one_run, verdict
from soak import soak

from penstock.storage.commit import Commit
from penstock.storage.history.costs import compute_costs
from penstock.storage.history.run_record import read_starts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

SHORT = 4  # rounds
FULL = pytest.mark.full
SYNCHRONOUS = ("convert-writing", "eval-generating", "checkpoint-saving", "export-writing")


def async_pipeline(world: World, mode: str, rounds: int) -> Pipeline:
    return Pipeline(world, mode, str(world.root / "store"), tiny_flags(world, rounds, mode))


def check_overlap(pipeline: Pipeline, mode: str) -> None:
    """Check that rollouts were generated with earlier policies than the newest, so while the trainer worked."""
    committed = (pipeline.store.committed(pipeline.keys.rollout_prefix(number)) for number in range(SHORT))
    rollouts = [rollout for rollout in committed if rollout is not None]
    assert len(rollouts) == SHORT
    staleness = [rollout.summary["rollout/staleness/max"] for rollout in rollouts]
    assert any(staleness), "no rollout was ahead of the trainer"
    for rollout in rollouts:
        assert rollout.state["max_staleness"] == MODES[mode][1]
        assert rollout.state.get("updates_in_flight", False) == (mode == "streaming")
        assert rollout.index - MODES[mode][1] <= rollout.policy_version <= rollout.index


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("ahead", [("train-mid-step", "tree")]),
        ("streaming", [("publish-in-flight", "trainer")]),
        pytest.param("streaming", [("train-mid-step", "tree"), ("publish-in-flight", "trainer")], marks=FULL),
    ],
    ids=["ahead", "streaming", "streaming, two kills"],
)
def test_killed_asynchronous_run_trains_each_sample_once(
    world: World, mode: str, schedule: list[tuple[str, str]]
) -> None:
    world.start_prefect()
    pipeline = async_pipeline(world, mode, SHORT)
    kills = kill_at(pipeline, schedule)
    assert all(kill["num_killed"] for kill in kills)
    num_starts = 1 + sum(target == "tree" for _, target in schedule)
    assert pipeline.num_starts == num_starts, "a killed trainer is replaced in the run"
    results = verdict(pipeline, mode)
    assert results["replayed_rounds"] == SHORT and results["num_samples"] == SHORT * 8 * 4
    check_overlap(pipeline, mode)
    check_prefect_pages(world, num_starts)
    check_costs(world, pipeline)


def check_costs(world: World, pipeline: Pipeline) -> None:
    """Check that stages and idle time of each device add up to the time of the drivers, and that this time and that of
    the trainer's stages agree with what Prefect has measured."""
    costs = compute_costs(pipeline.store, pipeline.keys)
    assert {"trainer", "engines"} == set(costs.device_seconds)
    for devices, stages in costs.device_seconds.items():
        wall = costs.num_devices[devices] * costs.wall_seconds
        assert abs(sum(stages.values()) - wall) <= 0.02 * wall and min(stages.values()) >= 0
    last = next(run for run in world.ask_prefect("flow_runs", sort="START_TIME_DESC") if "replay" not in run["name"])
    tasks = world.ask_prefect("task_runs", flow_runs={"id": {"any_": [last["id"]]}})
    start, end = read_starts(pipeline.store, pipeline.keys)[-1]
    assert end is not None
    at = {name: datetime.fromisoformat(last[name]).timestamp() for name in ("start_time", "end_time")}
    times = [datetime.fromisoformat(task[name]).timestamp() for task in tasks for name in ("start_time", "end_time")]
    assert at["start_time"] <= start.at <= min(times) and max(times) <= end.at <= at["end_time"]
    trained = [f"train-{r:06d}" for r in range(SHORT) if _step(pipeline, r).created_at > start.at]
    measured = sum(task["total_run_time"] for task in tasks if task["name"] in trained)
    committed = sum(sum(_step(pipeline, int(name[-6:])).seconds.values()) for name in trained)
    assert 0 < committed <= measured


def _step(pipeline: Pipeline, rollout_id: int) -> Commit:
    commit = pipeline.store.committed(pipeline.keys.step_prefix(rollout_id))
    assert commit is not None
    return commit


def check_prefect_pages(world: World, num_starts: int) -> None:
    """Check that no flow run or task run is left as running, that final states say what was done, and that the arrows
    connect all stages of a start."""
    flow_runs = world.ask_prefect("flow_runs", sort="START_TIME_ASC")
    *killed, last = [run for run in flow_runs if run["name"] != "replay" and "replay-" not in run["name"]]
    assert len(killed) == num_starts - 1
    for run in killed:
        assert run["state_name"] == "Crashed" and last["id"] in run["state"]["message"], run["state"]
    assert last["state_type"] == "COMPLETED" and f"to {SHORT - 1}" in last["state"]["message"], last["state"]
    assert last["state_name"] == "Completed" and ", reward " in last["name"]
    for run in (*killed, last):
        tasks = world.ask_prefect("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
        assert {task["state_type"] for task in tasks} <= {"COMPLETED", "CRASHED", "FAILED"}
        silent = [task["name"] for task in tasks if task["state_type"] == "COMPLETED" and not task["state"]["message"]]
        assert not silent, f"{run['name']} has tasks whose final state says nothing: {silent}"
        inputs = {t["id"]: {i["id"] for group in t["task_inputs"].values() for i in group} for t in tasks}
        names = {task["id"]: task["name"] for task in tasks}
        for task, needed in inputs.items():
            kind, _, number = names[task].rpartition("-")
            if kind == "train":
                before = f"train-{int(number) - 1:06d}"
                expected = {f"rollout-{number}", before if before in names.values() else "restore"}
                assert expected <= {names[id] for id in needed} <= expected | {f"checkpoint-{number}"}
            elif kind == "export":
                assert {names[id] for id in needed} == {f"checkpoint-{number}"}
        [first] = [task for task, needed in inputs.items() if not needed]
        reached = {first}
        while more := {task for task, needed in inputs.items() if needed & reached} - reached:
            reached |= more
        assert reached == set(inputs), [task["name"] for task in tasks if task["id"] not in reached]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "store"), [("ahead", "local"), ("streaming", "s3")])
def test_asynchronous_run_killed_at_its_boundaries_loses_nothing(world: World, mode: str, store: str) -> None:
    """Boundaries of stages that run as in a synchronous run are left to test_every_boundary.py."""
    targets = ("trainer", "engine", "tree", "trainer", "engine", "driver")
    points = [point for point in points_of(mode) if point not in SYNCHRONOUS]
    result = one_run(world, store, targets, points, mode)
    assert sum(kill["num_killed"] > 0 for kill in result["kills"]) >= len(points) - 1, result["kills"]
    assert result["verdict"]["replayed_rounds"] == ROUNDS[mode]
    assert result["verdict"]["num_samples"] == ROUNDS[mode] * 8 * 4


@pytest.mark.full
def test_asynchronous_run_killed_at_random_times_loses_nothing(world: World) -> None:
    """The short form of soak.py, which uses a model that learns and a longer outage. Synchronous runs are killed at
    random times by test_pairs.py."""
    mode, rounds = "streaming", 6
    world.start_prefect()
    pipeline = async_pipeline(world, mode, rounds)
    killed = soak(pipeline, rounds, probability=0.7, seed=3, outage=5)
    assert sum(killed.values()) >= 2, killed
    *crashed, last = world.flow_states()
    assert last == "Completed" and len(crashed) == pipeline.num_starts - 1
    results = verdict(pipeline, mode)
    assert results["replayed_rounds"] == rounds and results["num_samples"] == rounds * 8 * 4
