"""Durable files on a local disk: atomic creation, fsync, deletion, hashes.

Used by file_store.py and store.py for local stores, and by objects.py for local copies of files in an object store.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import c_int64
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from penstock.storage.commit import FileRecord
from penstock.storage.errors import StoreError, StoreFull

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 16 << 20  # bytes per read
MAX_FILE = 1 << 30  # default limit of `read_file`, in bytes
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; not in `os`
SYNC_FILE_RANGE_WRITE = 2  # begin to write the range, and do not wait
WRITEBACK = 16 << 20  # least bytes of an early write (`write_back`)
_NUM_READERS = min(8, os.cpu_count() or 1)  # hashing threads; xxh3 releases the GIL (measured: 27 GB/s per core)
_NUM_TRIES = 20  # to create a file in a directory that other processes keep removing
# Error codes of link(2) on file systems without hard links: FAT, some FUSE and CIFS mounts.
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
FULL = (errno.ENOSPC, errno.EDQUOT)


# ---- writing ---------------------------------------------------------------------------------------------------------


def create(target: Path, data: bytes, *, single_writer: bool = False) -> bool:
    """Write a file atomically and fsync it, unless it exists. Return whether this call wrote it. With `single_writer`,
    the file system needs no hard links, but no other process may create `target`."""

    def link(temporary: Path) -> bool:
        if single_writer:  # works without hard links
            if target.exists():
                return False
            temporary.rename(target)
            return True
        try:
            os.link(temporary, target)
        except OSError as error:
            # If an NFS reply is lost, the client repeats the request and gets EEXIST although the first request
            # succeeded. A link count of 2 proves that the first one succeeded (see open(2)).
            if os.stat(temporary).st_nlink == 2:
                return True
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    with translate_disk_full(target.parent):
        created = _publish(target, data, link, sync=True)
        if created:
            fsync(target.parent)
    return created


def replace(target: Path, data: bytes) -> None:
    """Write a file atomically, replacing an existing one, without fsync."""
    _publish(target, data, lambda temporary: temporary.replace(target), sync=False)


def _publish(target: Path, data: bytes, publish: Callable[[Path], T], *, sync: bool) -> T:
    """Write a temporary file beside `target`, and return the result of `publish`, which makes it visible as `target`.
    The write is repeated if another process has deleted the temporary file (`penstock gc`) or the new, still empty
    directory (`delete`)."""
    tries_left = _NUM_TRIES
    while True:
        tries_left -= 1
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            make_directory(target.parent)
            with temporary.open("wb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            return publish(temporary)
        except (FileNotFoundError, FileExistsError):
            if not tries_left:
                raise
        finally:
            with suppress(NotADirectoryError):
                temporary.unlink(missing_ok=True)


@contextmanager
def translate_disk_full(place: str | Path) -> Iterator[None]:
    """Turn an OSError with ENOSPC or EDQUOT inside the block into a StoreFull that names the directory `place`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise store_full_error(place) from error


def store_full_error(place: str | Path) -> StoreFull:
    """Return the error for a full disk or quota at `place`, with the free space of the file system."""
    place = next(path for path in (Path(place).absolute(), *Path(place).absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    return StoreFull(
        f"no room is left in {place} ({free / 1e6:.0f} MB free): free some space there, or raise the quota"
    )


def make_directory(path: Path) -> None:
    """Create a directory and its parents durably: fsync the parent of every new directory."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync(path.parent)


def fsync_files(files: Sequence[Path], top: Path) -> None:
    """Make written files durable: fsync the files and every directory from `top` down to them."""
    directories = {top}
    for file in files:
        directories.update(parent for parent in file.parents if parent.is_relative_to(top))
    with translate_disk_full(top):
        map_in_threads(fsync, files, _NUM_READERS)
        for directory in directories:
            fsync(directory)


def delete(paths: Iterable[Path], root: Path) -> None:
    """Delete files durably, and the directories below `root` that become empty. Missing files are skipped."""
    top, parents = Path(os.path.realpath(root)), set[Path]()
    for path in paths:
        if path.parent not in parents and not Path(os.path.realpath(path.parent)).is_relative_to(top):
            raise StoreError(
                f"{path} leads out of the store {root} by a symbolic link and was not deleted: delete it by hand"
            )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be deleted ({error.strerror}): mount the store writable, or run as its owner"
            ) from error
        parents.add(path.parent)
    for directory in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        while directory != root and remove_if_empty(directory):
            directory = directory.parent
        for existing in (directory, *directory.parents):  # another process may have removed the directory
            with suppress(FileNotFoundError):
                fsync(existing)  # makes these deletions durable before any later one
                break


def remove_if_empty(directory: Path) -> bool:
    """Remove a directory if it is empty. Return whether it no longer exists."""
    with suppress(OSError):  # the directory is not empty, or another process has removed it
        directory.rmdir()
    return not directory.exists()


def fsync(path: str | Path) -> None:
    """Wait until a file or directory has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_file(path: str | Path, max_bytes: int = MAX_FILE) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises OSError also for pipes and devices, from which a read
    may never return."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device instead of a file", str(path))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def write_back(file: BinaryIO, start: int, end: int) -> int:
    """Ask the kernel to start writing the bytes [start, end) of a growing file to the disk, and return `end`. If they
    are fewer than WRITEBACK bytes, do nothing and return `start`.

    Without these early writes the disk is idle until the kernel holds many unwritten bytes, or until fsync. fsync
    reports their errors.
    """
    if end - start < WRITEBACK:
        return start
    if _sync_file_range:
        _sync_file_range(file.fileno(), c_int64(start), c_int64(end - start), SYNC_FILE_RANGE_WRITE)
    return end


def files_in(directory: Path) -> list[Path]:
    """Return every file under a directory, sorted."""
    return sorted(Path(place) / name for place, _, names in os.walk(directory) for name in names)


def file_records(
    top: Path, attempt: str, hashes: Mapping[str, str], owns: Callable[[str], bool] | None = None
) -> list[FileRecord]:
    """Return a FileRecord for each file below `top`, whose key in the store is `attempt`. File names are relative to
    `top`. `hashes` maps names to known hashes; files that it lacks are read and hashed. With `owns`, only the files
    whose names it accepts are recorded."""

    def record(name: str) -> FileRecord:
        file, rows = top / name, None
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_metadata(file).num_rows
        xxh3 = hashes.get(name) or hash_file(file)
        return FileRecord(path=f"{attempt}/{name}", bytes=file.stat().st_size, xxh3=xxh3, rows=rows)

    names = [file.relative_to(top).as_posix() for file in files_in(top)]
    return map_in_threads(record, [name for name in names if owns is None or owns(name)], _NUM_READERS)


def verify_files(files: Sequence[tuple[Path, FileRecord]]) -> None:
    """Check in parallel that files have the committed sizes and hashes."""

    def verify(job: tuple[Path, FileRecord]) -> None:
        path, record = job
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            raise size_mismatch_error(str(path), record.bytes, size)
        xxh3 = hash_file(path)
        if xxh3 != record.xxh3:
            raise StoreError(
                f"{path} has hash {xxh3}, but was committed with hash {record.xxh3}: restore it from a backup"
            )

    map_in_threads(verify, files, _NUM_READERS)


def hash_file(path: str | Path) -> str:
    """Return the xxh3-128 hash of a file's content in hex."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK, max(1, Path(path).stat().st_size))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def size_mismatch_error(path: str, expected: int, size: int | None) -> StoreError:
    """Return the error for a committed file that is missing (`size` is None) or does not have its committed size."""
    state = "is missing" if size is None else f"has {size} bytes"
    return StoreError(f"{path} {state}, but was committed with {expected} bytes: restore it from a backup")


def map_in_threads(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> list[R]:
    """Apply a function to items in threads and return the results in the order of the items. The first exception, in
    the order of the items, is raised; calls that have not started by then are cancelled."""
    jobs = list(items)
    if len(jobs) < 2 or num_threads == 1:
        return [function(job) for job in jobs]
    with ThreadPoolExecutor(min(num_threads, len(jobs)), thread_name_prefix="store") as pool:
        return list(pool.map(function, jobs))
