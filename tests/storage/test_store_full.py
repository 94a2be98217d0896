"""A disk without room: the error is a StoreFull that names the place, and what was written before stays whole."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import disk
from storage.errors import StoreFull
from storage.refs import Commit
from storage.store import Store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return filler


def test_a_commit_on_a_full_disk_names_the_place_and_succeeds_once_there_is_room(small_disk: Path) -> None:
    store = Store(str(small_disk / "store"))
    commit = Commit(kind="step", index=0)
    store.commit("runs/x/steps/000000", commit)
    filler = fill(small_disk)
    with pytest.raises(StoreFull) as full:
        store.commit("runs/x/steps/000001", commit.model_copy(update={"index": 1}))
    assert full.value.code == "store-full" and str(small_disk) in str(full.value)
    filler.unlink()
    store.commit("runs/x/steps/000001", commit.model_copy(update={"index": 1}))
    assert store.committed_indices("runs/x/steps") == [0, 1]
    assert not [path for path in disk.files_in(small_disk) if path.suffix == ".tmp"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_and_spent_quota_are_told_alike_and_other_errors_pass(tmp_path: Path, code: int) -> None:
    with pytest.raises(StoreFull, match=str(tmp_path)), disk.full_at(tmp_path / "not" / "yet" / "there"):
        raise OSError(code, "no room")
    with pytest.raises(PermissionError), disk.full_at(tmp_path):
        raise PermissionError(errno.EACCES, "not allowed")
