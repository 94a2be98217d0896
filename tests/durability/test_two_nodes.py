"""A run on two Ray nodes of one machine, with a trainer rank and an engine on each and an object store: the second node
dies in the middle of a round and is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
from harness import Pipeline, World, command, kill, tiny_flags
from matrix import verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ROUNDS = 3
TITLES = ("sglang::scheduler", "ray::TrainActor")
DEADLINE = 300.0  # a run hangs, on any machine


def wait_until(reached: Callable[[], bool], pipeline: Pipeline) -> None:
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline and pipeline.returncode() is None, pipeline.tail()
        time.sleep(0.1)


@pytest.mark.parametrize("point", ["rollout-before-upload", pytest.param("train-mid-step", marks=pytest.mark.full)])
def test_a_run_continues_when_its_killed_node_is_back(world: World, point: str) -> None:
    options = world.start_s3()
    world.start_prefect()
    address = world.start_ray()
    world.start_node(address)
    flags = [*tiny_flags(world, ROUNDS), "--actor-num-nodes", "2", "--num-engines", "2"]
    pipeline = Pipeline(world, "nodes", "s3://bucket/store", flags, options, ray_address=address)
    pipeline.start()
    wait_until(lambda: pipeline.store.committed(pipeline.keys.step_prefix(0)) is not None, pipeline)
    pipeline.arm(point)
    wait_until(partial(pipeline.is_at, point), pipeline)
    before = pipeline.commits()
    doomed = [process for process in world.family("node") if command(process).startswith(TITLES)]
    assert len(doomed) == 2, "a trainer rank and an engine are on each node"

    kill(world.raylets_of_node())
    pipeline.release(point)
    wait_until(lambda: "waiting up to 600 s" in pipeline.tail(100_000), pipeline)
    wait_until(lambda: not any(map(command, doomed)), pipeline)
    world.start_node(address)

    assert pipeline.wait() == 0, pipeline.tail()
    after = {**before, **pipeline.commits()}  # --keep-checkpoints has removed the first
    assert {key: after[key] for key in before} == before
    assert pipeline.num_starts == 1, "the driver has survived"
    found = verdict(pipeline)
    assert found["replayed_rounds"] == ROUNDS and found["num_samples"] == ROUNDS * 8 * 4
