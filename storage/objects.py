"""Retries and transfers for object stores. All functions take full paths; keys and commits are in file_store.py and
store.py.

Three layers retry. botocore and s3fs repeat single requests (one part of an upload, one range of a download) after a
5xx status, throttling or a broken connection. This module repeats a whole operation when their retries failed, or
when their result is wrong: a conditional create whose response was lost, a truncated upload, a download with a wrong
hash. For fsspec drivers without retries of their own, this module is the only layer.
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

from penstock.storage.commit import FileRecord
from penstock.storage.disk import CHUNK, hash_file, map_in_threads, translate_disk_full
from penstock.storage.errors import StoreError, StoreFull

T = TypeVar("T")

# A pause between tries is random up to a limit that starts at 0.5 s and doubles up to 16 s: about 15 s in total.
# Afterwards the operation fails, and the stage is retried.
NUM_TRIES = 7
PATIENCE = 300.0  # seconds after which no further try starts (a server that hangs costs one timeout per try)
_FIRST_PAUSE, _MAX_PAUSE = 0.25, 16.0
_NUM_FILES = 4  # concurrent uploads, each in up to _NUM_PARTS concurrent parts: at most 256 MiB in memory
_NUM_PARTS = 4
_NUM_RANGES = 8  # concurrent range requests of downloads: at most 128 MiB in memory
_NUM_DOWNLOADS = 3  # downloads of a file with a wrong hash before it is reported as damaged in the store
_MAX_PARTS = 10_000  # S3's limit of parts per upload

# Permanent errors: retrying is useless. All other errors may be transient network failures.
_PERMANENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PERMANENT += (NotImplementedError, ValueError, TypeError, LookupError, AttributeError, AssertionError)  # type: ignore[assignment]
_CREDENTIAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}  # of botocore
_PERMANENT_NAMES = _CREDENTIAL_ERRORS | {"ParamValidationError", "UnknownRegionError"}
_TRANSIENT_STATUS = (408, 409, 425, 429)
_TRANSIENT_CODES = {
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
    "SlowDown",
    "EntityTooSmall",  # this code and the next one: a part was truncated; a retry uploads the whole file again
    "InvalidPart",
}
_jitter = random.Random()  # separate, so that the run's seeded generators are not advanced


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_file_system(uri: str, options: dict[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the fsspec file system of a URI, and the URI's path in that file system."""
    protocol = uri.split("://", 1)[0] if "://" in uri else "file"
    try:
        if protocol in ("s3", "s3a"):
            config: dict[str, Any] = {"max_pool_connections": 2 * _NUM_FILES * _NUM_PARTS}
            if not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & set(os.environ):
                config["retries"] = {"total_max_attempts": 3, "mode": "standard"}  # with jitter
            options = {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
        fs, root = fsspec.core.url_to_fs(uri, **options)
    except Exception as error:  # fsspec drivers have their own error types
        problem = (
            f"cannot be opened ({type(error).__name__}: {error}): give --store a local path or a URI that fsspec "
            "supports, and --store-options that its fsspec driver accepts"
        )
        if isinstance(error, ImportError):
            package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
            problem = f"needs the package {package}, which is not installed ({error}): pip install {package}"
        raise StoreError(f"store {uri!r} {problem}") from error
    if _is_s3(fs):
        if not root or root.startswith("/"):
            raise StoreError(f"--store {uri} does not name a bucket: give s3://BUCKET or s3://BUCKET/PREFIX")
        fs.retries = 2  # instead of s3fs's default 5, since botocore and `call_with_retries` retry as well
    return fs, root


def _is_s3(fs: fsspec.AbstractFileSystem) -> bool:
    return "s3" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


# ---- retries ---------------------------------------------------------------------------------------------------------


def call_with_retries(call: Callable[[], T], operation: str, num_tries: int | None = None) -> T:
    """Return the result of `call`; retry transient failures with exponential backoff and jitter. Permanent errors (not
    found, exists, not permitted, not supported) are raised unchanged, others as StoreError with the description
    `operation` ("uploading <path>")."""
    start, number = time.monotonic(), 0
    while True:
        number += 1
        try:
            return call()
        except Exception as error:  # fsspec drivers have their own error types
            spent = time.monotonic() - start
            if _s3_error_code(error) == "NoSuchBucket":
                problem = "failed: the bucket does not exist; correct --store, or create it"
            elif type(error).__name__ in _CREDENTIAL_ERRORS:
                problem = (
                    f"needs credentials ({error}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or "
                    "give --store-options"
                )
            elif is_permanent_error(error):
                raise
            elif number == (num_tries or NUM_TRIES) or spent > PATIENCE:
                problem = (
                    f"failed {number} times in {spent:.0f} s, last with {type(error).__name__}: {error}; check that "
                    "the store is reachable, then run the same command again"
                )
            else:
                time.sleep(_jitter.uniform(0.0, min(_MAX_PAUSE, _FIRST_PAUSE * 2**number)))
                continue
            raise StoreError(f"{operation} {problem}") from error


def is_permanent_error(error: Exception) -> bool:
    """Return whether a retry of the failed operation cannot succeed."""
    response = _s3_response(error)
    if _s3_error_code(error) in _TRANSIENT_CODES:
        return False
    if isinstance(error, (StoreError, *_PERMANENT)) or type(error).__name__ in _PERMANENT_NAMES:
        return True
    if response is not None:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:  # gcsfs, azure, aiohttp. `__cause__` is not read: aiohttp reports a truncated body there as status 400.
        values = (getattr(error, name, None) for name in ("status_code", "status", "code"))
        status = next((value for value in values if isinstance(value, int)), None)
    return status is not None and 400 <= status < 500 and status not in _TRANSIENT_STATUS


def _s3_response(error: BaseException) -> dict[str, Any] | None:
    """Return the response in a botocore error, or in the botocore error from which s3fs raised `error`; else None."""
    responses = (getattr(raised, "response", None) for raised in (error, error.__cause__))
    return next((response for response in responses if isinstance(response, dict)), None)


def _s3_error_code(error: BaseException) -> str:
    """Return the S3 error code, for instance "SlowDown", or ""."""
    return str((_s3_response(error) or {}).get("Error", {}).get("Code", ""))


# ---- one small record ------------------------------------------------------------------------------------------------


def create(fs: fsspec.AbstractFileSystem, path: str, data: bytes, num_tries: int | None = None) -> bool:
    """Write `data` at `path` unless it exists. Return whether the content of `path` is now `data`.

    If the response to a successful create is lost, the repeated request (by `call_with_retries`, botocore or aiohttp,
    which silently repeats a PUT on a broken connection) reports that the object exists. So the existing object is read
    and compared with `data`. Several writers of equal bytes may therefore all get True: a record that only one writer
    may create needs content that is unique to the writer.
    """

    def attempt() -> bool:
        try:
            fs.pipe_file(path, data, mode="create")
        except Exception as error:
            # An existing object is reported differently: FileExistsError by s3fs for AWS and by gcsfs, a botocore error
            # by s3fs for MinIO and others (their response lacks the condition's name), either FileExistsError or
            # Azure's ResourceExistsError by adlfs.
            exists = isinstance(error, FileExistsError) or type(error).__name__ == "ResourceExistsError"
            if not exists and _s3_error_code(error) not in ("PreconditionFailed", "412"):
                raise
            try:
                return read(fs, path) == data
            except FileNotFoundError as gone:  # deleted between create and read: try again
                raise OSError(errno.EAGAIN, "the object existed, but was deleted before it could be read") from gone
        return True

    return call_with_retries(attempt, f"creating {path}", num_tries)


def read(fs: fsspec.AbstractFileSystem, path: str) -> bytes:
    """Return the content of a small file with one request (by default, s3fs would first request the size)."""
    data: bytes = fs.cat_file(path, max_concurrency=1) if _is_s3(fs) else fs.cat_file(path)
    return data


# ---- files -----------------------------------------------------------------------------------------------------------


def upload(fs: fsspec.AbstractFileSystem, files: Sequence[tuple[Path, str, int]]) -> None:
    """Upload files (local source, path in the store, size in bytes) in parallel, large ones in parts of at least CHUNK
    bytes, and check the stored sizes. No other process writes to these paths. S3 also checks the CRC32 that botocore
    sends with every part, so it rejects bytes that changed in transit."""

    def put(source: Path, path: str, num_bytes: int) -> None:
        chunk = max(CHUNK, math.ceil(num_bytes / _MAX_PARTS))
        try:
            fs.put_file(
                str(source), path, **({"chunksize": chunk, "max_concurrency": _NUM_PARTS} if _is_s3(fs) else {})
            )
        except FileExistsError:  # adlfs does not overwrite; an earlier try has left a file, perhaps incomplete
            fs.rm_file(path)
            raise OSError(errno.EAGAIN, "a file of an earlier upload existed and was deleted") from None
        except FileNotFoundError as error:  # NoSuchUpload: the response to the completion of an upload was lost
            if not source.exists():
                raise
            raise OSError(errno.EAGAIN, f"the multipart upload does not exist or has ended: {error}") from error
        fs.invalidate_cache()
        stored = fs.info(path)["size"]
        if stored != num_bytes:
            raise OSError(errno.EIO, f"the upload was truncated: {stored} of {num_bytes} bytes were stored")

    map_in_threads(lambda job: call_with_retries(lambda: put(*job), f"uploading {job[1]}"), files, _NUM_FILES)


def download(fs: fsspec.AbstractFileSystem, files: Sequence[tuple[str, FileRecord, Path]]) -> None:
    """Download committed files (path in the store, record, local target), which have their committed sizes, by parallel
    range requests. Verify their hashes."""

    def fetch(path: str, target: Path, start: int, num_bytes: int) -> None:
        data = fs.cat_file(path, start=start, end=start + num_bytes)
        if len(data) != num_bytes:
            raise OSError(
                errno.EIO, f"the download was truncated: {len(data)} of {num_bytes} bytes from offset {start}"
            )
        with translate_disk_full(target.parent), target.open("r+b") as file:
            file.seek(start)
            file.write(data)

    for _, record, target in files:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.truncate(record.bytes)
    pending = list(files)
    for number in range(1, _NUM_DOWNLOADS + 1):
        ranges = [
            (path, target, start, min(CHUNK, record.bytes - start))
            for path, record, target in pending
            for start in range(0, record.bytes, CHUNK)
        ]
        map_in_threads(lambda job: call_with_retries(lambda: fetch(*job), f"downloading {job[0]}"), ranges, _NUM_RANGES)
        hashes = map_in_threads(lambda job: hash_file(job[2]), pending, _NUM_RANGES)
        wrong = [(job, xxh3) for job, xxh3 in zip(pending, hashes, strict=True) if xxh3 != job[1].xxh3]
        if not wrong:
            return
        if number == _NUM_DOWNLOADS:
            (path, record, _), xxh3 = wrong[0]
            raise StoreError(
                f"{path} has hash {xxh3} after {number} downloads, but was committed with hash {record.xxh3}: "
                "restore it from a backup"
            )
        pending = [job for job, _ in wrong]


def modification_time(info: dict[str, Any]) -> float:
    """Return the modification time of a file, in seconds since the epoch, or 0 if the driver does not report it."""
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


def temporary_directory(num_bytes: int = 0) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary local directory for files to upload, or for `num_bytes` of downloads. Raises StoreFull if the
    downloads do not fit."""
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise StoreFull(
            f"a download of {num_bytes / 1e9:.1f} GB does not fit into {place} ({free / 1e9:.1f} GB free): "
            "set TMPDIR to a larger disk"
        )
    return tempfile.TemporaryDirectory(prefix="penstock-")
