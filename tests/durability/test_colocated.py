"""Kills of a run whose two trainer ranks take turns with two engines on the same devices (`--colocate`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]

ROUNDS = 4
FLAGS = [
    *("--colocate", "--actor-num-gpus-per-node", "2", "--num-engines", "2"),
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
]


def test_kills_while_trainer_and_engines_take_turns(world: World) -> None:
    pipeline = Pipeline(world, "turns", str(world.root / "store"), [*tiny_flags(world, ROUNDS), *FLAGS])
    kills = kill_at(
        pipeline,
        [
            ("rollout-before-upload", "engine"),
            ("engines-released", "trainer"),
            ("train-mid-step", "engine"),
            ("trainer-offloaded", "trainer"),
            ("publish-before", "tree"),
            ("engines-without-cache", "engine"),
        ],
    )
    assert all(kill["num_killed"] for kill in kills)
    assert verdict(pipeline)["replayed_rounds"] == ROUNDS
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
