"""Files of killed processes are found only if they are provably unused."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engines import scratch
from penstock.flows.commands import maintenance


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    base, shm = tmp_path / "tmp", tmp_path / "shm"
    (base / "ray").mkdir(parents=True)
    shm.mkdir()
    return base, shm


def find(places: tuple[Path, Path]) -> list[maintenance.Residue]:
    return maintenance.find_files_of_dead_processes(places[0], places[0] / "ray", places[1])


def found(places: tuple[Path, Path]) -> list[tuple[str, str]]:
    return sorted((entry.kind, entry.path.name) for entry in find(places))


def test_ray_sessions_of_dead_drivers_are_removed(places: tuple[Path, Path]) -> None:
    ray = places[0] / "ray"
    dead, live = f"session_2026-11-22_07-22-54_831243_{dead_pid()}", f"session_2026-11-22_07-22-54_831243_{os.getpid()}"
    for name in (dead, live, "session_latest_notes"):
        (ray / name).mkdir()
        (ray / name / "log").write_text("text")
    assert found(places) == [("Ray session", dead)]
    [entry] = find(places)
    assert entry.bytes == 4 and maintenance.remove_residue(entry)
    assert not (ray / dead).exists() and (ray / live).exists()


def test_ray_session_named_by_a_living_process_is_kept(places: tuple[Path, Path]) -> None:
    session = places[0] / "ray" / f"session_2026-11-22_07-22-54_831243_{dead_pid()}"
    session.mkdir()
    raylet = subprocess.Popen([sys.executable, "-c", "input()", f"--session={session}"], stdin=subprocess.PIPE)
    try:
        while str(session) not in Path(f"/proc/{raylet.pid}/cmdline").read_text():  # between fork and exec
            time.sleep(0.01)
        assert found(places) == []
    finally:
        raylet.kill()
        raylet.communicate()
    assert found(places) == [("Ray session", session.name)]


def test_unmapped_shared_memory_is_found(places: tuple[Path, Path]) -> None:
    used, unused = (places[1] / f"sglang_loads_{name}.shm" for name in ("used", "unused"))
    for path in (used, unused, places[1] / "somebody_elses.shm"):
        path.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert found(places) == [("shared memory", unused.name)]
        [entry] = find(places)
    assert found(places) == [("shared memory", unused.name), ("shared memory", used.name)]
    assert maintenance.remove_residue(entry) and not unused.exists() and used.exists()


def test_gc_lists_directories_of_dead_owners_and_removes_them_with_delete(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = places[0] / "penstock-0123"
    directory.mkdir()
    (directory / scratch.LOCK).touch()
    leftovers = find(places)
    assert [entry.kind for entry in leftovers] == ["temporary directory"]
    monkeypatch.setattr(maintenance, "find_files_of_dead_processes", lambda: leftovers)
    store = str(places[0].parent / "store")
    assert maintenance.gc_main(["--store", store]) == 0 and directory.exists()
    assert str(directory) in capsys.readouterr().out
    assert maintenance.gc_main(["--store", store, "--delete"]) == 0 and not directory.exists()
    assert f"{directory}  0 B (removed)" in capsys.readouterr().out
