"""A temporary directory for each process that starts Ray or servers, removed when that process ends.

Ray, torch, ZeroMQ and engines write sockets, session folders, logs and empty files to TMPDIR and do not remove them
when they are killed, and Penstock always ends them with SIGKILL. So a process that starts them (the owner) first
creates its own directory, sets TMPDIR to it, and removes it at exit. The owner holds a lock on a file in the directory.
If the owner is killed, the kernel frees the lock: a free lock proves that the owner is dead, and the next owner or
`penstock gc` removes the directory.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "penstock-"
LOCK = "owner.lock"
KEPT = "kept"  # marker file: the owner failed, and the logs in its directory may be needed
KEEP_SECONDS = 24 * 3600  # age at which a new owner removes a directory with the file KEPT; `penstock gc` does at once
COMPILE_CACHES = {  # variable that names a compiler's cache directory -> its subdirectory of ~/.cache/penstock
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",  # by default Inductor would move Triton's directory into its own
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",  # used with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
}
MAX_RAY_PATH = 40  # characters: Ray appends up to 66 for its sockets, and the kernel allows 107 per socket path
MAX_BASE_PATH = 70  # characters: the path of a socket directly in a temporary directory then has at most 107
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
STACK_SIGNAL = signal.SIGUSR2  # makes the trainer's and engines' processes print their Python stacks

_own: tuple[Path, int, int] | None = None  # this process's directory, descriptor of its lock file, pid of the owner


def own_temp_directory() -> Path:
    """Return this process's temporary directory. The first call creates it, sets TMPDIR to it, and removes the
    directories of dead Penstock processes. If TMPDIR is already the directory of a living process (on a local
    Ray, actors inherit the driver's TMPDIR), that directory is returned."""
    global _own
    if _own is not None and _own[2] == os.getpid():
        return _own[0]
    base = Path(tempfile.gettempdir())
    if (base / LOCK).is_file() and base not in abandoned_temp_directories(base.parent):
        return base
    if len(str(base)) > MAX_BASE_PATH:
        base = Path("/tmp")
    for directory in abandoned_temp_directories(base, skip_kept_for_seconds=KEEP_SECONDS):
        remove_if_abandoned(directory)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    _own = (directory, _lock_file(directory / LOCK, create=True), os.getpid())
    # Compiled kernels are kept in ~/.cache/penstock: the compilers' default is TMPDIR, which is removed at exit, and
    # every start would compile them again. Without a writable home directory the defaults remain.
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home directory
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        caches.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(caches, os.W_OK):
            for variable, name in COMPILE_CACHES.items():
                os.environ.setdefault(variable, str(caches / name))
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    owner = os.getpid()

    def remove_unless_kept() -> None:
        if os.getpid() == owner and not (directory / KEPT).exists():  # a fork of the owner must not remove it
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove_unless_kept)
    return directory


def stack_directory(temp_directory: Path) -> Path:
    """Return the directory into which the processes that use `temp_directory` (`own_temp_directory`) write their Python
    stack traces when they receive STACK_SIGNAL."""
    return temp_directory / "stacks"


def print_stacks_on_signal() -> None:
    """Make this process append the Python stacks of its threads to a file in `stack_directory` when it gets
    STACK_SIGNAL. The handler is in C, so it also works while Python waits in a native function."""
    directory = stack_directory(own_temp_directory())
    directory.mkdir(exist_ok=True)
    file = (directory / f"{os.getpid()}.txt").open("a")  # stays open: faulthandler writes to its descriptor
    faulthandler.register(STACK_SIGNAL, file)


def end_with_parent() -> None:
    """Make the kernel kill this actor as soon as its parent, Ray's raylet, dies. Without this, actors survived the
    raylet by minutes after the system clock was set back."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_temp_directory_at_exit() -> None:
    """Do not remove this process's temporary directory at exit; called after a failure, when the logs may be needed."""
    if _own is not None and _own[2] == os.getpid() and _own[0].is_dir():
        (_own[0] / KEPT).touch()


def is_temp_directory_kept_at_exit() -> bool:
    """Return whether this process's temporary directory is kept at exit (`keep_temp_directory_at_exit`)."""
    return _own is not None and (_own[0] / KEPT).exists()


def abandoned_temp_directories(base: Path | None = None, skip_kept_for_seconds: float = 0.0) -> list[Path]:
    """Return this user's temporary directories below `base` (default: `temp_base_directory`) whose owner process is
    dead, except those kept after a failure (`keep_temp_directory_at_exit`) in the last `skip_kept_for_seconds`."""
    base = base or temp_base_directory()
    directories = []
    for directory in sorted(base.glob(f"{PREFIX}*")):
        lock, kept = directory / LOCK, directory / KEPT
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid() or not lock.is_file():
                continue
            if kept.exists() and time.time() - kept.stat().st_mtime < skip_kept_for_seconds:
                continue
            os.close(_lock_file(lock))
        except OSError:  # the lock is held by a living owner, or the directory has just been removed
            continue
        directories.append(directory)
    return directories


def temp_base_directory() -> Path:
    """Return the parent directory of the temporary directories of all processes: TMPDIR as set by the user."""
    return _own[0].parent if _own is not None else Path(tempfile.gettempdir())


def remove_if_abandoned(directory: Path) -> bool:
    """Remove a temporary directory if the process that created it is dead. Return whether the directory was removed."""
    try:
        descriptor = _lock_file(directory / LOCK)
    except OSError:
        return False
    try:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
    return not directory.exists()


def _lock_file(path: Path, create: bool = False) -> int:
    """Open and lock a file without blocking; return its descriptor. Raises OSError if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
