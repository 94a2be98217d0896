"""The temporary directory of a process: removed at exit, and after a kill by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engines import scratch
from penstock.engines.scratch import abandoned_temp_directories, remove_if_abandoned

PROGRAM = """
import sys, tempfile
from pathlib import Path
from penstock.engines.scratch import keep_temp_directory_at_exit, own_temp_directory
directory = own_temp_directory()
assert own_temp_directory() == directory and tempfile.gettempdir() == str(directory)
(directory / "left").write_text("a socket, say")
if "fail" in sys.argv:
    keep_temp_directory_at_exit()
print(directory, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(base: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that prints its temporary directory and ends when its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(base)},
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.communicate()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as directory:
        yield Path(directory)


def test_compile_caches_survive_the_process_and_keep_the_users_variables(tmp_path: Path) -> None:
    program = "from penstock.engines import scratch; import os; scratch.own_temp_directory(); print(*(os.environ[v] "
    program += "for v in scratch.COMPILE_CACHES), sep='\\n')"
    environment = {name: value for name, value in os.environ.items() if name not in scratch.COMPILE_CACHES}
    environment |= {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TRITON_CACHE_DIR": "/users"}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    cache = tmp_path / "cache/penstock"
    assert output == [str(cache / "inductor"), "/users", str(cache / "flash-attention")]
    assert cache.is_dir() and cache.stat().st_mode & 0o077 == 0


def test_a_process_that_ends_removes_its_directory(tmp_path: Path) -> None:
    with owner(tmp_path) as (_, directory):
        assert directory.parent == tmp_path and (directory / "left").exists()
        assert abandoned_temp_directories(tmp_path) == [] and not remove_if_abandoned(directory), "its owner is alive"
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, first):
        process.kill()
    assert abandoned_temp_directories(tmp_path) == [first]
    with owner(tmp_path) as (_, second):
        assert sorted(tmp_path.iterdir()) == [second]
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_a_failed_process_are_kept_for_a_day_and_gc_finds_them(tmp_path: Path) -> None:
    with owner(tmp_path, "fail") as (_, failed):
        pass
    with owner(tmp_path):
        assert (failed / "left").exists()
    assert abandoned_temp_directories(tmp_path) == [failed]
    os.utime(failed / scratch.KEPT, (0, 0))
    with owner(tmp_path):
        assert not failed.exists()


def test_a_child_process_uses_the_directory_of_its_living_parent(tmp_path: Path) -> None:
    with owner(tmp_path) as (_, directory):
        with owner(directory) as (_, child):
            assert child == directory
        assert (directory / "left").exists(), "a child removes nothing"
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_long_for_sockets_is_not_used(tmp_path: Path) -> None:
    base = tmp_path / ("x" * scratch.MAX_BASE_PATH)
    base.mkdir()
    with owner(base) as (_, directory):
        assert directory.parent == Path("/tmp")
    assert not directory.exists()


def test_other_directories_are_never_abandoned(tmp_path: Path) -> None:
    (tmp_path / "penstock-notes").mkdir()
    (tmp_path / "penstock-0123").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / scratch.LOCK).touch()
    (tmp_path / "penstock-link").symlink_to(tmp_path / "elsewhere")
    assert abandoned_temp_directories(tmp_path) == []


def test_directories_of_other_users_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner(tmp_path) as (process, _):
        process.kill()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert abandoned_temp_directories(tmp_path) == []


def test_directory_that_its_owner_removes_meanwhile_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", lambda base, pattern: [base / "penstock-removed"])
    assert scratch.abandoned_temp_directories(tmp_path) == []
