"""Validate rows of prompt files and convert them to canonical JSON. Errors name the file and line.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`, or `[prompt, label, metadata, tools]` if the row
has tools; other columns are ignored. PromptSource hashes these lines to check that a resumed run reads the same data.
files.py opens the files; the functions here are pure, so worker processes can call them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.text.messages import normalize_messages
from penstock.storage.errors import DataError


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
class JsonLines:
    """A block of consecutive non-blank lines of a JSONL file, not parsed yet."""

    path: str
    numbers: list[int]  # line number in the file of every line, from 1
    lines: list[bytes]

    def __len__(self) -> int:
        return len(self.lines)

    def select_rows(self, start: int, stop: int | None) -> JsonLines:
        """Return rows `start` to `stop` - 1 of this block (counted from 0); None: to the end of the block."""
        return JsonLines(self.path, self.numbers[start:stop], self.lines[start:stop])

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and line, column -> value) of every row. Raises DataError if a line is not a JSON object."""
        for number, line in zip(self.numbers, self.lines):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # JSON or UTF-8
                raise DataError(
                    f"{where}: malformed line ({error}); every line must be one JSON object: repair or remove the line"
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: found a JSON {type(record).__name__}; every line must be one JSON object: "
                    "repair or remove the line"
                )
            yield where, record


@dataclass(frozen=True)
class ParquetRows:
    """A block of consecutive rows of a Parquet file."""

    path: str
    first: int  # number of the first row in the file, from 0
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def select_rows(self, start: int, stop: int | None) -> ParquetRows:
        """Return rows `start` to `stop` - 1 of this block (counted from 0); None: to the end of the block."""
        length = (len(self) if stop is None else min(stop, len(self))) - start
        return ParquetRows(self.path, self.first + start, self.batch.slice(start, length))

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and row, column -> value) of every row."""
        for number, record in enumerate(self.batch.to_pylist(), start=self.first):
            yield f"{self.path} row {number}", record


Block = JsonLines | ParquetRows


@dataclass
class Rows:
    """Rows in canonical JSON, and the number (from 0) of the first row with each property; None: no such row."""

    rows: list[bytes] = field(default_factory=list)
    first_chat: int | None = None  # first row whose prompt is a list of messages
    first_unanswered: int | None = None  # first row that is not a conversation with an assistant message
    first_unlabelled: int | None = None  # first row whose label is empty


# Fields of Rows with the number of the first row that has a certain property.
FIRST_ROW_KEYS = ("first_chat", "first_unanswered", "first_unlabelled")


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
        label = record[columns.label] if columns.label else ""
        if not isinstance(label, str):
            label = "" if label is None else json.dumps(label, ensure_ascii=False, default=str)
        if not label and result.first_unlabelled is None:
            result.first_unlabelled = number
        row = [prompt, label, _parse_metadata(record.get(columns.metadata), where, columns.metadata)]
        if columns.tools and (tools := _parse_tools(record.get(columns.tools), where, columns.tools)):
            row.append(tools)
        result.rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str).encode())
    return result


def describe_missing_column(where: str, key: str, names: list[str], columns: Columns) -> str:
    """Return the error message for a missing column."""
    flag = "--input-key" if key == columns.prompt else "--label-key"
    return (
        f"{where} has no column {key!r}; it has {', '.join(map(repr, names)) or 'none'}: name one of them with {flag}"
    )


def _read_prompt(record: dict[str, Any], where: str, columns: Columns) -> str | list[dict[str, Any]]:
    for key in filter(None, (columns.prompt, columns.label)):
        if key not in record:
            raise DataError(describe_missing_column(where, key, list(record), columns))
    prompt = record[columns.prompt]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where}: column {columns.prompt!r} holds {_json_preview(prompt)}; a prompt is text, or a list of "
            "messages with role and content: repair the row, or name another column with --input-key"
        )
    try:
        return normalize_messages(prompt)
    except DataError as error:
        raise DataError(f"{where}: column {columns.prompt!r}: {error}; repair the row") from None


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
    """Return the tool definitions of a row as a list; JSON text is parsed, None becomes [], and null fields (which
    Parquet adds) are removed."""
    value = _parse_json_text(value, where, key, "--tool-key")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: column {key!r} holds {_json_preview(value)}; tools must be a list of JSON schemas: "
            "repair the row, name another column with --tool-key, or ignore tools with --tool-key ''"
        )
    return [_without_nulls(tool) for tool in value]


def _parse_json_text(value: Any, where: str, key: str, flag: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise DataError(
            f"{where}: column {key!r} is text but not JSON ({error}): repair the row, or name another column with "
            f"{flag}"
        ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _json_preview(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
