"""Kills of the processes of a run, also of one with adapters and of one with the engine of a teacher."""

from __future__ import annotations

import sqlite3
from itertools import cycle

import pytest
from harness import ROUNDS, Pipeline, World, tiny_flags
from matrix import kill_at, verdict

from penstock.flows.commands.demo_model import make_tiny_model
from penstock.storage.samples.shards import read_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def test_processes_of_a_killed_driver_end_and_are_restored(world: World) -> None:
    pipeline = Pipeline(world, "owned", str(world.root / "store"), tiny_flags(world, rounds=3))
    schedule = [("rollout-before-upload", "prefect"), ("train-mid-step", "tree"), ("publish-after", "ray")]
    kills = kill_at(pipeline, schedule)
    assert all(kill["num_killed"] for kill in kills)
    assert pipeline.num_starts == 2, "only the whole tree needs another start"
    assert verdict(pipeline)["replayed_rounds"] == 3
    with sqlite3.connect(f"file:{pipeline.store.path('mlflow/mlflow.db')}?mode=ro", uri=True) as database:
        points = database.execute("select key, step, count(*) from metrics group by run_uuid, key, step").fetchall()
    assert ("perf/update_weights_time", 0, 1) in points, "published again after faults, logged once"
    assert [point for point in points if point[2] > 1] == []


ADAPTER_POINTS = (  # where adapters are trained, loaded, saved or exported; the others do the same as without
    "train-mid-step",
    "publish-after",
    "adapter-loaded",
    "checkpoint-saving",
    "checkpoint-before-commit",
    "export-writing",
)


@pytest.mark.parametrize(
    ("kills", "mode"),
    [
        ([("adapter-loaded", "engine"), ("checkpoint-before-commit", "tree")], "plain"),
        pytest.param(list(zip(ADAPTER_POINTS, cycle(("tree", "engine")))), "synchronous", marks=pytest.mark.full),
        pytest.param([("adapter-loaded", "engine"), ("adapter-loaded", "tree")], "streaming", marks=pytest.mark.full),
    ],
    ids=["two kills", "boundaries of adapters", "streaming"],
)
def test_run_with_adapters_survives_kills(world: World, kills: list[tuple[str, str]], mode: str) -> None:
    """The engines apply each version's adapters, also those that restart: log-probs of engine and trainer agree to
    1e-5, although the policy differs from its base."""
    rounds = ROUNDS if len(kills) > 2 else 5 if mode == "streaming" else 3
    flags = [*tiny_flags(world, rounds, mode), "--lora-rank", "4", "--lora-publish", "adapter"]
    flags += ["--kl-loss-type", "low_var_kl"]
    world.start_prefect()
    pipeline = Pipeline(world, "adapters", str(world.root / "store"), flags)
    assert sum(kill["num_killed"] > 0 for kill in kill_at(pipeline, kills)) >= len(kills) - 1
    assert verdict(pipeline, mode)["replayed_rounds"] == rounds
    checkpoint = pipeline.store.committed(pipeline.keys.checkpoint_prefix(rounds))
    assert checkpoint is not None and checkpoint.state["lora"]["lora_rank"] == 4
    assert checkpoint.inputs["base"].startswith("models/")
    steps = [pipeline.store.committed(pipeline.keys.step_prefix(number)) for number in range(rounds)]
    metrics = [step.summary for step in steps if step is not None]
    if mode == "plain":  # otherwise older policies have generated some tokens
        assert max(metric["train/train_rollout_logprob_abs_diff"] for metric in metrics) < 1e-5
    assert metrics[-1]["train/kl_loss"] > 1e-6


@pytest.mark.full
def test_run_with_the_engine_of_a_teacher_survives_kills(world: World) -> None:
    teacher = make_tiny_model(world.root / "teacher", seed=1)
    flags = [*tiny_flags(world, rounds=3), "--opd-teacher-engine", str(teacher)]
    world.start_prefect()
    pipeline = Pipeline(world, "taught", str(world.root / "store"), flags)
    kills = kill_at(pipeline, [("train-mid-step", "tree"), ("publish-after", "teacher")])
    assert all(kill["num_killed"] for kill in kills)
    assert verdict(pipeline)["replayed_rounds"] == 3
    for number in range(3):
        commit = pipeline.store.committed(pipeline.keys.rollout_prefix(number))
        assert commit is not None
        for sample in read_samples(pipeline.store, commit):
            assert not any(sample.loss_mask) or sample.teacher_logprobs is not None
