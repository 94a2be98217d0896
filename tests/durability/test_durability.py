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


def check_adapters(pipeline: Pipeline, rounds: int, mode: str) -> None:
    """Check that the engines applied each version's adapters, also those that restarted: log-probs of engine and
    trainer agree to 1e-5, although the policy differs from its base."""
    assert verdict(pipeline, mode)["replayed_rounds"] == rounds
    checkpoint = pipeline.store.committed(pipeline.keys.checkpoint_prefix(rounds))
    assert checkpoint is not None and checkpoint.state["lora"]["lora_rank"] == 4
    assert checkpoint.inputs["base"].startswith("models/")
    steps = [pipeline.store.committed(pipeline.keys.step_prefix(number)) for number in range(rounds)]
    metrics = [step.summary for step in steps if step is not None]
    if mode == "plain":  # otherwise older policies have generated some tokens
        assert max(metric["train/train_rollout_logprob_abs_diff"] for metric in metrics) < 1e-5
    assert metrics[-1]["train/kl_loss"] > 1e-6


def adapter_pipeline(world: World, rounds: int, mode: str) -> Pipeline:
    flags = ["--lora-rank", "4", "--lora-publish", "adapter", "--kl-loss-type", "low_var_kl"]
    return Pipeline(world, "adapters", str(world.root / "store"), [*tiny_flags(world, rounds, mode), *flags])


def test_killed_processes_of_a_run_with_adapters_are_restored(world: World) -> None:
    pipeline = adapter_pipeline(world, 4, "plain")
    schedule = [
        ("rollout-before-upload", "prefect"),
        ("train-mid-step", "tree"),
        ("publish-after", "ray"),
        ("adapter-loaded", "engine"),
    ]
    assert all(kill["num_killed"] for kill in kill_at(pipeline, schedule))
    assert pipeline.num_starts == 2, "only the whole tree needs another start"
    check_adapters(pipeline, 4, "plain")
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("kills", "mode", "rounds"),
    [
        (list(zip(ADAPTER_POINTS, cycle(("tree", "engine")))), "synchronous", ROUNDS),
        ([("adapter-loaded", "engine"), ("adapter-loaded", "tree")], "streaming", 5),
    ],
    ids=["boundaries of adapters", "streaming"],
)
def test_run_with_adapters_survives_kills(world: World, kills: list[tuple[str, str]], mode: str, rounds: int) -> None:
    world.start_prefect()
    pipeline = adapter_pipeline(world, rounds, mode)
    assert sum(kill["num_killed"] > 0 for kill in kill_at(pipeline, kills)) >= len(kills) - 1
    check_adapters(pipeline, rounds, mode)


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
