"""The short form of the kill matrix (matrix.py): every boundary once, every target at least once."""

from __future__ import annotations

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import kill_at, verdict

ROUNDS = 4


@pytest.mark.integration
@pytest.mark.full
def test_kills_at_every_boundary_on_a_faulty_object_store_with_detached_actors(world: World) -> None:
    driver = "driver, standing Ray"
    world.start_prefect()
    world.start_mlflow()
    options = world.start_s3(faults=0.05)
    pipeline = Pipeline(world, "faulty", "s3://bucket/store", tiny_flags(world, ROUNDS), options, world.start_ray())
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
    assert (
        found["replayed_rounds"] == ROUNDS
        and found["num_samples"] == ROUNDS * 8 * 4
        and found["num_prompts"] == ROUNDS * 8
    )
    injected = world.injected()
    assert sum(injected.values()) - injected["calls"] > 20
