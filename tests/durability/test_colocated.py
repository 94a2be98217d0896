"""Kills of a run whose two trainer ranks take turns with two engines on the same devices (`--colocate`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

FLAGS = [
    *("--colocate", "--actor-num-gpus-per-node", "2", "--num-engines", "2"),
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
]


def test_kill_of_an_offloaded_trainer_in_a_colocated_run(world: World) -> None:
    check_kills(world, num_rollouts=2, schedule=[("trainer-offloaded", "trainer")])


@pytest.mark.full
def test_kills_at_each_switch_of_memory_in_a_colocated_run(world: World) -> None:
    check_kills(
        world,
        num_rollouts=4,
        schedule=[
            ("rollout-before-upload", "engine"),
            ("engines-released", "trainer"),
            ("train-mid-step", "engine"),
            ("trainer-offloaded", "trainer"),
            ("publish-before", "tree"),
            ("engines-without-cache", "engine"),
        ],
    )


def check_kills(world: World, num_rollouts: int, schedule: list[tuple[str, str]]) -> None:
    """Kill a colocated run by the schedule; check its store, replay, engine weights and memory switches."""
    flags = [*tiny_flags(world, num_rollouts), *FLAGS]
    for flag in ("--over-sampling-batch-size", "12", "--partial-rollout"):  # both train tokens of an older policy,
        flags.remove(flag)  # whose log-probs differ from the trainer's even if the engine weights are right
    pipeline = Pipeline(world, "turns", str(world.root / "store"), flags)
    kills = kill_at(pipeline, schedule)
    assert all(kill["num_killed"] for kill in kills)
    assert verdict(pipeline)["replayed_rounds"] == num_rollouts
    for rollout_id in range(num_rollouts):
        step = pipeline.store.committed(pipeline.keys.step_prefix(rollout_id))
        assert step is not None and step.summary["train/train_rollout_logprob_abs_diff"] < 1e-4
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
