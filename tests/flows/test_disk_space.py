"""A full disk: which errors count as one, and how a stage waits for space."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.flows import stage
from penstock.flows.stage import PATIENCE, disk_full_error, retry_while_disk_full
from penstock.storage.errors import StoreError, StoreFull
from penstock.storage.preemption import Preempted, StopRequest


class Clock:
    """A clock that waiting moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: StopRequest) -> None:
        self.now = 0.0
        monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(stop, "wait", self.wait)

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_stage_succeeds_after_space_was_freed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop, notes = StopRequest(), []
    clock = Clock(monkeypatch, stop)

    def body() -> str:
        if clock.now < 400:
            no_room()
        return "done"

    monkeypatch.setattr(stage.tempfile, "gettempdir", lambda: str(tmp_path))
    assert retry_while_disk_full(body, [str(tmp_path)], stop, notes.append) == "done"
    assert 400 <= clock.now <= 400 + stage.LONGEST_PAUSE
    assert len(notes) < 15 and all(str(tmp_path) in note for note in notes)


def test_stage_fails_if_the_disk_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    clock = Clock(monkeypatch, stop)
    with pytest.raises(StoreFull) as full:
        retry_while_disk_full(no_room, [], stop, lambda note: None)
    assert full.value.code == "store-full" and PATIENCE <= clock.now <= PATIENCE + stage.LONGEST_PAUSE


def test_stop_request_ends_the_wait_for_space() -> None:
    stop = StopRequest()
    with pytest.raises(Preempted):
        retry_while_disk_full(no_room, [], stop, lambda note: stop.request(60))


def test_other_errors_are_raised_at_once() -> None:
    def fail() -> None:
        raise StoreError("damaged")

    with pytest.raises(StoreError, match="damaged"):
        retry_while_disk_full(fail, [], StopRequest(), lambda note: pytest.fail("nothing to wait for"))
    assert disk_full_error(OSError(errno.EACCES, "not allowed")) is None


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
def test_error_names_the_full_disk(tmp_path: Path, error: Callable[[Path], Exception]) -> None:
    full = disk_full_error(error(tmp_path), ["/"])
    assert full is not None and str(tmp_path) in str(full)


def test_full_disk_is_recognised_by_message_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there, temporary = (str(tmp_path / name) for name in ("here", "there", "tmp"))
    free = {here: 10, there: 20, temporary: 30}
    for directory in free:
        Path(directory).mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[str(place)]))
    monkeypatch.setattr(stage, "store_full_error", lambda place: StoreFull(str(place)))
    monkeypatch.setattr(stage.tempfile, "gettempdir", lambda: temporary)
    full = disk_full_error(RuntimeError("PytorchStreamWriter failed: No space left on device"), [there, here, "/gone"])
    assert str(full) == here
