"""Read prompt files: JSONL and Parquet, from local paths or fsspec URIs, with glob patterns and slices. Errors name the
file and line.

An entry of --prompt-data is a sequence of rows: those of a file, or of all files that match a glob pattern, one after
another. The suffix `@[a:b]` selects rows a to b - 1 of the sequence. rows.py validates the rows; source.py orders them.
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

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.rows import (
    FIRST_ROW_KEYS,
    Block,
    Columns,
    JsonLines,
    ParquetRows,
    Rows,
    describe_missing_column,
    fill_first_row_numbers,
)
from penstock.stages.rollout.prompts.spool import open_spooled_rows
from penstock.stages.rollout.prompts.workers import parse_blocks
from penstock.storage.errors import DataError, OptionError

JSONL = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_BLOCK_BYTES = 1 << 20  # bytes of a JSONL file that are read at a time, and parsed as one block
_BLOCK_ROWS = 1024  # rows of a Parquet file that are read at a time, and parsed as one block


@dataclass(frozen=True)
class PromptEntry:
    """The rows of one entry of --prompt-data in canonical JSON, in memory or on disk."""

    name: str
    rows: Sequence[bytes]
    first: dict[str, int | None]  # first_chat, first_unanswered, first_unlabelled -> row number; see rows.Rows


def read_prompt_files(config: PromptConfig) -> Iterator[PromptEntry]:
    """Read and yield every entry of --prompt-data.

    Raises:
        OptionError: --prompt-data is missing.
        DataError: see `read_entry`.
    """
    if not config.prompt_data:
        raise OptionError("--prompt-data is missing: give JSONL or Parquet files with prompts")
    for entry in config.prompt_data:
        yield read_entry(entry, config)


def read_entry(entry: str, config: PromptConfig) -> PromptEntry:
    """Read all rows of an entry of --prompt-data; with `config.streaming_data`, they are kept on disk.

    Raises:
        DataError: missing or empty file, unknown format, malformed line, missing column, or invalid prompt.
    """
    path, start, stop = parse_slice(entry)
    files, columns = _Files.find(path), Columns.from_config(config)
    if (start or 0) < 0 or (stop or 0) < 0:  # negative indices count from the end, which needs the total number of rows
        start, stop, _ = slice(start, stop).indices(sum(len(block) for block in files.blocks(columns)))

    def parts() -> Iterator[Rows]:
        return parse_blocks(_select_rows(files.blocks(columns), start or 0, stop), columns, config.num_data_workers)

    if config.streaming_data:
        name = f"{files.uri}@[{start}:{stop}]"
        spool = open_spooled_rows(parts, name, columns, files.fingerprints(), config.data_cache)
        return _check_not_empty(PromptEntry(entry, *spool))
    rows: list[bytes] = []
    first: dict[str, int | None] = dict.fromkeys(FIRST_ROW_KEYS)
    for part in parts():
        fill_first_row_numbers(first, part, len(rows))
        rows += part.rows
    return _check_not_empty(PromptEntry(entry, rows, first))


def column_names(entry: str) -> list[str]:
    """Return the column names in the first row of an entry, for error messages. Raises DataError like `read_entry`."""
    name, file = (files := _Files.find(parse_slice(entry)[0])).files[0]
    if _without_compression(name).endswith(".parquet"):
        with _translate_file_errors(name), files.fs.open(file, "rb") as opened:
            return list(pq.read_schema(opened).names)
    blocks = files.blocks(Columns("", None, "", None))
    return next((list(record) for block in blocks for _, record in block.records()), [])


def parse_slice(entry: str) -> tuple[str, int | None, int | None]:
    """Split `path@[a:b]` into (path, a, b); a missing number is None."""
    match = _SLICE.fullmatch(entry)
    if match is None:
        return entry, None, None
    start, stop = (None if number in ("", "-") else int(number) for number in (match["start"], match["stop"]))
    return match["path"], start, stop


def _check_not_empty(entry: PromptEntry) -> PromptEntry:
    if not entry.rows:
        problem = "selects no row: correct @[a:b]" if _SLICE.fullmatch(entry.name) else "is empty: add rows to the file"
        raise DataError(f"prompt file {entry.name} {problem}")
    return entry


@dataclass(frozen=True)
class _Files:
    """The files that a path or a glob pattern names."""

    fs: Any  # fsspec file system
    uri: str  # absolute path or glob pattern, with the protocol
    files: list[tuple[str, str]]  # (name for messages, path in the file system)

    @classmethod
    def find(cls, path: str) -> _Files:
        try:
            fs, inner = fsspec.core.url_to_fs(path)
        except (ValueError, ImportError) as error:  # unknown protocol, or the package for the protocol is not installed
            raise DataError(
                f"prompt file {path} cannot be opened ({error}): give a local path or a URI that fsspec supports, and "
                "install the package for its protocol"
            ) from None
        files = [(path, inner)]
        with _translate_file_errors(path):
            if set("*?[") & set(inner) and not fs.exists(inner):
                local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
                files = [
                    (name if local else fs.unstrip_protocol(name), name)
                    for name in sorted(fs.glob(inner), key=natural_sort_key)
                ]
        if not files:
            raise DataError(f"no prompt file matches {path}: correct the pattern, or create the files")
        for name, _ in files:
            if not _without_compression(name).endswith((*JSONL, ".parquet")):
                raise DataError(
                    f"{name} is neither JSONL ({', '.join(JSONL)}) nor Parquet (.parquet): convert or rename it"
                )
        return cls(fs, fs.unstrip_protocol(inner), files)

    def blocks(self, columns: Columns) -> Iterator[Block]:
        """Yield the unparsed rows of all files, in natural order of the file names (shard-2 precedes shard-10)."""
        for name, file in self.files:
            is_parquet = _without_compression(name).endswith(".parquet")
            with (
                _translate_file_errors(name),
                self.fs.open(file, "rb", compression=None if is_parquet else "infer") as opened,
            ):
                yield from _parquet_blocks(opened, name, columns) if is_parquet else _jsonl_blocks(opened, name)

    def fingerprints(self) -> list[str]:
        """Return one string per file, which changes when the file changes; computed without reading the content."""
        with _translate_file_errors(self.uri):
            return [self.fs.ukey(file) for _, file in self.files]


def natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key for file names that compares numbers in the names by value."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _without_compression(file: str) -> str:
    """Return the file name in lower case, without a compression suffix."""
    name = file.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name


@contextmanager
def _translate_file_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"prompt file {path} does not exist: correct the path, or create the file") from None
    except PermissionError:
        raise DataError(f"prompt file {path} is not readable by this user: change its permissions") from None


def _select_rows(blocks: Iterator[Block], start: int, stop: int | None) -> Iterator[Block]:
    """Yield only rows `start` to `stop` - 1, counted over all blocks; other rows are not parsed."""
    first = 0  # number of the first row of the current block
    with closing(blocks):  # type: ignore[type-var]
        for block in blocks:
            if stop is not None and first >= stop:
                return
            after = first + len(block)
            if after > start:
                part = block if first >= start and (stop is None or after <= stop) else None
                yield part or block.select_rows(max(start - first, 0), None if stop is None else stop - first)
            first = after


def _jsonl_blocks(file: BinaryIO, path: str) -> Iterator[JsonLines]:
    number, rest = 1, b""
    while True:
        try:
            data = file.read(_BLOCK_BYTES)
        except (EOFError, OSError) as error:  # a truncated or damaged compressed file
            raise DataError(f"{path} cannot be read beyond line {number - 1} ({error}): restore the file") from None
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
        # Without both arguments, pyarrow keeps a whole column of a row group in memory, and many writers make row
        # groups of a million rows (pyarrow 25, row group of 201 MB: 207 MB without, 19 MB with both).
        parquet = pq.ParquetFile(file, buffer_size=_BLOCK_BYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file ({error}): restore the file") from None
    names = parquet.schema_arrow.names
    for key in filter(None, (columns.prompt, columns.label)):
        if key not in names:
            raise DataError(describe_missing_column(path, key, names, columns))
    wanted = [key for key in (columns.prompt, columns.label, columns.metadata, columns.tools) if key in names]
    number = 0
    try:
        for batch in parquet.iter_batches(_BLOCK_ROWS, columns=wanted):
            yield ParquetRows(path, number, batch)
            number += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read beyond row {number} ({error}): restore the file") from None
