"""Keep prompt rows on disk instead of in memory (`--streaming-data`); only an index stays in memory (half a byte per
row).

Rows in canonical JSON are written once, one per line, to a file in the cache directory, even if the source is
compressed, columnar or remote. Any row can then be fetched with one small read. Later starts, also of other
runs, reuse the cached file if the source files have not changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO, overload
from zipfile import BadZipFile

import numpy as np

from penstock.stages.rollout.prompts.prompt_rows import FIRST_ROW_KEYS, Columns, Rows, fill_first_row_numbers
from penstock.storage.errors import DataError

FORMAT = 3  # version of the cached files; must also be incremented when the rows change
STRIDE = 16  # the index stores the byte offset of every STRIDE-th row
_CHUNK = 1 << 20  # bytes of one read or write

Spooled = tuple["SpooledRows", dict[str, int | None]]  # rows, and FIRST_ROW_KEYS -> row number (see prompt_rows.py)


class SpooledRows(Sequence[bytes]):
    """The rows of a file with one row per line, each read when it is accessed. The file stays open, so it may be
    deleted while it is used. `offsets`: byte offsets of rows 0, STRIDE, 2 x STRIDE ... [ceil(num_rows / STRIDE)]"""

    def __init__(self, path: Path, offsets: np.ndarray, num_rows: int, num_bytes: int) -> None:
        self.offsets = offsets
        self.num_rows = num_rows
        self.num_bytes = num_bytes
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, row: int) -> bytes: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(self.num_rows))]
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        return self._read_stride(row // STRIDE).split(b"\n")[row % STRIDE]

    def read_bytes(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield rows `start` to `stop` - 1 as bytes, each row with its line break, in chunks of up to 1 MiB."""
        offset, end = self._offset_of_row(start), self._offset_of_row(stop)
        while offset < end:
            piece = self._read(offset, min(_CHUNK, end - offset))
            yield piece
            offset += len(piece)

    def _offset_of_row(self, row: int) -> int:
        """Return the byte offset of a row; for `num_rows` or more, the size of the file."""
        if row >= self.num_rows:
            return self.num_bytes
        lines = self._read_stride(row // STRIDE).split(b"\n")[: row % STRIDE]
        return int(self.offsets[row // STRIDE]) + sum(len(line) + 1 for line in lines)

    def _read_stride(self, number: int) -> bytes:
        start = int(self.offsets[number])
        stop = int(self.offsets[number + 1]) if number + 1 < len(self.offsets) else self.num_bytes
        return self._read(start, stop - start)

    def _read(self, offset: int, length: int) -> bytes:
        pieces = []
        while length:
            piece = os.pread(self._descriptor, length, offset)
            if not piece:
                raise RuntimeError(
                    "a file in the prompt cache (--data-cache) was truncated while it was in use: delete the "
                    "cache directory and resume the run"
                )
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)


def open_spooled_rows(
    parts: Callable[[], Iterable[Rows]], entry: str, columns: Columns, fingerprints: Sequence[str], cache: str | None
) -> Spooled:
    """Return the rows of an entry of --prompt-data from the cache (`--data-cache`; default: `penstock/prompts` in the
    user's cache directory). If the cache does not have them, write them first. `fingerprints`: strings that change when
    the source files change. Raises DataError."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    disk = _Cache(Path(cache or Path(user_cache, "penstock/prompts")))
    identities = ([entry, *astuple(columns)], [FORMAT, *fingerprints])
    hashes = [hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:16] for identity in identities]
    name = "-".join(hashes)
    with disk.as_data_errors():
        disk.directory.mkdir(parents=True, exist_ok=True)
        if found := disk.open(name):
            return found
    disk.write(name, parts())
    with disk.as_data_errors():
        for old in disk.directory.glob(f"{hashes[0]}-*"):  # cached files of older versions of the entry
            if old.stem != name and old.suffix in (".rows", ".npz"):
                old.unlink(missing_ok=True)
        if found := disk.open(name):
            return found
    raise RuntimeError(f"prompt data {entry} changed while it was being read: resume the run when the file is complete")


@dataclass(frozen=True)
class _Cache:
    """The cache directory. For each data set, `<name>.rows` has the rows, and `<name>.npz` has the byte offset of every
    STRIDE-th row, the number of rows, and for each of FIRST_ROW_KEYS the number of the first row with this property."""

    directory: Path

    def open(self, name: str) -> Spooled | None:
        """Return the cached rows; None if a file is missing or damaged, or if `<name>.rows` does not have the size that
        `<name>.npz` records."""
        rows, index = (self.directory / f"{name}{suffix}" for suffix in (".rows", ".npz"))
        try:
            with np.load(index, allow_pickle=False) as loaded:
                offsets, about = loaded["places"], json.loads(str(loaded["about"]))
            if rows.stat().st_size != about["bytes"]:
                return None
            return SpooledRows(rows, offsets, about["rows"], about["bytes"]), {
                key: about[key] for key in FIRST_ROW_KEYS
            }
        except (FileNotFoundError, ValueError, KeyError, EOFError, BadZipFile):
            return None  # the caller writes the files again

    def write(self, name: str, parts: Iterable[Rows]) -> None:
        offsets, num_rows, num_bytes = array("Q"), 0, 0
        first: dict[str, int | None] = dict.fromkeys(FIRST_ROW_KEYS)
        with self._new_file(f"{name}.rows") as file:
            for part in parts:
                fill_first_row_numbers(first, part, num_rows)
                for row in part.rows:
                    if num_rows % STRIDE == 0:
                        offsets.append(num_bytes)
                    num_rows += 1
                    num_bytes += len(row) + 1
                with self.as_data_errors():
                    file.write(b"".join(row + b"\n" for row in part.rows))
        about = {"rows": num_rows, "bytes": num_bytes, **first}
        with self._new_file(f"{name}.npz") as file:
            np.savez(file, places=np.frombuffer(offsets, dtype=np.uint64), about=np.array(json.dumps(about)))

    @contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        """Yield a temporary file; after the `with` block, rename it to `name`; if the block raises, delete it."""
        with self.as_data_errors():
            descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=name, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb", buffering=_CHUNK) as file:
                yield file
                with self.as_data_errors():
                    file.flush()
                    os.fsync(file.fileno())
                    Path(temporary).replace(self.directory / name)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @contextmanager
    def as_data_errors(self) -> Iterator[None]:
        """Convert an OSError raised in the `with` block into a DataError that names the cache directory."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DataError(
                f"{self.directory} cannot store the prompts of --streaming-data "
                f"({'no space left' if full else error.strerror or error}): "
                "name a writable directory with enough space with --data-cache, or omit --streaming-data"
            ) from error
