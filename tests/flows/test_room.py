"""A disk without room: what counts as that, and how a stage waits for room."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import room
from flows.room import PATIENCE, disk_full, run_with_room
from storage.errors import StoreError, StoreFull
from storage.preemption import Preempted, StopRequest


class Clock:
    """A clock that waiting moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: StopRequest) -> None:
        self.now = 0.0
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(stop, "wait", self.wait)

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_stage_waits_minutes_for_room_and_then_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop, notes = StopRequest(), []
    clock = Clock(monkeypatch, stop)

    def body() -> str:
        if clock.now < 400:
            no_room()
        return "done"

    monkeypatch.setattr(room.tempfile, "gettempdir", lambda: str(tmp_path))
    assert run_with_room(body, [str(tmp_path)], stop, notes.append) == "done"
    assert 400 <= clock.now <= 400 + room.LONGEST_PAUSE
    assert len(notes) < 15 and all(str(tmp_path) in note for note in notes)


def test_a_disk_that_stays_full_fails_the_stage_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    clock = Clock(monkeypatch, stop)
    with pytest.raises(StoreFull) as full:
        run_with_room(no_room, [], stop, lambda note: None)
    assert full.value.code == "store-full" and PATIENCE <= clock.now <= PATIENCE + room.LONGEST_PAUSE


def test_waiting_for_room_ends_when_the_run_is_asked_to_stop() -> None:
    stop = StopRequest()
    with pytest.raises(Preempted):
        run_with_room(no_room, [], stop, lambda note: stop.ask(60))


def test_other_errors_are_not_waited_for() -> None:
    def fail() -> None:
        raise StoreError("damaged")

    with pytest.raises(StoreError, match="damaged"):
        run_with_room(fail, [], StopRequest(), lambda note: pytest.fail("nothing to wait for"))
    assert disk_full(OSError(errno.EACCES, "not allowed")) is None


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        lambda place: OSError(errno.ENOSPC, "No space left on device", str(place / "file")),
        lambda place: OSError(errno.EDQUOT, "Disk quota exceeded", str(place / "not" / "yet" / "file")),
        lambda place: caused(RuntimeError("the writer failed"), OSError(errno.ENOSPC, "No room", str(place / "file"))),
        lambda place: StoreFull(f"no room is left in {place}"),
    ],
    ids=["no space", "quota", "behind another error", "said already"],
)
def test_the_full_disk_is_named(tmp_path: Path, error: Callable[[Path], Exception]) -> None:
    full = disk_full(error(tmp_path), ["/"])
    assert full is not None and str(tmp_path) in str(full)


def test_a_library_that_keeps_only_the_text_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"/here": 10, "/there": 20, "/tmp": 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free.get(str(place), 0)))
    monkeypatch.setattr(room, "store_full", lambda place: StoreFull(str(place)))
    monkeypatch.setattr(room.tempfile, "gettempdir", lambda: "/tmp")
    full = disk_full(RuntimeError("PytorchStreamWriter failed: No space left on device"), ["/there", "/here"])
    assert str(full) == "/here"
