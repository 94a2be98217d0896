from pathlib import Path

import pytest

from penstock.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))
