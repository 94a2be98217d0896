"""Files that are written to the disk while they grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.storage import disk


def test_a_growing_file_is_written_back_in_pieces_of_at_least_the_given_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def record(descriptor: int, start: int, length: int, advice: int) -> None:
        ranges.append((start, length))
        advise(descriptor, start, length, advice)

    monkeypatch.setattr(disk, "WRITEBACK", 8192)
    monkeypatch.setattr(os, "posix_fadvise", record)
    content, written_back = os.urandom(30000), 0
    with open(tmp_path / "file", "wb") as file:
        for start in range(0, len(content), 5000):
            file.write(content[start : start + 5000])
            written_back = disk.write_back(file, written_back, file.tell())
    assert ranges == [(0, 10000), (10000, 10000), (20000, 10000)]
    assert (tmp_path / "file").read_bytes() == content
