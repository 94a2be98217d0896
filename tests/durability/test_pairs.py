"""Two faults within seconds: the second one finds the run while it recovers from the first."""

from __future__ import annotations

import random

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import verdict
from pairs import PATIENCE, SLOW, Progress, one_pair


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_our_ray_dies_while_a_replacement_engine_starts_and_the_run_completes(world: World) -> None:
    """The hang of issue 11, item 17: nobody asked whether Ray lived while the new engine was waited for, for up to 22 minutes."""
    pipeline = Pipeline(world, "twice", str(world.root / "store"), [*tiny_flags(world, rounds=2), *SLOW])
    journal = f"{pipeline.keys.rollout(0)}.journal"
    assert pipeline.run_until(lambda: bool(pipeline.store.list(journal))), "it generates"
    [first] = pipeline.victims("engine")
    assert pipeline.strike("engine")
    assert pipeline.run_until(lambda: any(process != first for process in pipeline.victims("engine"))), "the replacement starts"
    assert pipeline.strike("runtime-env-agent") == 1
    pipeline.run_until(lambda: False, timeout=PATIENCE)
    assert pipeline.num_starts == 1, pipeline.tail()
    assert verdict(pipeline)["replayed_rounds"] == 2


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [100, 101])
def test_random_pairs_of_faults_lose_nothing(world: World, seed: int) -> None:
    """pairs.py in short form."""
    rounds, rng = 5, random.Random(seed)
    pipeline = Pipeline(world, "paired", str(world.root / "store"), [*tiny_flags(world, rounds), *SLOW])
    progress = Progress(pipeline)
    pairs = [one_pair(pipeline, progress, rng) for _ in range(3)]
    assert sum(all(pair["killed"]) for pair in pairs) >= 1, pairs
    pipeline.run_until(lambda: progress.look() < 0, timeout=4 * PATIENCE)
    assert verdict(pipeline)["replayed_rounds"] == rounds
