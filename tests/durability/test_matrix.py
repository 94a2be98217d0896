"""Three rows of the kill matrix: one target killed at every boundary of a run (matrix.py runs all sixteen)."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import POINTS
from harness import ROUNDS as MATRIX_ROUNDS
from matrix import one_run

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("store", "target"), [("s3", "tree"), ("s3", "engine"), ("local", "driver, standing Ray")])
def test_a_target_killed_at_every_boundary_loses_nothing(store: str, target: str, tmp_path: Path) -> None:
    result = one_run(tmp_path, store, target, POINTS)
    assert sum(kill["num_killed"] > 0 for kill in result["kills"]) >= len(POINTS) - 1, result["kills"]
    assert result["verdict"]["replayed_rounds"] == MATRIX_ROUNDS
