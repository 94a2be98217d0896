"""Two faults within seconds: the second one occurs while the run recovers from the first."""

from __future__ import annotations

import random

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import verdict
from pairs import PATIENCE, SLOW, Progress, one_pair

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3600)]


def test_a_run_completes_after_ray_dies_during_an_engine_restart(world: World) -> None:
    """Regression test: while waiting for the new engine, the death of Ray was not noticed for up to 22 minutes."""
    world.start_prefect()
    pipeline = Pipeline(world, "twice", str(world.root / "store"), [*tiny_flags(world, rounds=2), *SLOW])
    journal = f"{pipeline.keys.rollout_prefix(0)}.journal"
    assert pipeline.run_until(lambda: bool(pipeline.store.list(journal))), "the run is generating"
    [first] = pipeline.victims("engine")
    assert pipeline.strike("engine")
    assert pipeline.run_until(lambda: any(process != first for process in pipeline.victims("engine"))), (
        "the replacement starts"
    )
    assert pipeline.strike("runtime-env-agent") == 1
    pipeline.run_until(lambda: False, timeout=PATIENCE)
    assert pipeline.num_starts == 1, pipeline.tail()
    assert verdict(pipeline)["replayed_rounds"] == 2


def test_random_pairs_of_faults_lose_nothing(world: World) -> None:
    """The short form of pairs.py, which has more seeds."""
    rounds, rng = 5, random.Random(100)
    pipeline = Pipeline(world, "paired", str(world.root / "store"), [*tiny_flags(world, rounds), *SLOW])
    progress = Progress(pipeline)
    pairs = [one_pair(pipeline, progress, rng) for _ in range(3)]
    assert sum(all(pair["killed"]) for pair in pairs) >= 1, pairs
    pipeline.run_until(lambda: progress.look() < 0, timeout=4 * PATIENCE)
    assert verdict(pipeline)["replayed_rounds"] == rounds
