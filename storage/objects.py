"""What only object stores need: patience with servers that fail, and files that arrive whole.

Three layers retry, each for its own reason. botocore and s3fs send one request again (a part of an upload, a range of a download)
after a 5xx, a throttle or a broken connection; they know nothing of what the request was for. This module tries an operation again
when they have given up or have been fooled: a conditional create whose answer was lost, an upload that arrived short, a download
whose bytes are not those that were committed. It is the only layer for drivers that do not retry at all.

Runs, commits and what they mean are in store.py. Everything here takes full paths.
"""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from storage.disk import CHUNK, damaged, full_at, hash_file, in_parallel, wrong_size
from storage.errors import StoreError, StoreFull
from storage.refs import FileRecord

T = TypeVar("T")

NUM_TRIES = (
    7  # with pauses of 0.25 s doubling to at most 16 s, half of that on average: about 15 s, then the stage's own retries begin
)
PATIENCE = 300.0  # seconds after which no further try begins, however few there were (a server that hangs costs a timeout a try)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 16.0
_NUM_FILES = 4  # uploaded at a time, each in up to _NUM_PARTS parts at a time: at most 256 MiB in memory
_NUM_PARTS = 4
_NUM_RANGES = 8  # downloaded at a time: at most 128 MiB in memory
_NUM_DOWNLOADS = 3  # of a file whose bytes are wrong, before they are believed to be wrong in the store
_MAX_PARTS = 10_000  # S3's limit

# A definite answer: asking again cannot change it. Everything else may be a bad moment of the network.
_DEFINITE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_DEFINITE += (NotImplementedError, ValueError, TypeError, LookupError, AttributeError, AssertionError)  # type: ignore[assignment]
_DEFINITE_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "UnknownRegionError",
)
_TRANSIENT_STATUS = (408, 409, 425, 429)
_TRANSIENT_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted", "SlowDown"}
_TRANSIENT_CODES |= {"EntityTooSmall", "InvalidPart"}  # a part arrived short: the next upload sends it again
_pauses = random.Random()  # of its own, from the system's entropy: the run's seeded generators are not touched


# ---- opening ----------------------------------------------------------------------------------------------------------------


def open_file_system(uri: str, options: dict[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a URI, and the path in it.

    Raises:
        StoreError: no such scheme, or its driver is not installed.
    """
    protocol = uri.split("://", 1)[0] if "://" in uri else "file"
    try:
        fs, root = fsspec.core.url_to_fs(uri, **(_s3_options(options) if protocol in ("s3", "s3a") else options))
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
        raise StoreError(
            f"store {uri!r} needs the package {package}, which is not here ({error}): pip install {package}"
        ) from error
    except ValueError as error:
        raise StoreError(
            f"store {uri!r} cannot be opened ({error}): give --store a local path or a URI that fsspec knows"
        ) from error
    if _is_s3(fs):
        fs.retries = 2  # of 5: each of them is already botocore's whole series, and ours comes on top
    return fs, root


def _s3_options(options: dict[str, Any]) -> dict[str, Any]:
    """The user's options over our own: jittered retries of single requests, and connections for every part that is on its way."""
    ours: dict[str, Any] = {"max_pool_connections": 2 * _NUM_FILES * _NUM_PARTS}
    if not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & set(os.environ):
        ours["retries"] = {"total_max_attempts": 3, "mode": "standard"}
    return {**options, "config_kwargs": {**ours, **options.get("config_kwargs", {})}}


def _is_s3(fs: fsspec.AbstractFileSystem) -> bool:
    return "s3" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


# ---- patience ---------------------------------------------------------------------------------------------------------------


def retried(call: Callable[[], T], what: str, num_tries: int | None = None) -> T:
    """The result of `call`, asked again with growing, jittered pauses while the answer is a failure of the moment.

    Raises:
        StoreError: it failed `num_tries` (default NUM_TRIES) times, or for PATIENCE seconds.
        Exception: a definite answer (not there, exists, not allowed, not possible), as it came.
    """
    start, num_tries = time.monotonic(), num_tries or NUM_TRIES
    for number in range(1, num_tries + 1):
        try:
            return call()
        except Exception as error:  # drivers have many error types of their own
            if definite(error):
                raise
            spent = time.monotonic() - start
            if number == num_tries or spent > PATIENCE:
                raise StoreError(
                    f"{what} failed {number} times in {spent:.0f} s, last with {type(error).__name__}: {error}; "
                    "the store must answer: look whether it is up and reachable, then start the same command again"
                ) from error
            time.sleep(_pauses.uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**number)))
    raise AssertionError("unreachable")


def definite(error: Exception) -> bool:
    """Whether the store has answered, so that asking again cannot help."""
    code = s3_code(error)
    if code in _TRANSIENT_CODES:
        return False
    if isinstance(error, (StoreError, *_DEFINITE)) or type(error).__name__ in _DEFINITE_NAMES:
        return True
    status = _status(error)
    return status is not None and 400 <= status < 500 and status not in _TRANSIENT_STATUS


def s3_code(error: BaseException) -> str:
    """S3's own error code in an error or behind one that s3fs has translated, or ""."""
    for seen in (error, error.__cause__):
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of botocore (also behind one that s3fs has translated), gcsfs, azure or aiohttp."""
    for seen in (error, error.__cause__):
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status_code", "status", "code"):  # not of a cause: aiohttp's own parser calls a body that ends early a "400"
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


# ---- one small record -------------------------------------------------------------------------------------------------------


def create(fs: fsspec.AbstractFileSystem, path: str, data: bytes, num_tries: int | None = None) -> bool:
    """Write `data` at `path` unless something is there. True if what stands there now is `data`.

    The answer of a create that succeeded can get lost; whoever then sends it again (this loop, botocore, or aiohttp, which silently
    repeats a PUT on a connection that broke) is told that the object exists. So "exists" is believed only after reading what exists.
    Writers of equal bytes may therefore all be told True: put something of your own into a record that must have one winner.
    """

    def attempt() -> bool:
        try:
            fs.pipe_file(path, data, mode="create")
        except Exception as error:
            if not _taken(error):
                raise
            try:
                return read(fs, path) == data
            except FileNotFoundError as gone:  # deleted between the two: nothing stands there, so try to write it again
                raise OSError(errno.EAGAIN, "existed and then did not") from gone
        return True

    return retried(attempt, f"creating {path}", num_tries)


def read(fs: fsspec.AbstractFileSystem, path: str) -> bytes:
    """The whole of a small file, in one request: s3fs would ask for its size first, to read a large one in parts."""
    return fs.cat_file(path, max_concurrency=1) if _is_s3(fs) else fs.cat_file(path)


def _taken(error: Exception) -> bool:
    """Whether a conditional create was refused because something is there.

    s3fs makes FileExistsError only of AWS's full answer; MinIO and others send the same code without the condition's name. gcsfs says
    FileExistsError (from 412, `ifGenerationMatch=0`), adlfs the same or Azure's own ResourceExistsError.
    """
    return (
        isinstance(error, FileExistsError)
        or type(error).__name__ == "ResourceExistsError"
        or s3_code(error) in ("PreconditionFailed", "412")
    )


# ---- files ------------------------------------------------------------------------------------------------------------------


def upload(fs: fsspec.AbstractFileSystem, files: Sequence[tuple[Path, str, int]]) -> None:
    """Upload files of known size to paths that nobody else writes, several at a time and large ones in parts of CHUNK.

    The size is asked for after a file has arrived. S3 checks every part's CRC32 as well (botocore sends it), so bytes that change on
    the way are refused there.
    """

    def one(job: tuple[Path, str, int]) -> None:
        source, path, num_bytes = job
        retried(lambda: _put(fs, source, path, num_bytes), f"uploading {path}")

    in_parallel(one, files, _NUM_FILES)


def _put(fs: fsspec.AbstractFileSystem, source: Path, path: str, num_bytes: int) -> None:
    parts = {"chunksize": max(CHUNK, math.ceil(num_bytes / _MAX_PARTS)), "max_concurrency": _NUM_PARTS} if _is_s3(fs) else {}
    try:
        fs.put_file(str(source), path, **parts)
    except FileExistsError:  # adlfs does not overwrite: an earlier try has left this, whole or not
        fs.rm_file(path)
        raise OSError(errno.EAGAIN, "an earlier upload was in the way") from None
    except (
        FileNotFoundError
    ) as error:  # NoSuchUpload: the answer that completed a multipart upload was lost, and it was asked for again
        if not source.exists():
            raise
        raise OSError(errno.EAGAIN, f"the upload is no longer known to the store: {error}") from error
    fs.invalidate_cache()
    found = fs.info(path)["size"]
    if found != num_bytes:
        raise OSError(errno.EIO, f"{found} bytes arrived of {num_bytes}: the upload was cut")


def download(fs: fsspec.AbstractFileSystem, files: Sequence[tuple[str, FileRecord, Path]]) -> None:
    """Download committed files, range by range in parallel, and prove every byte by size and hash.

    Args:
        files: where each lies, what was committed, and where it shall lie here.

    Raises:
        StoreError: a file is missing or is not what was committed, also when fetched again.
    """
    in_parallel(lambda job: _check_size(fs, job[0], job[1]), files, _NUM_RANGES)
    for _, record, target in files:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.truncate(record.bytes)
    wanted = list(files)
    for number in range(1, _NUM_DOWNLOADS + 1):
        ranges = [(path, target, at, min(CHUNK, r.bytes - at)) for path, r, target in wanted for at in range(0, r.bytes, CHUNK)]
        in_parallel(lambda job: _fetch(fs, *job), ranges, _NUM_RANGES)
        hashes = in_parallel(lambda job: hash_file(job[2]), wanted, _NUM_RANGES)
        wrong = [(job, found) for job, found in zip(wanted, hashes, strict=True) if found != job[1].xxh3]
        if not wrong:
            return
        if number == _NUM_DOWNLOADS:
            (path, record, _), found = wrong[0]
            raise damaged(path, record.xxh3, f"{found} (fetched {number} times)")
        wanted = [job for job, _ in wrong]


def _fetch(fs: fsspec.AbstractFileSystem, path: str, target: Path, at: int, num_bytes: int) -> None:
    """One range of a file, put where it belongs."""

    def whole() -> bytes:
        data = fs.cat_file(path, start=at, end=at + num_bytes)
        if len(data) != num_bytes:
            raise OSError(errno.EIO, f"{len(data)} bytes came of {num_bytes} at {at}: the download was cut")
        return data

    data = retried(whole, f"downloading {path}")
    with full_at(target.parent), target.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _check_size(fs: fsspec.AbstractFileSystem, path: str, record: FileRecord) -> None:
    found = size(fs, path)
    if found != record.bytes:
        raise wrong_size(path, record.bytes, found)


def size(fs: fsspec.AbstractFileSystem, path: str) -> int | None:
    """Bytes of a file as the store has it now, or None if no file is there."""

    def ask() -> int | None:
        fs.invalidate_cache()  # s3fs answers from old listings, where another process's new file is missing
        try:
            info = fs.info(path)
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else info["size"]

    return retried(ask, f"asking for {path}")


def modified(info: dict[str, Any]) -> float:
    """When a listed file was last written, in seconds since the epoch; 0 if the driver does not say."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):  # s3fs, adlfs, gcsfs, gcsfs, memory
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return 0.0


def scratch(num_bytes: int = 0) -> tempfile.TemporaryDirectory[str]:
    """A directory of this process for files on their way.

    Raises:
        StoreFull: the disk cannot take `num_bytes`.
    """
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise StoreFull(
            f"{num_bytes / 1e9:.1f} GB are to be fetched and {place} has {free / 1e9:.1f} GB free: set TMPDIR to a larger disk"
        )
    return tempfile.TemporaryDirectory(prefix="penstock-")
