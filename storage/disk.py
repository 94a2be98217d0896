"""What every store needs of a local disk: files that are durable, hashed and created at most once.

Used by store.py for stores that are directories, and by objects.py for the scratch copies of what lies on an object store.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import xxhash

from storage.errors import StoreError, StoreFull
from storage.refs import FileRecord

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 16 << 20  # bytes read at a time
_NUM_READERS = min(8, os.cpu_count() or 1)  # hashing threads; xxh3 lets go of the interpreter's lock (27 GB/s a core, measured)
NO_HARD_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
)  # of link(2) on FAT, some FUSE and CIFS mounts
FULL = (errno.ENOSPC, errno.EDQUOT)


# ---- writing ----------------------------------------------------------------------------------------------------------------


def create(target: Path, data: bytes, *, single_writer: bool = False) -> bool:
    """Write a file whole and durably, unless its name is taken. True if this call wrote it."""
    with full_at(target.parent):
        make_directory(target.parent)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not _link(temporary, target, single_writer):
                return False
        finally:
            temporary.unlink(missing_ok=True)
        fsync(target.parent)
    return True


def replace(target: Path, data: bytes) -> None:
    """Write a file whole, whatever has its name, without waiting for the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def full_at(place: str | Path) -> Iterator[None]:
    """In this block an OSError that says "no room" (ENOSPC, EDQUOT) becomes a StoreFull that names `place`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise store_full(place) from error


def store_full(place: str | Path) -> StoreFull:
    """The error of a disk that has no room left, with what its file system says of it."""
    place = next(path for path in (Path(place).absolute(), *Path(place).absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    return StoreFull(f"no room is left in {place} ({free / 1e6:.0f} MB free): free some space there, or raise the quota")


def _link(temporary: Path, target: Path, single_writer: bool) -> bool:
    """Give a written file its name, unless the name is taken."""
    if single_writer:  # also for file systems without hard links
        if target.exists():
            return False
        temporary.rename(target)
        return True
    try:
        os.link(temporary, target)
    except OSError as error:
        # An NFS server may answer "exists" to a link it has made itself after a lost reply: two names prove it (open(2)).
        if os.stat(temporary).st_nlink == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def make_directory(path: Path) -> None:
    """`mkdir -p` that survives a power cut: the parent of every new directory is synced."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync(path.parent)


def secure(files: Sequence[Path], top: Path) -> None:
    """Make written files durable: their data, and every name on the way to them from `top`."""
    directories = {top}
    for file in files:
        directories.update(parent for parent in file.parents if parent.is_relative_to(top))
    with full_at(top):
        in_parallel(fsync, files, _NUM_READERS)
        for directory in directories:
            fsync(directory)


def delete(paths: Iterable[Path], root: Path) -> None:
    """Remove files, durably, and the directories below `root` that become empty. What is not there is fine.

    Raises:
        StoreError: a symbolic link leads out of `root`, or this user may not delete here.
    """
    top, parents = Path(os.path.realpath(root)), set[Path]()
    for path in paths:
        if path.parent not in parents and not Path(os.path.realpath(path.parent)).is_relative_to(top):
            raise StoreError(f"{path} is reached by a symbolic link that leads out of {root}: delete it by hand")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be deleted ({error.strerror}): mount the store writable, or run as its owner"
            ) from error
        parents.add(path.parent)
    for directory in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        while directory != root and _remove_if_empty(directory):
            directory = directory.parent
        fsync(directory)  # what is deleted after this must not outlast it


def remove_empty_directories(top: Path) -> None:
    """Remove `top` and the directories below it, as far as they hold no file."""
    for place, _, _ in os.walk(top, topdown=False):
        _remove_if_empty(Path(place))


def _remove_if_empty(directory: Path) -> bool:
    """Whether the directory is gone."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # not empty
        return False
    return True


def fsync(path: str | Path) -> None:
    """Wait until a file or directory has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----------------------------------------------------------------------------------------------------------------


def files_in(directory: Path) -> list[Path]:
    """Every file under a directory, sorted."""
    return sorted(Path(place) / name for place, _, names in os.walk(directory) for name in names)


def records(files: Sequence[Path], top: Path, attempt: str) -> list[FileRecord]:
    """What proves written files: size, hash, and rows of Parquet; `attempt` is the key of `top`."""

    def record(file: Path) -> FileRecord:
        key = f"{attempt}/{file.relative_to(top).as_posix()}"
        return FileRecord(path=key, bytes=file.stat().st_size, xxh3=hash_file(file), rows=_num_rows(file))

    return in_parallel(record, files, _NUM_READERS)


def _num_rows(file: Path) -> int | None:
    if file.suffix != ".parquet":
        return None
    import pyarrow.parquet as pq

    return pq.read_metadata(file).num_rows


def check(files: Sequence[tuple[Path, FileRecord]]) -> None:
    """Compare files with what was committed, size and hash, several at a time.

    Raises:
        StoreError: one is missing or differs.
    """

    def one(job: tuple[Path, FileRecord]) -> None:
        path, record = job
        found = path.stat().st_size if path.is_file() else None
        if found != record.bytes:
            raise wrong_size(str(path), record.bytes, found)
        xxh3 = hash_file(path)
        if xxh3 != record.xxh3:
            raise damaged(str(path), record.xxh3, xxh3)

    in_parallel(one, files, _NUM_READERS)


def hash_file(path: str | Path) -> str:
    """xxh3-128 of a file's content, hex."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK, max(1, Path(path).stat().st_size))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def wrong_size(path: str, expected: int, found: int | None) -> StoreError:
    """The error of a committed file that is missing or has another size."""
    state = "is missing" if found is None else f"has {found} bytes"
    return StoreError(f"{path} {state}, but a commit names it with {expected} bytes: restore it from a backup")


def damaged(path: str, expected: str, found: str) -> StoreError:
    """The error of a committed file whose bytes have changed."""
    return StoreError(f"{path} has hash {found}, but a commit names it with {expected}: it is damaged, restore it from a backup")


def in_parallel(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> list[R]:
    """The results in order. After the first failure nothing new begins, and that failure is raised."""
    jobs = list(items)
    if len(jobs) < 2 or num_threads == 1:
        return [function(job) for job in jobs]
    with ThreadPoolExecutor(min(num_threads, len(jobs)), thread_name_prefix="store") as pool:
        futures = [pool.submit(function, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
