"""Rows on the disk instead of in memory (`--streaming-data`): half a byte of memory per row, whatever its length.

Canonical rows are written once, line by line, into a file of the cache directory, whatever they were read from (compressed, columnar,
remote); any row of it is then one small read. The next start finds the file again as long as the source files have not changed.
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

from stages.rollout.prompts.rows import FIRST, Columns, Rows, update_first
from storage.errors import DataError

FORMAT = 2  # of the files; a change of rows.py raises it too
STRIDE = 16  # rows of which one has its place noted
_CHUNK = 1 << 20

Spooled = tuple["SpooledRows", dict[str, int | None]]  # rows, and FIRST of rows.py


class SpooledRows(Sequence[bytes]):
    """The rows of one file of lines.

    Args:
        path: the file; it is kept open, and may be removed meanwhile.
        places: [ceil(rows / STRIDE)] where rows 0, STRIDE, 2 x STRIDE ... begin.
        num_rows: all of them.
        num_bytes: size of the file.
    """

    def __init__(self, path: Path, places: np.ndarray, num_rows: int, num_bytes: int) -> None:
        self.places = places
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
        return self._stride(row // STRIDE).split(b"\n")[row % STRIDE]

    def content(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of rows `start` to `stop`, a line break behind each, in pieces."""
        place, end = self._place(start), self._place(stop)
        while place < end:
            piece = self._read(place, min(_CHUNK, end - place))
            yield piece
            place += len(piece)

    def _place(self, row: int) -> int:
        """Where a row begins; that of the last one's successor is the size of the file."""
        if row >= self.num_rows:
            return self.num_bytes
        lines = self._stride(row // STRIDE).split(b"\n")[: row % STRIDE]
        return int(self.places[row // STRIDE]) + sum(len(line) + 1 for line in lines)

    def _stride(self, number: int) -> bytes:
        start = int(self.places[number])
        stop = int(self.places[number + 1]) if number + 1 < len(self.places) else self.num_bytes
        return self._read(start, stop - start)

    def _read(self, place: int, length: int) -> bytes:
        pieces = []
        while length:
            piece = os.pread(self._descriptor, length, place)
            if not piece:
                raise RuntimeError("a file of the prompt cache was cut short while it was in use: remove it and start again")
            pieces.append(piece)
            place, length = place + len(piece), length - len(piece)
        return b"".join(pieces)


def spooled(
    parts: Callable[[], Iterable[Rows]], entry: str, columns: Columns, content: Sequence[str], cache: str | None
) -> Spooled:
    """The rows of an entry of --prompt-data, from the cache if they are there, else by writing them.

    Args:
        parts: reads the rows.
        entry: name of the entry.
        columns: those that were read.
        content: one text per source file that changes when the file does.
        cache: directory; by default `penstock/prompts` in the user's cache directory.

    Raises:
        DataError: the directory cannot be written or is full, or whatever `parts` raises.
    """
    disk = _Cache(Path(cache) if cache else default_cache())
    name = f"{_hash(entry, *astuple(columns))}-{_hash(FORMAT, *content)}"
    with disk.explained():
        disk.directory.mkdir(parents=True, exist_ok=True)
        if found := disk.open(name):
            return found
    disk.write(name, parts())
    with disk.explained():
        for old in disk.directory.glob(f"{name.partition('-')[0]}-*"):  # the same entry as it was before
            if old.stem != name and old.suffix in (".rows", ".npz"):
                old.unlink(missing_ok=True)
        if found := disk.open(name):
            return found
    raise RuntimeError(f"{entry} was changed by somebody while it was read: start again")


def default_cache() -> Path:
    """Where rows are kept if nothing is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "prompts"


@dataclass(frozen=True)
class _Cache:
    """The directory with the files: `<name>.rows`, and `<name>.npz` with the places and what is known of all rows."""

    directory: Path

    def open(self, name: str) -> Spooled | None:
        """The index comes last, so where it is, the rows are; their size is compared all the same."""
        rows, index = (self.directory / f"{name}{suffix}" for suffix in (".rows", ".npz"))
        try:
            with np.load(index, allow_pickle=False) as loaded:
                places, about = loaded["places"], json.loads(str(loaded["about"]))
            if rows.stat().st_size != about["bytes"]:
                return None
            return SpooledRows(rows, places, about["rows"], about["bytes"]), {key: about[key] for key in FIRST}
        except (FileNotFoundError, ValueError, KeyError, EOFError, BadZipFile):
            return None  # not there, or of no use: it is written anew

    def write(self, name: str, parts: Iterable[Rows]) -> None:
        places, num_rows, num_bytes = array("Q"), 0, 0
        first: dict[str, int | None] = dict.fromkeys(FIRST)
        with self._new_file(f"{name}.rows") as file:
            for part in parts:
                update_first(first, part, num_rows)
                for row in part.rows:
                    if num_rows % STRIDE == 0:
                        places.append(num_bytes)
                    num_rows += 1
                    num_bytes += len(row) + 1
                with self.explained():
                    file.write(b"".join(row + b"\n" for row in part.rows))
        about = {"rows": num_rows, "bytes": num_bytes, **first}
        with self._new_file(f"{name}.npz") as file:
            np.savez(file, places=np.frombuffer(places, dtype=np.uint64), about=np.array(json.dumps(about)))

    @contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        """A file that has its name only when it is whole and on the disk; nothing is left if the block fails."""
        with self.explained():
            descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=name, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb", buffering=_CHUNK) as file:
                yield file
                with self.explained():
                    file.flush()
                    os.fsync(file.fileno())
                    Path(temporary).replace(self.directory / name)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What the disk says, as a sentence."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DataError(
                f"{self.directory} cannot keep the rows of --streaming-data ({'no space left' if full else error.strerror or error}): "
                "name a directory on a larger disk with --data-cache, or leave out --streaming-data"
            ) from error


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
