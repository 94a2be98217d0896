"""A full disk as something that passes: a stage that fails for want of room waits until somebody has made some, and runs again.

This is apart from Prefect's retries of a task, which come within seconds and are few: making room takes people minutes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from storage.disk import FULL, store_full
from storage.errors import StoreFull
from storage.preemption import StopRequest

T = TypeVar("T")

PATIENCE = 900.0  # seconds without room after which the stage fails
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "database or disk is full",
)  # where a library or a rank keeps only the text


def run_with_room(body: Callable[[], T], places: Sequence[str], stop: StopRequest, note: Callable[[str], object]) -> T:
    """Return the result of `body`; while it fails for want of disk space, wait with backoff and run it again.

    Args:
        body: safe to run again.
        places: directories that it may write to.
        stop: ends the wait.
        note: told what is waited for.

    Raises:
        StoreFull: there was no room for PATIENCE seconds.
        Preempted: asked to stop while waiting.
        Exception: what else `body` raises.
    """
    start, pause = time.monotonic(), FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            return body()
        except Exception as error:
            full = disk_full(error, places)
            if full is None:
                raise
            if time.monotonic() - began > PATIENCE:  # there was room for a long time: this is another shortage
                start, pause = time.monotonic(), FIRST_PAUSE
            left = PATIENCE - (time.monotonic() - start)
            if left <= 0:
                raise full from error
            note(f"{full}; trying again in {pause:.0f} s, for {left / 60:.0f} more minutes")
        stop.wait(pause)
        stop.check()
        pause = min(2 * pause, LONGEST_PAUSE)


def disk_full(error: BaseException, places: Sequence[str] = ()) -> StoreFull | None:
    """Return an error that names the full disk if `error`, or one that caused it, says that there is no room; else None."""
    for link in _chain(error):
        if isinstance(link, StoreFull):
            return link
        if isinstance(link, OSError) and link.errno in FULL and link.filename:
            return store_full(Path(str(link.filename)).parent)
    if any(isinstance(link, OSError) and link.errno in FULL for link in _chain(error)) or any(
        word in str(error) for word in WORDS
    ):
        return store_full(min([*places, tempfile.gettempdir()], key=_free))  # it does not say where: the fullest
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free(place: str) -> int:
    try:
        return shutil.disk_usage(place).free
    except OSError:  # not there
        return 1 << 62
