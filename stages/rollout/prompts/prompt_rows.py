"""Validate rows of prompt files and convert them to canonical JSON. Errors name the file and line.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`, or `[prompt, label, metadata, tools]` if the row
has tools, or `[prompt, label, metadata, tools or null, images]` if it has images; other columns are ignored. An image
is a text: a path, a URI, or `data:;base64,...` with the bytes of a file. PromptSource hashes these lines to check that
a resumed run reads the same data. The same rows give the same lines in every format.

With `--num-data-workers`, worker processes convert the blocks. The rows and their order do not depend on the number of
processes: blocks are distributed round robin, and results are returned in order. A worker has one block at a time, to
bound the memory.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from pyarrow import types

from penstock.stages.rollout.text.templates import normalize_messages, preview
from penstock.stages.worker_process import WorkerLost, WorkerProcess
from penstock.storage.errors import DataError
from penstock.storage.samples.sample import HINT, TEACHER

_ROLE = re.compile(r"""["']role["']\s*:""")
MAX_PROMPT = 4 << 20  # characters, about a million tokens; tokenizers need 200 bytes of memory for each


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a prompt file that are read (`--input-key`, `--label-key`, ...); None: not read."""

    prompt: str
    label: str | None
    metadata: str
    tools: str | None
    teacher: str | None = None
    hint: str | None = None
    images: str | None = None


@dataclass(frozen=True)
class JsonRows:
    """A block of consecutive unparsed rows of a JSON file."""

    names: list[str]  # file and line of every row; the number of the row in an array
    rows: list[bytes]

    def __len__(self) -> int:
        return len(self.rows)

    def select_rows(self, start: int, stop: int | None) -> JsonRows:
        """Return rows `start` to `stop` - 1 of this block (counted from 0); None: to the end of the block."""
        return JsonRows(self.names[start:stop], self.rows[start:stop])

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and line, column -> value) of every row. Raises DataError if a row is not a JSON object."""
        for where, row in zip(self.names, self.rows):
            try:
                record = json.loads(row)
                problem = f"found a JSON {type(record).__name__}"
            except ValueError as error:  # JSON or UTF-8
                record, problem = None, f"malformed line ({error})"
            if not isinstance(record, dict):
                raise DataError(f"{where}: {problem}; every row must be one JSON object: repair or remove the row")
            yield where, record


@dataclass(frozen=True)
class ArrowRows:
    """A block of consecutive rows of a columnar file."""

    path: str
    first: int  # number of the first row in the file, from 0
    batch: pa.RecordBatch  # columns have the names in `Columns`, where `a.b` is field `b` of the file's column `a`

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def select_rows(self, start: int, stop: int | None) -> ArrowRows:
        """Return rows `start` to `stop` - 1 of this block (counted from 0); None: to the end of the block."""
        length = (len(self) if stop is None else min(stop, len(self))) - start
        return ArrowRows(self.path, self.first + start, self.batch.slice(start, length))

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and row, column -> value) of every row. Raises DataError if a value cannot be read."""
        names = self.batch.schema.names
        columns = [read_values(column, self.path, self.first, name) for name, column in zip(names, self.batch.columns)]
        for number in range(len(self)):
            yield (
                f"{self.path} row {self.first + number}",
                {name: values[number] for name, values in zip(names, columns)},
            )


Block = JsonRows | ArrowRows


@dataclass
class Rows:
    """Rows in canonical JSON, and the number (from 0) of the first row with each property; None: no such row."""

    rows: list[bytes] = field(default_factory=list)
    first_chat: int | None = None  # first row whose prompt is a list of messages
    first_unanswered: int | None = None  # first row that is not a conversation with an assistant message


# Fields of Rows with the number of the first row that has a certain property.
FIRST_ROW_KEYS = ("first_chat", "first_unanswered")


class PromptRow(NamedTuple):
    """A row of a prompt file."""

    prompt: Any  # text or messages
    label: str
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    images: Sequence[str] = ()  # in the order of the image parts of the messages


def fill_first_row_numbers(first_row_numbers: dict[str, int | None], part: Rows, num_before: int) -> None:
    """Set the entries of `first_row_numbers` (keys: FIRST_ROW_KEYS) that are still None from `part`. Row 0 of `part` is
    row `num_before` of the whole entry."""
    for key in FIRST_ROW_KEYS:
        if first_row_numbers[key] is None and (number := getattr(part, key)) is not None:
            first_row_numbers[key] = num_before + number


def to_canonical_rows(block: Block, columns: Columns) -> Rows:
    """Parse and validate a block of rows; return the rows in canonical JSON. Raises DataError."""
    result = Rows()
    for number, (where, record) in enumerate(block.records()):
        check_columns(record, where, columns)
        try:
            prompt, images = _read_prompt(record, columns)
            tools = None
            if columns.tools:
                tools = _parse_json_text(_value(record, columns.tools), columns.tools, "--tool-key")
            if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                raise DataError(
                    f"column {columns.tools!r} holds {preview(tools)}; tools must be a list of JSON schemas: repair "
                    "the row, name another column with --tool-key, or ignore tools with --tool-key ''"
                )
            row: list[tuple[str | None, Any]] = [
                (columns.prompt, prompt),
                (columns.label, _read_text(record, columns.label)),
                (columns.metadata, _read_metadata(record, columns)),
            ]
            if tools or images:
                row.append((columns.tools, tools or None))
            if images:
                row.append((columns.images or columns.prompt, images))
            parts = [_to_json(value, key) for key, value in row]
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        result.rows.append(f"[{','.join(parts)}]".encode(errors="surrogatepass"))
        if isinstance(prompt, list) and result.first_chat is None:
            result.first_chat = number
        if result.first_unanswered is None and not (
            isinstance(prompt, list) and any(m["role"] == "assistant" for m in prompt)
        ):
            result.first_unanswered = number
    return result


def parse_canonical_row(row: bytes) -> PromptRow:
    """Parse a row that was converted to canonical JSON."""
    return PromptRow(*json.loads(row))


def find_column(record: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the keys that lead to a column, or None if it is missing: `a.b` is the column `a.b` or, without such a
    column, the entry `b` of the column `a`."""
    if key in record:
        return [key]
    for name, inner in record.items():
        if not key.startswith(f"{name}."):
            continue
        if inner is None:  # a null column: the value of `b` is null, too
            return [name]
        if isinstance(inner, dict) and (rest := find_column(inner, key[len(name) + 1 :])):
            return [name, *rest]
    return None


def check_columns(record: Mapping[str, Any], where: str, columns: Columns) -> None:
    """Check that a record has the columns of prompt, label, teacher and hint. `where`: its file and row, for messages.
    Raises DataError."""
    of_teacher = ((columns.teacher, "--opd-teacher-key"), (columns.hint, "--opd-hint-key"))
    for key, flag in ((columns.prompt, "--input-key"), (columns.label, "--label-key"), *of_teacher):
        if key and find_column(record, key) is None:
            inner = record.get(key.partition(".")[0])
            names = [f"{key.partition('.')[0]}.{name}" for name in inner] if isinstance(inner, dict) else list(record)
            raise DataError(
                f"{where} has no column {key!r}; it has {', '.join(map(repr, names)) or 'none'}: name one of them with "
                f"{flag}"
            )


def _value(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or None if the record does not have the column."""
    path = find_column(record, key)
    if path is None:
        return None
    value: Any = record
    for name in path:
        value = value[name]
    return value


def _read_prompt(record: dict[str, Any], columns: Columns) -> tuple[str | list[dict[str, Any]], list[str]]:
    """Return the prompt, text or messages, and its images."""
    prompt = _value(record, columns.prompt)
    # Messages may be JSON text: CSV cannot hold them otherwise.
    if isinstance(prompt, str) and prompt.strip()[:1] == "[" and prompt.strip()[-1:] == "]" and _ROLE.search(prompt):
        prompt = _parse_json_text(prompt, columns.prompt, "--input-key")
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(
            f"column {columns.prompt!r} holds {preview(prompt)}; a prompt is text, or a list of "
            "messages with role and content: repair the row, or name another column with --input-key"
        )
    in_place: list[Any] = []
    of_column = _read_image_column(record, columns.images) if columns.images else None
    if isinstance(prompt, str) and (of_column or (of_column is not None and PLACEHOLDER in prompt)):
        prompt = [{"role": "user", "content": prompt}]
    try:
        prompt = prompt if isinstance(prompt, str) else normalize_messages(prompt, in_place)
        images = [] if isinstance(prompt, str) else place_images(prompt, in_place, of_column)
    except DataError as error:
        raise DataError(f"column {columns.prompt!r}: {error}; repair the row") from None
    num_characters = 0
    for content in [prompt] if isinstance(prompt, str) else [message["content"] or "" for message in prompt]:
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        num_characters += sum(map(len, texts))
    if num_characters > MAX_PROMPT:
        raise DataError(
            f"column {columns.prompt!r} holds {num_characters} characters, but a prompt has at most "
            f"{MAX_PROMPT}: remove the row"
        )
    return prompt, images


def _read_metadata(record: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the metadata of a row, with the name of its teacher and its hint if they have columns."""
    metadata = _parse_json_text(_value(record, columns.metadata), columns.metadata, "--metadata-key")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise DataError(
            f"column {columns.metadata!r} holds a {type(metadata).__name__}; metadata must be a dictionary: "
            "repair the row, or name another column with --metadata-key"
        )
    for key, name, flag in ((columns.teacher, TEACHER, "--opd-teacher-key"), (columns.hint, HINT, "--opd-hint-key")):
        if key:
            metadata = {**metadata, name: _read_text(record, key)}
            if not metadata[name]:
                raise DataError(f"column {key!r} is empty: fill it, or name another column with {flag}")
    return metadata


def _read_text(record: dict[str, Any], key: str | None) -> str:
    """Return the value of a column as text; a value that is missing (null, NaN) is empty."""
    value = _value(record, key) if key else None
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return format(value, "f")
    return _to_json(value, key, separators=None, allow_nan=False)


def _parse_json_text(value: Any, key: str, flag: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"column {key!r} is text but not JSON ({error}): repair the row, or name another column with {flag}"
        ) from None


def _to_json(value: Any, key: str | None, **style: Any) -> str:
    style = {"separators": (",", ":"), **style}
    try:
        return json.dumps(value, ensure_ascii=False, default=_decimal_to_number, **style)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {key!r} has a value that cannot be written as JSON ({error}): convert the column"
        ) from None


def _decimal_to_number(value: Any) -> int | float:
    if not isinstance(value, Decimal):
        raise TypeError(f"a {type(value).__name__}")
    number: int | float = json.loads(format(value, "f"))  # the number that a JSON file with these digits has
    return number


# ---- images ----------------------------------------------------------------------------------------------------------


PLACEHOLDER = "<image>"  # in a text of the prompt, with --multimodal-keys: the place of the next image of the column
_SPLIT_AT_PLACEHOLDER = re.compile(f"({PLACEHOLDER})")


def place_images(messages: list[dict[str, Any]], in_place: Sequence[Any], of_column: Sequence[str] | None) -> list[str]:
    """Replace the placeholders in the texts of normalized messages by image parts, in place, and return the images in
    the order of their parts. `in_place`: the image of every image part that the messages have, or None; such a part
    gets the next image of the column, like a placeholder. Without a column (None), texts have no placeholders."""
    images, own, column, num_places = list[str](), iter(in_place), iter(of_column or ()), 0
    for message in messages:
        parts: list[dict[str, Any]] = []
        for text, image in _pieces(message["content"], own, of_column is not None and message["role"] != "assistant"):
            if text is not None:
                parts += [{"type": "text", "text": text}] if text else []
                continue
            parts.append({"type": "image"})
            if image is None:
                num_places, image = num_places + 1, next(column, None)
            images += [] if image is None else [to_image_source(image)]
        if {"type": "image"} in parts:
            message["content"] = parts
    if num_places != len(of_column or ()):
        raise DataError(
            f"there are {num_places} places for images ({PLACEHOLDER}, or image parts without an image), but the "
            f"column of --multimodal-keys has {len(of_column or ())} images: both numbers must be equal"
        )
    return images


def _pieces(content: Any, own: Iterator[Any], has_placeholders: bool) -> Iterator[tuple[str | None, Any]]:
    """Yield (text, None), or (None, image) for an image part, or (None, None) for one without an image and for a
    placeholder."""
    for part in [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content:
        if part["type"] == "image":
            yield None, next(own)
            continue
        for text in _SPLIT_AT_PLACEHOLDER.split(part["text"]) if has_placeholders else [part["text"]]:
            yield (None if has_placeholders and text == PLACEHOLDER else text), None


def to_image_source(value: Any) -> str:
    """Return an image of a row as text: a path, a URI, or the bytes of the file in base64. Raises DataError."""
    image = value
    if isinstance(value, dict):  # `Image` of Hugging Face data sets, or OpenAI's {"url": ...}
        image = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(image, bytes | bytearray | memoryview):
        return f"data:;base64,{base64.b64encode(image).decode()}"
    if isinstance(image, str) and image.strip():
        return image
    raise DataError(
        f"the image {preview(value)} is neither a path, nor a URI, nor the bytes of a file, nor a dictionary with "
        "`bytes` or `path`"
    )


def _read_image_column(record: dict[str, Any], key: str) -> list[str]:
    """Return the images in the column `key`: a list or one image. A missing column or null is an empty list."""
    value = _value(record, key)
    if isinstance(value, str) and value.strip()[:1] == "[":
        value = _parse_json_text(value, key, "--multimodal-keys")
    values = value if isinstance(value, list) else [] if value is None or value == "" else [value]
    try:
        return [to_image_source(each) for each in values]
    except DataError as error:
        raise DataError(f"column {key!r}: {error}; repair the row") from None


# ---- values of Arrow -------------------------------------------------------------------------------------------------


Convert = Callable[[Any], Any]


def read_values(column: pa.Array, path: str, first: int, name: str) -> list[Any]:
    """Return the values of a column as Python objects. The other arguments are for messages: file, number of the first
    row, name of the column. Raises DataError."""
    convert = _converter(column.type)
    try:
        values = column.to_pylist()
        return values if convert is None else [None if value is None else convert(value) for value in values]
    except (ValueError, TypeError) as error:  # text that is not UTF-8, a struct with two fields of one name
        if len(column) > 1:
            rows = (read_values(column.slice(row, 1), path, first + row, name) for row in range(len(column)))
            return [value for values in rows for value in values]
        raise DataError(
            f"{path} row {first}: column {name!r} of type {column.type} cannot be read ({error}): convert the column"
        ) from None


@lru_cache(maxsize=256)
def _converter(kind: pa.DataType) -> Convert | None:
    """Return the function that converts values of an Arrow type (except None) to values that JSON can express; None:
    values stay as they are."""
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if types.is_struct(kind):
        inner_of = {field.name: _converter(field.type) for field in kind}
        return lambda struct: {
            name: _apply(inner_of[name], value) for name, value in struct.items() if value is not None
        }
    if types.is_map(kind):
        inner = _converter(kind.item_type)
        return lambda entries: {str(key): _apply(inner, value) for key, value in entries}
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or _is_list(kind):
        inner = _converter(kind.value_type)
        return inner if inner is None or not _is_list(kind) else lambda values: [_apply(inner, v) for v in values]
    if types.is_float32(kind) or types.is_float16(kind):
        scalar = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: float(str(scalar(value)))
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return lambda value: value.isoformat()
    return None


def _apply(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _is_list(kind: pa.DataType) -> bool:
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    return is_view or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


# ---- worker processes ------------------------------------------------------------------------------------------------


def parse_blocks(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    """Parse blocks of rows, and yield the canonical rows of every block in order. With one worker or one block, parse
    in this process. Raises DataError."""
    rest = iter(blocks)
    first = list(islice(rest, 2 if num_workers > 1 else 0))
    blocks = chain(first, rest)
    if len(first) < 2:
        yield from (to_canonical_rows(block, columns) for block in blocks)
        return
    workers: list[WorkerProcess] = []
    running: deque[Future[Rows]] = deque()
    with ExitStack() as stack:
        try:
            for number, block in enumerate(blocks):
                if len(workers) < num_workers:
                    workers.append(WorkerProcess(prepare_parsing, columns).start())
                    stack.callback(workers[-1].close)
                else:
                    yield running.popleft().result()
                running.append(workers[number % num_workers].submit(block, math.inf))
            while running:
                yield running.popleft().result()
        except WorkerLost:
            raise RuntimeError(
                "a parsing process (--num-data-workers) died: resume the run, with fewer workers if memory is short"
            ) from None


def prepare_parsing(columns: Columns) -> Callable[[Block], Rows]:
    """Return the function that parses a block in a worker process."""
    return partial(to_canonical_rows, columns=columns)
