"""The fixture `world`: services and data for one run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import World


@pytest.fixture
def world(tmp_path: Path, prefect_home: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        shutil.copytree(prefect_home, world.environment["PREFECT_HOME"])
        yield world
