"""Read prompt files from local paths or fsspec URIs, with glob patterns and slices. Errors name the file and line.

An entry of --prompt-data is a sequence of rows: those of a file, or of all files that match a glob pattern, one after
another. The suffix `@[a:b]` selects rows a to b - 1 of the sequence. prompt_rows.py validates the rows; source.py
orders them.

There are two kinds of blocks: JSON text (JSON files, and CSV files, whose values are text), and record batches of all
formats that pyarrow reads. Pipes, devices and decompression bombs are refused, because reading them might not end.
docs/design/0028-our-own-reading-of-prompts.md says why the files are not read by pyarrow.dataset.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
from fsspec.utils import infer_compression
from pyarrow import types

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.prompt_rows import (
    FIRST_ROW_KEYS,
    ArrowRows,
    Block,
    Columns,
    JsonRows,
    Rows,
    check_columns,
    fill_first_row_numbers,
    find_column,
    parse_blocks,
)
from penstock.stages.rollout.prompts.spool import open_spooled_rows
from penstock.storage.errors import DataError, OptionError

JSON = (".jsonl", ".json", ".ndjson")
CSV = (".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_BLOCK_BYTES = 1 << 20  # bytes of a JSON file that are read at a time, and parsed as one block
_BLOCK_ROWS = 1024  # rows of a columnar file that are parsed as one block
_IMAGE_BLOCK_ROWS = 32  # the same for rows with images, which may be megabytes each
_MAX_ROW = 16 << 20  # maximum bytes or characters of a row of a JSON file, or of a line or value of a CSV file
_DECODER = json.JSONDecoder()
_BEFORE_ELEMENT = re.compile(r"\s*[\[,]\s*")
_END = re.compile(r"\s*\[?\s*\]\s*")


@dataclass(frozen=True)
class PromptEntry:
    """The rows of one entry of --prompt-data in canonical JSON, in memory or on disk."""

    name: str
    rows: Sequence[bytes]
    first: dict[str, int | None]  # first_chat, first_unanswered -> row number; see prompt_rows.Rows


def read_prompt_files(config: PromptConfig) -> Iterator[PromptEntry]:
    """Read and yield every entry of --prompt-data. Raises OptionError or DataError."""
    if not config.prompt_data:
        raise OptionError("--prompt-data is missing: give files with prompts")
    for entry in config.prompt_data:
        yield read_entry(entry, config)


def read_entry(entry: str, config: PromptConfig) -> PromptEntry:
    """Read all rows of an entry of --prompt-data; with `config.streaming_data`, to disk. Raises DataError."""
    path, start, stop = parse_slice(entry)
    tools = "tools" if config.tool_key is None else config.tool_key or None
    of_teacher = config.opd_teacher_key, config.opd_hint_key
    images = config.multimodal_keys.get("image")
    columns = Columns(config.input_key, config.label_key, config.metadata_key, tools, *of_teacher, images)
    files = _Files.find(path)
    if (start or 0) < 0 or (stop or 0) < 0:  # negative indices count from the end, which needs the total number of rows
        start, stop, _ = slice(start, stop).indices(sum(len(block) for block in files.blocks(columns)))

    def parts() -> Iterator[Rows]:
        return parse_blocks(_select_rows(files.blocks(columns), start or 0, stop), columns, config.num_data_workers)

    if config.streaming_data:
        with _translate_file_errors(files.uri):  # a fingerprint changes when the file changes; it reads no content
            fingerprints = [files.fs.ukey(file) for _, file in files.files]
        name = f"{files.uri}@[{start}:{stop}]"
        read = PromptEntry(entry, *open_spooled_rows(parts, name, columns, fingerprints, config.data_cache))
    else:
        rows: list[bytes] = []
        read = PromptEntry(entry, rows, dict.fromkeys(FIRST_ROW_KEYS))
        for part in parts():
            fill_first_row_numbers(read.first, part, len(rows))
            rows += part.rows
    if not read.rows:
        problem = "selects no row: correct @[a:b]" if _SLICE.fullmatch(entry) else "is empty: add rows to the file"
        raise DataError(f"prompt file {entry} {problem}")
    return read


def read_column_names(entry: str) -> list[str]:
    """Return the names of the columns of an entry of --prompt-data, which has rows. Raises DataError."""
    files = _Files.find(parse_slice(entry)[0])
    for name, file in files.files:
        with files.open(name, file) as opened:
            if suffix_of(name) in COLUMNAR:
                return list(field_names(open_batches(opened, suffix_of(name), 1)[0]))
            for block in _csv_blocks(opened, name) if suffix_of(name) in CSV else _jsonl_blocks(opened, name):
                return list(next(block.records())[1])
    return []


def parse_slice(entry: str) -> tuple[str, int | None, int | None]:
    """Split `path@[a:b]` into (path, a, b); a missing number is None."""
    match = _SLICE.fullmatch(entry)
    if match is None:
        return entry, None, None
    start, stop = (None if number in ("", "-") else int(number) for number in (match["start"], match["stop"]))
    return match["path"], start, stop


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
        names = [inner]
        with _translate_file_errors(path):
            if set("*?[") & set(inner) and not fs.exists(inner):
                names = sorted(fs.glob(inner), key=natural_sort_key)
            if not names:
                raise DataError(f"no prompt file matches {path}: correct the pattern, or create the files")
            files = [file for name in names for file in _files_of_data_set(fs, name)]
        local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
        return cls(
            fs,
            fs.unstrip_protocol(inner),
            [(path if file == inner else file if local else fs.unstrip_protocol(file), file) for file in files],
        )

    def blocks(self, columns: Columns) -> Iterator[Block]:
        """Yield the unparsed rows of all files, in natural order of the file names (shard-2 precedes shard-10)."""
        for name, file in self.files:
            with self.open(name, file) as opened:
                if suffix_of(name) in COLUMNAR:
                    yield from _arrow_blocks(opened, name, columns)
                else:
                    yield from _csv_blocks(opened, name) if suffix_of(name) in CSV else _jsonl_blocks(opened, name)

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        """Open one of the files, decompressed according to its suffix. Raises DataError if it cannot be opened, and
        while it is read if it is damaged or a decompression bomb."""
        with _translate_file_errors(name):
            info, compression = self.fs.info(file), infer_compression(file)
            if info["type"] == "other":
                raise DataError(f"{name} is a pipe or a device instead of a file: copy its content into a file")
            with self.fs.open(file, "rb", compression=compression) as opened:
                yield cast(BinaryIO, _Decompressed(opened, name, info["size"])) if compression else opened


def natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key for file names that compares numbers in the names by value."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def suffix_of(file: str) -> str:
    """Return the suffix of a file name in lower case, without a compression suffix."""
    name = file.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return PurePosixPath(name).suffix


def _files_of_data_set(fs: Any, path: str) -> list[str]:
    """Return the files of a directory that `datasets.save_to_disk` wrote; for a file, the file. Raises DataError."""
    if suffix_of(path) in DATA_SUFFIXES:
        return [path]
    problem = f"is neither JSONL ({', '.join(JSON)}) nor {', '.join((*COLUMNAR, *CSV))}: convert or rename it"
    try:
        if fs.exists(f"{path}/state.json"):
            state = json.loads(fs.cat_file(f"{path}/state.json"))
            return [f"{path}/{file['filename']}" for file in state["_data_files"]]
        if fs.exists(f"{path}/dataset_dict.json"):
            splits = json.loads(fs.cat_file(f"{path}/dataset_dict.json"))["splits"]
            problem = f"has the splits {', '.join(splits)}: name one of them, as in {path}/{splits[0]}"
        elif fs.isdir(path):
            problem = (
                f"is a directory that save_to_disk did not write: name its files with a pattern, such as "
                f"{path}/*.parquet"
            )
        elif not fs.exists(path):
            problem = "does not exist: correct the path, or create the file"
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"{path}: state.json or dataset_dict.json is damaged ({error!r}): save the data again"
        ) from None
    raise DataError(f"{path} {problem}")


@contextmanager
def _translate_file_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}): correct the path"
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            problem = "does not exist: correct the path, or create the file"
        elif isinstance(error, PermissionError):
            problem = "is not readable by this user: change its permissions"
        raise DataError(f"prompt file {path} {problem}") from None


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


def _jsonl_blocks(file: BinaryIO, path: str) -> Iterator[JsonRows]:
    number, rest = 1, b""
    while True:
        data = _read(file, path, f"line {number - 1}")
        if (
            number == 1
            and not rest
            and suffix_of(path) == ".json"
            and data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
        ):
            yield from _array_blocks(file, path, data)
            return
        end = data.rfind(b"\n") + 1 if data else 0
        if data and not end:  # a line longer than a block
            rest += data
            if len(rest) > _MAX_ROW:
                raise DataError(
                    f"{path}:{number}: the line has more than {_MAX_ROW >> 20} MiB, but every line must be the JSON "
                    "object of one row: split the file into lines"
                )
            continue
        lines = (rest + data[:end]).split(b"\n")
        rest = data[end:]
        kept = [(index, line) for index, line in enumerate(lines, start=number) if line.strip()]
        number += len(lines) - 1
        if kept:
            yield JsonRows([f"{path}:{index}" for index, _ in kept], [line for _, line in kept])
        if not data:
            return


def _array_blocks(file: BinaryIO, path: str, data: bytes) -> Iterator[JsonRows]:
    """Yield the elements of a file that is one JSON array and begins with `data`."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    number, text, problem = 0, "", ""
    while True:
        try:
            text += decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} row {number} is not UTF-8 ({error}): convert the file") from None
        elements, at = list[bytes](), 0
        while match := _BEFORE_ELEMENT.match(text, at):
            try:
                _, end = _DECODER.raw_decode(text, match.end())
            except (ValueError, RecursionError) as error:  # malformed, or its end has not been read yet
                problem = str(error)
                break
            elements.append(text[match.end() : end].encode())
            at = end
        text = text[at:]
        if elements:
            yield JsonRows([f"{path} row {number + index}" for index in range(len(elements))], elements)
            number += len(elements)
        if not data or len(text) > _MAX_ROW:
            break
        data = _read(file, path, f"row {number}")
    if not _END.fullmatch(text):
        raise DataError(
            f"{path} row {number}: malformed element of the array ({problem or 'found no comma or ]'}), but every "
            "element must be one JSON object: repair or remove it"
        )


def _read(file: BinaryIO, path: str, where: str) -> bytes:
    try:
        return file.read(_BLOCK_BYTES)
    except (EOFError, OSError) as error:  # a truncated or damaged compressed file
        raise DataError(f"{path} cannot be read beyond {where} ({error}): restore the file") from None


def _csv_blocks(file: BinaryIO, path: str) -> Iterator[JsonRows]:
    """Yield the rows as JSON objects whose values are text, because CSV has no types: 007 and 2.00 are not changed.

    pyarrow.csv would read 32 blocks ahead, and refuse a row that is longer than two blocks (pyarrow 25).
    """
    csv.field_size_limit(_MAX_ROW)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    rows = csv.reader(_limited_lines(text, path), delimiter="," if suffix_of(path) == ".csv" else "\t", strict=True)
    number = 0
    try:
        header = next(filter(None, rows), [])
        while part := list(islice(filter(None, rows), _BLOCK_ROWS)):
            names = [f"{path} row {number + index}" for index in range(len(part))]
            for name, row in zip(names, part):
                if len(row) != len(header):
                    raise DataError(f"{name} has {len(row)} values for {len(header)} columns: repair the row")
            yield JsonRows(names, [json.dumps(dict(zip(header, row))).encode() for row in part])
            number += len(part)
    except (csv.Error, EOFError, OSError, UnicodeError) as error:
        raise DataError(
            f"{path} cannot be read beyond line {rows.line_num} ({error}): restore or convert the file"
        ) from None


def _limited_lines(file: io.TextIOWrapper, path: str) -> Iterator[str]:
    while line := file.readline(_MAX_ROW):
        if len(line) == _MAX_ROW:
            raise DataError(f"{path} has a line of more than {_MAX_ROW} characters: shorten it, or give another format")
        yield line


def _arrow_blocks(file: BinaryIO, path: str, columns: Columns) -> Iterator[ArrowRows]:
    number = 0
    try:
        num_rows = _BLOCK_ROWS if columns.images is None else _IMAGE_BLOCK_ROWS
        schema, read_batches = open_batches(file, suffix_of(path), num_rows)
        names = field_names(schema)
        check_columns(names, path, columns)
        keys = [key for key in astuple(columns) if key]
        found = {key: column for key in keys if (column := find_column(names, key))}
        for batch in read_batches(list({column[0]: None for column in found.values()})):
            arrays = [  # a field of a struct is null where the struct is null
                pc.struct_field(batch.column(first), inner) if inner else batch.column(first)
                for first, *inner in found.values()
            ]
            selected = pa.RecordBatch.from_arrays(arrays, names=list(found))
            for start in range(0, len(selected), num_rows):
                yield ArrowRows(path, number + start, selected.slice(start, num_rows))
            number += len(selected)
    except DataError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        problem = (
            f"cannot be read beyond row {number}" if number else f"is not a {suffix_of(path)[1:].capitalize()} file"
        )
        raise DataError(f"{path} {problem} ({error!s:.200}): restore the file") from None


# ---- Arrow and Parquet -----------------------------------------------------------------------------------------------


COLUMNAR = (".parquet", ".arrow", ".feather")
DATA_SUFFIXES = (*JSON, *CSV, *COLUMNAR)
Batches = Callable[[list[str]], Iterable[pa.RecordBatch]]  # column names -> record batches with these columns


def open_batches(file: BinaryIO, suffix: str, num_rows: int) -> tuple[pa.Schema, Batches]:
    """Return the schema of a columnar file, and a function that reads its record batches."""
    if suffix == ".parquet":
        # Without both arguments, pyarrow keeps a whole column of a row group in memory, and many writers make groups of
        # a million rows (pyarrow 25, row group of 201 MB: 207 MB without, 19 MB with both).
        parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        return parquet.schema_arrow, lambda names: parquet.iter_batches(num_rows, columns=names)
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema, lambda names: (batch.select(names) for batch in batches)


def field_names(fields: Iterable[pa.Field]) -> dict[str, Any]:
    """Return the names of columns, or of the fields of a struct. The value of a name is True or, for a struct, the
    names of its fields."""
    return {field.name: field_names(field.type) if types.is_struct(field.type) else True for field in fields}


# ---- compression -----------------------------------------------------------------------------------------------------


MAX_RATIO = 200  # decompressed bytes per byte of the file; text has up to 20, a bomb 1,000 and more
FREE_BYTES = 256 << 20  # the ratio is checked only after so many decompressed bytes


class _Decompressed(io.RawIOBase):
    """A decompressed file. Reading it raises DataError if the compressed file is damaged or a decompression bomb."""

    def __init__(self, file: Any, name: str, compressed_bytes: int) -> None:
        self._file, self._name, self._num_bytes = file, name, 0
        self._limit = max(FREE_BYTES, MAX_RATIO * compressed_bytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # decompressors have their own error types
            raise DataError(
                f"{self._name} is damaged after {self._num_bytes} decompressed bytes ({error}): restore the file"
            ) from None
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            raise DataError(
                f"{self._name} has more than {self._limit} bytes when decompressed, {MAX_RATIO} times its size: "
                "decompress it yourself if the file is as large as this"
            )
        buffer[: len(data)] = data
        return len(data)
