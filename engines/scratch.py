"""A temporary directory of each process that starts others: what Ray, torch, ZeroMQ and SGLang leave in it goes with the process.

They put sockets, session folders, logs and empty files into TMPDIR and do not remove them when they are killed, which is how all of
them end here. So a process that starts them sets TMPDIR to a directory of its own first, which it removes at its exit. It holds a lock
on a file in it: after a kill the lock is free, which proves that the owner is dead, and the next start or `penstock gc` removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "penstock-"
LOCK = "owner.lock"
KEPT = "kept"  # beside the lock: the owner has failed, and its logs may be wanted
KEEP_SECONDS = 24 * 3600  # for which a start leaves what is kept; `penstock gc` asks for it anyway
LONGEST_FOR_RAY = 40  # characters: Ray adds up to 66 for its sockets, and 107 are the most that the kernel takes
LONGEST_BASE = 70  # so that a socket directly in our directory is within them

_own: tuple[Path, int, int] | None = None  # directory, descriptor of its lock, process


def own_directory() -> Path:
    """Return this process's temporary directory; the first call makes it, sets TMPDIR and removes those of dead owners.

    A process that was started with the directory of a living owner as TMPDIR (an engine's actor on a driver's own Ray) uses that.
    """
    global _own
    if _own is not None and _own[2] == os.getpid():
        return _own[0]
    base = Path(tempfile.gettempdir())
    if (base / LOCK).is_file() and base not in abandoned(base.parent):
        return base
    if len(str(base)) > LONGEST_BASE:
        base = Path("/tmp")
    for directory in abandoned(base, kept_for=KEEP_SECONDS):
        remove(directory)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    _own = (directory, _lock(directory / LOCK, create=True), os.getpid())
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    atexit.register(_remove_own, directory, os.getpid())
    return directory


def keep() -> None:
    """Leave this process's directory at its exit, for the logs in it: it has failed."""
    if _own is not None and _own[2] == os.getpid() and _own[0].is_dir():
        (_own[0] / KEPT).touch()


def kept() -> bool:
    """Whether this process's directory stays at its exit."""
    return _own is not None and (_own[0] / KEPT).exists()


def abandoned(base: Path | None = None, kept_for: float = 0.0) -> list[Path]:
    """List directories of this user whose owners are dead.

    Args:
        base: where to look; where `own_directory` makes them if not given.
        kept_for: leave out those that a failed owner has kept less than so many seconds ago.
    """
    base = base or base_directory()
    found = []
    for directory in sorted(base.glob(f"{PREFIX}*")):
        lock, kept = directory / LOCK, directory / KEPT
        if directory.is_symlink() or directory.stat().st_uid != os.geteuid() or not lock.is_file():
            continue
        if kept.exists() and time.time() - kept.stat().st_mtime < kept_for:
            continue
        try:
            os.close(_lock(lock))
        except OSError:  # held by a living process, or gone meanwhile
            continue
        found.append(directory)
    return found


def base_directory() -> Path:
    """Return the directory in which processes make theirs: TMPDIR as the user has set it."""
    return _own[0].parent if _own is not None else Path(tempfile.gettempdir())


def remove(directory: Path) -> bool:
    """Remove an abandoned directory. False if its owner is alive."""
    try:
        descriptor = _lock(directory / LOCK)
    except OSError:
        return False
    try:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
    return not directory.exists()


def _lock(path: Path, create: bool = False) -> int:
    """The descriptor of a locked file. Raises OSError if another process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_own(directory: Path, pid: int) -> None:
    if pid == os.getpid() and not (directory / KEPT).exists():  # not in a fork of the owner
        shutil.rmtree(directory, ignore_errors=True)
