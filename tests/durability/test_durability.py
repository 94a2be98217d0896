"""The promise, in short form: killed at every boundary and asked to stop, a run loses nothing and does nothing twice.

The full matrix is matrix.py, the soak is soak.py; these tests are the same code with fewer kills.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.shards import read_samples

sys.path.insert(0, str(Path(__file__).parent))
from harness import Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = pytest.mark.integration


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def test_every_boundary_on_a_faulty_object_store_with_actors_that_outlive_the_driver(world: World) -> None:
    driver = "driver, standing Ray"
    world.start_prefect()
    world.start_mlflow()
    options = world.start_s3(faults=0.05)
    pipeline = Pipeline(world, "faulty", "s3://bucket/store", tiny_flags(world), options, world.start_ray())
    schedule = [
        ("convert-writing", "trainer"),
        ("eval-generating", "engine"),
        ("rollout-before-upload", driver),
        ("rollout-after-upload", "trainer"),
        ("rollout-after-commit", "mlflow"),
        ("train-mid-step", "trainer"),
        ("publish-before", driver),
        ("publish-after", "trainer"),
        ("checkpoint-saving", driver),
        ("checkpoint-before-commit", "trainer"),
        ("export-writing", driver),
    ]
    kills = kill_at(pipeline, schedule)
    assert all(kill["num_killed"] for kill in kills)
    assert pipeline.num_starts == 1 + sum(target == driver for _, target in schedule), (
        "others than the driver are replaced in the run"
    )
    found = verdict(pipeline)
    assert found["replayed_rounds"] == 4 and found["num_samples"] == 4 * 8 * 4 and found["num_prompts"] == 32
    injected = world.injected()
    assert sum(injected.values()) - injected["calls"] > 20


def test_what_the_driver_owns_dies_with_it_and_comes_back(world: World) -> None:
    pipeline = Pipeline(world, "owned", str(world.root / "store"), tiny_flags(world))
    kills = kill_at(pipeline, [("rollout-before-upload", "prefect"), ("train-mid-step", "tree"), ("publish-after", "ray")])
    assert all(kill["num_killed"] for kill in kills)
    assert pipeline.num_starts == 2, "only the whole tree needs another start"
    assert verdict(pipeline)["replayed_rounds"] == 4


def test_asked_to_stop_it_keeps_what_is_finished_and_goes_on_from_there(world: World) -> None:
    """SIGTERM in mid-rollout: finished groups are journalled, the exit code says "stopped", and the next start generates only the rest."""
    world.start_prefect()
    flags = [*tiny_flags(world), "--rollout-max-response-len", "200", "--sglang-max-running-requests", "4", "--grace-period", "2"]
    pipeline = Pipeline(world, "stopped", str(world.root / "store"), flags)
    first = pipeline.keys.rollout(1)
    journal = f"{first}.journal"
    pipeline.run_until(lambda: any(name.endswith(".commit.json") for name in pipeline.store.list(journal)))
    asked = time.monotonic()
    os.kill(pipeline.pid, signal.SIGTERM)
    assert pipeline.wait() == 143, pipeline.tail()
    assert time.monotonic() - asked < 15
    assert "the same command goes on" in pipeline.tail()
    assert pipeline.store.committed(first) is None, "the rollout was over before the signal; make it longer"
    pipeline.run_until(lambda: False)
    commit = pipeline.store.committed(first)
    assert commit is not None and 0 < len(commit.state["adopted_groups"]) <= 8
    samples = read_samples(pipeline.store, commit)
    assert len({sample.sample_id for sample in samples}) == 8 * 4
    pipeline.check()
    command = [sys.executable, "-m", "prefect", "flow-run", "ls"]
    environment = {**world.environment, "COLUMNS": "200"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.upper()
    assert "CRASHED" in shown and "COMPLETED" in shown
