"""Validate rows of prompt files and convert them to canonical JSON. Errors name the file and line.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`, or `[prompt, label, metadata, tools]` if the row
has tools; other columns are ignored. PromptSource hashes these lines to check that a resumed run reads the same data.
files.py opens the files; the functions here are pure, so worker processes can call them.

The same rows give the same lines in every format; arrow.py says how values of Arrow are converted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.arrow import read_values
from penstock.stages.rollout.text.messages import normalize_messages, preview
from penstock.storage.errors import DataError

_ROLE = re.compile(r"""["']role["']\s*:""")
MAX_PROMPT = 4 << 20  # characters, about a million tokens; tokenizers need 200 bytes of memory for each


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a prompt file that are read; None: not read."""

    prompt: str
    label: str | None
    metadata: str
    tools: str | None

    @classmethod
    def from_config(cls, config: PromptConfig) -> Columns:
        """Return the column names that the options name (`--input-key`, `--label-key`, ...)."""
        tools = "tools" if config.tool_key is None else config.tool_key or None
        return cls(config.input_key, config.label_key, config.metadata_key, tools)


@dataclass(frozen=True)
class JsonRows:
    """A block of consecutive rows of a JSON file, not parsed yet."""

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
            except ValueError as error:  # JSON or UTF-8
                raise DataError(
                    f"{where}: malformed line ({error}); every line must be one JSON object: repair or remove the line"
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: found a JSON {type(record).__name__}; every row must be one JSON object: "
                    "repair or remove the row"
                )
            yield where, record


@dataclass(frozen=True)
class ArrowRows:
    """A block of consecutive rows of a columnar file."""

    path: str
    first: int  # number of the first row in the file, from 0
    batch: pa.RecordBatch  # its columns have the names that `Columns` has: `a.b` is field `b` of column `a`

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


def fill_first_row_numbers(first_row_numbers: dict[str, int | None], part: Rows, num_before: int) -> None:
    """Set the entries of `first_row_numbers` (keys: FIRST_ROW_KEYS) that are still None from `part`. Row 0 of `part` is
    row `num_before` of the whole entry."""
    for key in FIRST_ROW_KEYS:
        if first_row_numbers[key] is None and (number := getattr(part, key)) is not None:
            first_row_numbers[key] = num_before + number


def to_canonical_rows(block: Block, columns: Columns) -> Rows:
    """Parse and validate a block of rows; return the rows in canonical JSON.

    Raises:
        DataError: a line is malformed, a column is missing, or a prompt, metadata or tools have the wrong type.
    """
    result = Rows()
    for number, (where, record) in enumerate(block.records()):
        prompt = _read_prompt(record, where, columns)
        if isinstance(prompt, list) and result.first_chat is None:
            result.first_chat = number
        if result.first_unanswered is None and not (
            isinstance(prompt, list) and any(m["role"] == "assistant" for m in prompt)
        ):
            result.first_unanswered = number
        label = _read_label(record, where, columns)
        metadata = _parse_metadata(_value(record, columns.metadata), where, columns.metadata)
        row = [(columns.prompt, prompt), (columns.label, label), (columns.metadata, metadata)]
        if columns.tools and (tools := _parse_tools(_value(record, columns.tools), where, columns.tools)):
            row.append((columns.tools, tools))
        parts = [_to_json(value, where, key) for key, value in row]
        result.rows.append(f"[{','.join(parts)}]".encode(errors="surrogatepass"))
    return result


def find_column(record: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the keys that lead to a column, or None if it is missing: `a.b` is the column `a.b` or, without such a
    column, the entry `b` of the column `a`."""
    if key in record:
        return [key]
    for name, inner in record.items():
        if not key.startswith(f"{name}."):
            continue
        if inner is None:  # null has no entries: the value of each is null
            return [name]
        if isinstance(inner, dict) and (rest := find_column(inner, key[len(name) + 1 :])):
            return [name, *rest]
    return None


def check_columns(record: Mapping[str, Any], where: str, columns: Columns) -> None:
    """Check that a record has the columns of prompt and label. Raises DataError."""
    for key, flag in ((columns.prompt, "--input-key"), (columns.label, "--label-key")):
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


def _read_prompt(record: dict[str, Any], where: str, columns: Columns) -> str | list[dict[str, Any]]:
    check_columns(record, where, columns)
    prompt = _value(record, columns.prompt)
    if isinstance(prompt, str) and _is_messages_text(prompt):
        prompt = _parse_json_text(prompt, where, columns.prompt, "--input-key")
    if isinstance(prompt, str) and prompt:
        _check_length(len(prompt), where, columns)
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where}: column {columns.prompt!r} holds {preview(prompt)}; a prompt is text, or a list of "
            "messages with role and content: repair the row, or name another column with --input-key"
        )
    try:
        messages = normalize_messages(prompt)
    except DataError as error:
        raise DataError(f"{where}: column {columns.prompt!r}: {error}; repair the row") from None
    _check_length(sum(len(message["content"] or "") for message in messages), where, columns)
    return messages


def _check_length(num_characters: int, where: str, columns: Columns) -> None:
    if num_characters > MAX_PROMPT:
        raise DataError(
            f"{where}: column {columns.prompt!r} holds {num_characters} characters, but a prompt has at most "
            f"{MAX_PROMPT}: remove the row"
        )


def _is_messages_text(prompt: str) -> bool:
    """Return whether a prompt is messages as JSON text; CSV cannot hold messages otherwise."""
    text = prompt.strip()
    return text[:1] == "[" and text[-1:] == "]" and _ROLE.search(text) is not None


def _read_label(record: dict[str, Any], where: str, columns: Columns) -> str:
    """Return the label as text; a label that is missing (null, NaN) is empty."""
    label = _value(record, columns.label) if columns.label else None
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return ""
    if isinstance(label, str):
        return label
    if isinstance(label, Decimal):
        return format(label, "f")
    return _to_json(label, where, columns.label, separators=None, allow_nan=False)


def _parse_metadata(value: Any, where: str, key: str) -> dict[str, Any]:
    """Return the metadata of a row as a dictionary; JSON text is parsed, and None becomes {}."""
    value = _parse_json_text(value, where, key, "--metadata-key")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: column {key!r} holds a {type(value).__name__}; metadata must be a dictionary: repair the row, "
            "or name another column with --metadata-key"
        )
    return value


def _parse_tools(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    """Return the tool definitions of a row as a list; JSON text is parsed, and None becomes []."""
    value = _parse_json_text(value, where, key, "--tool-key")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: column {key!r} holds {preview(value)}; tools must be a list of JSON schemas: "
            "repair the row, name another column with --tool-key, or ignore tools with --tool-key ''"
        )
    return value


def _parse_json_text(value: Any, where: str, key: str, flag: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: column {key!r} is text but not JSON ({error}): repair the row, or name another column with "
            f"{flag}"
        ) from None


def _to_json(value: Any, where: str, key: str | None, **style: Any) -> str:
    style = {"separators": (",", ":"), **style}
    try:
        return json.dumps(value, ensure_ascii=False, default=_decimal_to_number, **style)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: column {key!r} holds what JSON text cannot ({error}): convert the column") from None


def _decimal_to_number(value: Any) -> int | float:
    if not isinstance(value, Decimal):
        raise TypeError(f"a {type(value).__name__}")
    number: int | float = json.loads(format(value, "f"))  # as if the row were JSON
    return number
