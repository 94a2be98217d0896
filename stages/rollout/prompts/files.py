"""Where prompts come from: JSONL and Parquet, local or on any fsspec URI, globs and slices. What is wrong is said with file and line.

One entry of --prompt-data is one sequence of rows: a file, or all files that match a pattern, one after another; `@[a:b]` behind it
takes rows a to b of that sequence. How a row must look is rows.py's; order and epochs are source.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.rows import FIRST, Block, Columns, JsonLines, ParquetRows, Rows, missing_column, update_first
from stages.rollout.prompts.spool import spooled
from stages.rollout.prompts.workers import canonical_blocks
from storage.errors import DataError

JSONL = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_BLOCK_BYTES = 1 << 20  # of JSONL read at a time; also what a worker is given
_BLOCK_ROWS = 1024  # of Parquet


@dataclass(frozen=True)
class Entry:
    """One entry of --prompt-data, read: its rows in memory or on the disk, and what a flow must know of them all."""

    name: str
    rows: Sequence[bytes]
    first: dict[str, int | None]  # first_chat, first_unanswered and first_unlabelled of rows.Rows


def read_entry(entry: str, config: RolloutConfig) -> Entry:
    """All rows of an entry; with `config.streaming_data` they lie on the disk.

    Raises:
        DataError: missing or empty file, unknown format, malformed line, missing column, or a prompt of another type.
    """
    path, start, stop = parse_slice(entry)
    files, columns = _Files.find(path), Columns.of(config)
    if (start or 0) < 0 or (stop or 0) < 0:  # from the end: count first
        start, stop, _ = slice(start, stop).indices(sum(len(block) for block in files.blocks(columns)))

    def parts() -> Iterator[Rows]:
        return canonical_blocks(_between(files.blocks(columns), start or 0, stop), columns, config.num_data_workers)

    if config.streaming_data:
        name = f"{files.place}@[{start}:{stop}]"
        return _checked(Entry(entry, *spooled(parts, name, columns, files.fingerprints(), config.data_cache)))
    rows: list[bytes] = []
    first: dict[str, int | None] = dict.fromkeys(FIRST)
    for part in parts():
        update_first(first, part, len(rows))
        rows += part.rows
    return _checked(Entry(entry, rows, first))


def column_names(entry: str) -> list[str]:
    """Return the columns of the first row of an entry, for messages. Raises DataError as `read_entry` does."""
    name, file = (files := _Files.find(parse_slice(entry)[0])).files[0]
    if _plain(name).endswith(".parquet"):
        with _explained(name), files.fs.open(file, "rb") as opened:
            return list(pq.read_schema(opened).names)
    blocks = files.blocks(Columns("", None, "", None))
    return next((list(record) for block in blocks for _, record in block.records()), [])


def parse_slice(entry: str) -> tuple[str, int | None, int | None]:
    """`path@[a:b]` -> (path, a, b); None where no number stands."""
    match = _SLICE.fullmatch(entry)
    if match is None:
        return entry, None, None
    start, stop = (None if number in ("", "-") else int(number) for number in (match["start"], match["stop"]))
    return match["path"], start, stop


def _checked(entry: Entry) -> Entry:
    if not entry.rows:
        what = "takes no row" if _SLICE.fullmatch(entry.name) else "is empty"
        raise DataError(f"prompt file {entry.name} {what}: give --prompt-data a file with at least one row")
    return entry


@dataclass(frozen=True)
class _Files:
    """The files of a path or a pattern."""

    fs: Any
    place: str  # absolute, with its protocol
    files: list[tuple[str, str]]  # name for the reader, path for the file system

    @classmethod
    def find(cls, path: str) -> _Files:
        try:
            fs, inner = fsspec.core.url_to_fs(path)
        except (ValueError, ImportError) as error:  # unknown protocol, or its package is not installed
            raise DataError(
                f"prompt file {path} cannot be opened ({error}): give a local path or a URI that fsspec knows"
            ) from None
        files = [(path, inner)]
        with _explained(path):
            if set("*?[") & set(inner) and not fs.exists(inner):
                local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
                files = [(name if local else fs.unstrip_protocol(name), name) for name in sorted(fs.glob(inner), key=_natural)]
        if not files:
            raise DataError(f"no file matches {path}: give --prompt-data JSONL or Parquet files")
        for name, _ in files:
            if not _plain(name).endswith((*JSONL, ".parquet")):
                raise DataError(
                    f"{name} is neither JSONL ({', '.join(JSONL)}) nor Parquet (.parquet): convert it, or give it the right ending"
                )
        return cls(fs, fs.unstrip_protocol(inner), files)

    def blocks(self, columns: Columns) -> Iterator[Block]:
        """The rows of all files, raw; shard-2 comes before shard-10."""
        for name, file in self.files:
            is_parquet = _plain(name).endswith(".parquet")
            with _explained(name), self.fs.open(file, "rb", compression=None if is_parquet else "infer") as opened:
                yield from _parquet_blocks(opened, name, columns) if is_parquet else _jsonl_blocks(opened, name)

    def fingerprints(self) -> list[str]:
        """Per file something that changes when it does, without reading it."""
        with _explained(self.place):
            return [self.fs.ukey(file) for _, file in self.files]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts names by the value of the numbers in them."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _plain(file: str) -> str:
    """The name without the ending of a compression."""
    name = file.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"prompt file {path} does not exist: give --prompt-data JSONL or Parquet files") from None
    except PermissionError:
        raise DataError(f"prompt file {path} may not be read by this user: change its permissions") from None


def _between(blocks: Iterator[Block], start: int, stop: int | None) -> Iterator[Block]:
    """Rows `start` to `stop` of all blocks; nothing else is looked at."""
    first = 0  # number of the block's first row
    with closing(blocks):  # type: ignore[type-var]
        for block in blocks:
            if stop is not None and first >= stop:
                return
            after = first + len(block)
            if after > start:
                part = block if first >= start and (stop is None or after <= stop) else None
                yield part or block.cut(max(start - first, 0), None if stop is None else stop - first)
            first = after


def _jsonl_blocks(file: BinaryIO, path: str) -> Iterator[JsonLines]:
    number, rest = 1, b""
    while True:
        try:
            data = file.read(_BLOCK_BYTES)
        except (EOFError, OSError) as error:  # a compressed file that is cut short or damaged
            raise DataError(f"{path} cannot be read beyond line {number - 1} ({error}): write it again") from None
        end = data.rfind(b"\n") + 1 if data else 0
        if data and not end:  # a line longer than a block
            rest += data
            continue
        lines = (rest + data[:end]).split(b"\n")
        rest = data[end:]
        kept = [(index, line) for index, line in enumerate(lines, start=number) if line.strip()]
        number += len(lines) - 1
        if kept:
            yield JsonLines(path, [index for index, _ in kept], [line for _, line in kept])
        if not data:
            return


def _parquet_blocks(file: BinaryIO, path: str, columns: Columns) -> Iterator[ParquetRows]:
    try:
        # Both, or a whole column of a row group is held at once, and many writers make one row group of a million rows
        # (pyarrow 25: 207 MB for a group of 201 MB; 19 MB like this).
        parquet = pq.ParquetFile(file, buffer_size=_BLOCK_BYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file ({error}): write it again") from None
    found = parquet.schema_arrow.names
    for key in filter(None, (columns.prompt, columns.label)):
        if key not in found:
            raise DataError(missing_column(path, key, found, columns))
    wanted = [key for key in (columns.prompt, columns.label, columns.metadata, columns.tools) if key in found]
    number = 0
    try:
        for batch in parquet.iter_batches(_BLOCK_ROWS, columns=wanted):
            yield ParquetRows(path, number, batch)
            number += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read beyond row {number} ({error}): write it again") from None
