"""A run on two Ray nodes of one machine, with a trainer rank and an engine on each and an object store: the second node
dies in the middle of a round and is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import GPU_MODEL, GPU_OPTIONS, Pipeline, World, command, kill, tiny_flags
from matrix import verdict

pytestmark = pytest.mark.timeout(1800)

ROUNDS = 3
TITLES = ("sglang::scheduler", "ray::TrainActor")
DEADLINE = 300.0  # a run hangs, on any machine
FLAGS = ("--actor-num-nodes", "2", "--num-engines", "2")


def wait_until(reached: Callable[[], bool], pipeline: Pipeline) -> None:
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline and pipeline.returncode() is None, pipeline.tail()
        time.sleep(0.1)


@pytest.mark.integration
def test_a_run_continues_when_its_killed_node_is_back(world: World) -> None:
    check_killed_node(world, "rollout-before-upload", ["--use-router"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("engine_gpus", ["1", "2"])
def test_a_run_on_two_nodes_of_one_gpu_continues_when_its_killed_node_is_back(tmp_path: Path, engine_gpus: str) -> None:
    """With an engine on each GPU, and with one engine over both nodes."""
    further = ["--rollout-num-gpus-per-engine", engine_gpus, "--sglang-mem-fraction-static", "0.3", *GPU_OPTIONS]
    with World(tmp_path, **GPU_MODEL) as world:
        check_killed_node(world, "train-mid-step", further, str(tmp_path / "store"))


def check_killed_node(world: World, point: str, further: list[str], store: str = "s3://bucket/store") -> None:
    """Kill the second node at `point` of the second round or later, start it again, and check the finished run."""
    options = world.start_s3() if store.startswith("s3:") else None
    world.start_prefect()
    address = world.start_ray(CUDA_VISIBLE_DEVICES="0")
    world.start_node(address)
    flags = [*tiny_flags(world, ROUNDS), *FLAGS, *further]
    pipeline = Pipeline(world, "nodes", store, flags, options, ray_address=address)
    pipeline.start()
    wait_until(lambda: pipeline.store.committed(pipeline.keys.step_prefix(0)) is not None, pipeline)
    pipeline.arm(point)
    wait_until(partial(pipeline.is_at, point), pipeline)
    before = pipeline.commits()
    doomed = [process for process in world.family("node") if command(process).startswith(TITLES)]
    assert len(doomed) == 2, "a trainer rank and an engine are on each node"
    servers = [words for words in map(command, world.family("node")) if "sglang/launch.py" in words]
    assert any("--host 127.0.0.2 " in words or "--node-rank 1" in words for words in servers), servers

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
