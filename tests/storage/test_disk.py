"""Durable files on a local disk: growing files, directories that another process removes, and full disks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path

import pytest

from penstock.storage import disk
from penstock.storage.commit import Commit
from penstock.storage.errors import StoreFull
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import Outbox


def test_a_growing_file_is_written_back_in_pieces_of_at_least_the_given_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    sync_file_range = disk._sync_file_range
    assert sync_file_range is not None

    def record(descriptor: int, start: c_int64, length: c_int64, flags: int) -> None:
        ranges.append((start.value, length.value))
        assert sync_file_range(descriptor, start, length, flags) == 0

    monkeypatch.setattr(disk, "WRITEBACK", 8192)
    monkeypatch.setattr(disk, "_sync_file_range", record)
    content, written_back = os.urandom(30000), 0
    with open(tmp_path / "file", "wb") as file:
        for start in range(0, len(content), 5000):
            file.write(content[start : start + 5000])
            written_back = disk.write_back(file, written_back, file.tell())
    assert ranges == [(0, 10000), (10000, 10000), (20000, 10000)]
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("write", [disk.create, disk.replace])
def test_a_directory_removed_before_the_write_is_created_again(
    write: Callable[[Path, bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, mkdir, removals = tmp_path / "drivers" / "a.lease", Path.mkdir, iter([True, True])

    def mkdir_and_remove(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)
        if path == target.parent and next(removals, False):
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_remove)
    write(target, b"x")
    assert target.read_bytes() == b"x" and next(removals, None) is None
    assert [path.name for path in target.parent.iterdir()] == ["a.lease"]


@pytest.mark.parametrize("write", [disk.create, disk.replace])
def test_a_file_in_place_of_the_directory_is_an_error(write: Callable[[Path, bytes], object], tmp_path: Path) -> None:
    (tmp_path / "drivers").write_bytes(b"")
    with pytest.raises(OSError):
        write(tmp_path / "drivers" / "a.lease", b"x")


def test_delete_in_a_directory_that_another_process_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.create(tmp_path / "r" / "drivers" / "a.lease", b"x")
    disk.create(tmp_path / "r" / "drivers" / "b.lease", b"x")
    remove_if_empty = disk.remove_if_empty

    def keep_and_lose(directory: Path) -> bool:
        assert not remove_if_empty(directory), "b.lease exists"
        shutil.rmtree(directory)
        return False

    monkeypatch.setattr(disk, "remove_if_empty", keep_and_lose)
    disk.delete([tmp_path / "r" / "drivers" / "a.lease"], tmp_path)
    assert not (tmp_path / "r" / "drivers").exists()


# ---- a full disk -----------------------------------------------------------------------------------------------------


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
