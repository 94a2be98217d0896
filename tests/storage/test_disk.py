"""Files that are written to the disk while they grow."""

from __future__ import annotations

import os
from ctypes import c_int64
from pathlib import Path

import pytest

from penstock.storage import disk


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
