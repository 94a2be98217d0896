"""The short form of the kill matrix (matrix.py): every boundary of a run once, several targets in turn."""

from __future__ import annotations

import pytest
from harness import POINTS, ROUNDS, Pipeline, World, tiny_flags
from matrix import kill_at, one_run, verdict

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3600)]


def test_kills_at_every_boundary_on_a_faulty_object_store_with_detached_actors(world: World) -> None:
    driver, num_rounds = "driver, standing Ray", 4
    world.start_prefect()
    world.start_mlflow()
    options = world.start_s3(faults=0.05)
    pipeline = Pipeline(world, "faulty", "s3://bucket/store", tiny_flags(world, num_rounds), options, world.start_ray())
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
    num_drivers = sum(target == driver for _, target in schedule)
    assert pipeline.num_starts == 1 + num_drivers, "other targets are replaced in the run"
    results = verdict(pipeline)
    numbers = [results[name] for name in ("replayed_rounds", "num_samples", "num_prompts")]
    assert numbers == [num_rounds, num_rounds * 8 * 4, num_rounds * 8]
    injected = world.injected()
    assert sum(injected.values()) - injected["calls"] > 20


def test_kills_at_every_boundary_lose_nothing(world: World) -> None:
    result = one_run(world, "local", ("tree", "engine", "prefect", "ray"), POINTS)
    assert sum(kill["num_killed"] > 0 for kill in result["kills"]) >= len(POINTS) - 1, result["kills"]
    assert result["verdict"]["replayed_rounds"] == ROUNDS
