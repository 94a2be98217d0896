"""A full disk: the error is a StoreFull that names the directory, and earlier files remain complete."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.storage import disk
from penstock.storage.commit import Commit
from penstock.storage.errors import StoreFull
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import Outbox


def test_a_commit_on_a_full_disk_fails_and_succeeds_after_space_is_freed(
    small_disk: Path, fill: Callable[[Path], Path]
) -> None:
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
def test_full_disk_and_quota_raise_store_full_and_other_errors_pass(tmp_path: Path, code: int) -> None:
    with pytest.raises(StoreFull, match=str(tmp_path)), disk.translate_disk_full(tmp_path / "not" / "yet" / "there"):
        raise OSError(code, "no room")
    with pytest.raises(PermissionError), disk.translate_disk_full(tmp_path):
        raise PermissionError(errno.EACCES, "not allowed")


def test_a_line_cut_by_a_full_disk_can_be_appended_again(small_disk: Path, fill: Callable[[Path], Path]) -> None:
    outbox = Outbox(small_disk)
    outbox.append("first", {})
    filler = fill(small_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            outbox.append("second", {"text": "x" * 6000})  # longer than what is left of the file's last page
    filler.unlink()
    assert outbox.append("second", {"text": "x" * 6000}) and outbox.append("third", {})
    assert [line["key"] for line, _ in outbox.lines_from(0)] == ["first", "second", "third"]
    assert [line["key"] for line, _ in Outbox(small_disk).lines_from(0)] == ["first", "second", "third"]
