"""The disk of the store fills up during a run, and space is freed minutes later."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import verdict


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("small_disk", ["256m"], indirect=True)
def test_a_run_waits_for_disk_space_and_resumes(world: World, small_disk: Path, fill: Callable[[Path], Path]) -> None:
    world.start_prefect()
    pipeline = Pipeline(world, "full", str(small_disk / "store"), tiny_flags(world, rounds=2))
    pipeline.arm("rollout-before-upload")
    assert pipeline.run_until(lambda: pipeline.is_at("rollout-before-upload"))
    filler = fill(small_disk)
    pipeline.release("rollout-before-upload")
    waiting = f"no room is left in {small_disk}"
    deadline = time.monotonic() + 300
    while waiting not in pipeline.tail(20_000).replace("\n", " "):
        assert pipeline.returncode() is None and time.monotonic() < deadline, pipeline.tail()
        time.sleep(0.1)
    assert shutil.disk_usage(small_disk).free < 1 << 20
    filler.unlink()
    pipeline.run_until(lambda: False)
    assert pipeline.num_starts == 1, pipeline.tail()
    assert verdict(pipeline)["replayed_rounds"] == 2
