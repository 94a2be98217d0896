"""Kills of a run whose two trainer ranks take turns with two engines on the same devices (`--colocate`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import GPU_MODEL, GPU_OPTIONS, Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = pytest.mark.timeout(1800)

FLAGS = [
    *("--colocate", "--actor-num-gpus-per-node", "2", "--num-engines", "2"),
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
]
SWITCHES = (  # failpoints of a round, in order
    "rollout-before-upload",
    "engines-released",
    "train-mid-step",
    "trainer-offloaded",
    "publish-before",
    "engines-without-cache",
)


@pytest.mark.integration
def test_kill_of_an_offloaded_trainer_in_a_colocated_run(world: World) -> None:
    check_kills(world, FLAGS, 2, [("trainer-offloaded", "trainer")])


@pytest.mark.integration
@pytest.mark.full
def test_kills_at_each_switch_of_memory_in_a_colocated_run(world: World) -> None:
    world.start_prefect()
    targets = ("engine", "trainer", "engine", "trainer", "tree", "engine")
    check_kills(world, FLAGS, 4, list(zip(SWITCHES, targets)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("first", [0, 1, 2])
def test_kills_at_each_switch_of_memory_on_two_gpus(first: int, tmp_path: Path) -> None:
    """Together, the three runs kill each target at each switch; in one run the targets alternate, because a killed one
    may start only after the next switch."""
    flags = [*FLAGS, "--params-dtype", "bf16", *GPU_OPTIONS]
    targets = ("driver", "trainer", "engine")
    schedule = [(point, targets[(first + number) % 3]) for number, point in enumerate(SWITCHES)]
    if schedule[1][1] == "trainer":
        schedule.append(schedule.pop(1))  # in round 2: in round 1 no trainer is running when the engines are released
    with World(tmp_path, **GPU_MODEL) as world:
        world.start_prefect()
        check_kills(world, flags, 3, schedule, gap=0.02)


def check_kills(
    world: World, flags: list[str], num_rollouts: int, schedule: list[tuple[str, str]], gap: float = 1e-4
) -> None:
    """Kill a colocated run by the schedule; check its store, replay, engine weights and memory switches.

    Args:
        gap: limit of the mean difference of the log-probs of trainer and engines in each round.
    """
    flags = [*tiny_flags(world, num_rollouts), *flags]
    for flag in ("--over-sampling-batch-size", "12", "--partial-rollout"):  # both train tokens of an older policy,
        flags.remove(flag)  # whose log-probs differ from the trainer's even if the engine weights are right
    pipeline = Pipeline(world, "turns", str(world.root / "store"), flags)
    kills = kill_at(pipeline, schedule)
    assert all(kill["num_killed"] for kill in kills)
    assert verdict(pipeline)["replayed_rounds"] == num_rollouts
    for rollout_id in range(num_rollouts):
        step = pipeline.store.committed(pipeline.keys.step_prefix(rollout_id))
        assert step is not None and step.summary["train/train_rollout_logprob_abs_diff"] < gap
    check_turns(Path(pipeline.store.path("runs/turns/logs")))


def check_turns(logs: Path) -> None:
    """Check in each engine's log of requests that memory is released and resumed in turn, and that the last publish
    allocated weights before and the KV cache after the weights were loaded."""
    routes = "release_memory_occupation|resume_memory_occupation|update_weights_from_tensor|continue_generation"
    turns = []
    for log in logs.glob("sglang-*.log"):
        calls = re.findall(rf"POST /({routes}) HTTP/1.1\" 200", log.read_text(errors="replace"))
        text = " ".join(call.split("_")[0] for call in calls)
        assert "release release" not in text, text
        # weights resumed, loaded in buckets, KV cache resumed, generation continued, and released for the next round
        turns += re.findall(r"release resume(?: update)+ resume continue release", text)
    assert turns
