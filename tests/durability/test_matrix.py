"""The kill matrix in short form: several targets in turn, one at each boundary of a run. matrix.py kills each target at
each boundary."""

from __future__ import annotations

import pytest
from harness import POINTS, World
from harness import ROUNDS as MATRIX_ROUNDS
from matrix import one_run

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3600)]


def test_kills_at_every_boundary_lose_nothing(world: World) -> None:
    result = one_run(world, "local", ("tree", "engine", "prefect", "ray"), POINTS)
    assert sum(kill["num_killed"] > 0 for kill in result["kills"]) >= len(POINTS) - 1, result["kills"]
    assert result["verdict"]["replayed_rounds"] == MATRIX_ROUNDS
