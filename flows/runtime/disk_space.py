"""Retry a stage that failed because the disk is full, until there is space.

Prefect's own retries of a stage are too few and only seconds apart for this: freeing disk space takes minutes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.storage.disk import FULL, store_full_error
from penstock.storage.errors import StoreFull
from penstock.storage.preemption import StopRequest

T = TypeVar("T")

PATIENCE = 900.0  # seconds with a full disk after which the stage fails
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds between retries
# Error messages of a full disk, for exceptions (of libraries or other processes) that lack the errno.
MESSAGES = ("No space left on device", "Disk quota exceeded", "database or disk is full")


def retry_while_disk_full(
    body: Callable[[], T], directories: Sequence[str], stop: StopRequest, note: Callable[[str], object]
) -> T:
    """Return the result of `body`, retried with backoff while the disk is full.

    Args:
        body: the stage, a function that can be called again after a failure.
        directories: directories that `body` writes to.
        stop: a stop request; it ends the wait.
        note: prints a message; called before each wait.

    Raises:
        StoreFull: the disk was still full after PATIENCE seconds.
        Preempted: the run was asked to stop while waiting.
        Exception: any other error of `body`.
    """
    start, pause = time.monotonic(), FIRST_PAUSE
    while True:
        attempt_start = time.monotonic()
        try:
            return body()
        except Exception as error:
            full = disk_full_error(error, directories)
            if full is None:
                raise
            if time.monotonic() - attempt_start > PATIENCE:  # a new shortage: restart the time limit
                start, pause = time.monotonic(), FIRST_PAUSE
            left = PATIENCE - (time.monotonic() - start)
            if left <= 0:
                raise full from error
            note(f"{full}; retrying in {pause:.0f} s (for at most {left / 60:.0f} more minutes)")
        stop.wait(pause)
        stop.raise_if_requested()
        pause = min(2 * pause, LONGEST_PAUSE)


def disk_full_error(error: BaseException, directories: Sequence[str] = ()) -> StoreFull | None:
    """Return a StoreFull error with the path of the disk if a full disk caused `error`, else None."""
    for cause in _causes(error):
        if isinstance(cause, StoreFull):
            return cause
        if isinstance(cause, OSError) and cause.errno in FULL and cause.filename:
            return store_full_error(Path(str(cause.filename)).parent)
    has_errno = any(isinstance(cause, OSError) and cause.errno in FULL for cause in _causes(error))
    if has_errno or any(message in str(error) for message in MESSAGES):
        # The path is unknown: take the directory with the least free space.
        return store_full_error(min([*directories, tempfile.gettempdir()], key=_free_bytes))
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free_bytes(directory: str) -> int:
    """Return the free bytes of a directory's disk; a huge number if the directory does not exist."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 1 << 62
