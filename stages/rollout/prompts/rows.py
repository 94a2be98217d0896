"""Validate rows of prompt files and convert them to their canonical form. Errors name file and line.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`, or `[prompt, label, metadata, tools]` if the row
has tools. This form is compact, and PromptSource hashes it to check that a resumed run reads the same data. Other
columns are ignored. files.py opens the files; the functions here are pure, so worker processes can run them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.stages.rollout.config import PromptConfig
from penstock.storage.errors import DataError


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read."""

    prompt: str
    label: str | None
    metadata: str
    tools: str | None

    @classmethod
    def of(cls, config: PromptConfig) -> Columns:
        """Return the column names that a config gives."""
        tools = "tools" if config.tool_key is None else config.tool_key or None
        return cls(config.input_key, config.label_key, config.metadata_key, tools)


@dataclass(frozen=True)
class JsonLines:
    """Non-blank lines of a JSONL file."""

    path: str
    numbers: list[int]  # line number of every line, from 1
    lines: list[bytes]

    def __len__(self) -> int:
        return len(self.lines)

    def cut(self, start: int, stop: int | None) -> JsonLines:
        """Return rows `start` to `stop` of this block."""
        return JsonLines(self.path, self.numbers[start:stop], self.lines[start:stop])

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and line, columns) of every row. Raises DataError for a line that is not a JSON object."""
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
    """Rows of a Parquet file."""

    path: str
    first: int  # number of the first row in the file, from 0
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def cut(self, start: int, stop: int | None) -> ParquetRows:
        """Return rows `start` to `stop` of this block."""
        length = (len(self) if stop is None else min(stop, len(self))) - start
        return ParquetRows(self.path, self.first + start, self.batch.slice(start, length))

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and row, columns) of every row."""
        for number, record in enumerate(self.batch.to_pylist(), start=self.first):
            yield f"{self.path} row {number}", record


Block = JsonLines | ParquetRows


@dataclass
class Rows:
    """Canonical rows, and the numbers (from 0) of the first rows with certain properties; None: no row has it."""

    rows: list[bytes] = field(default_factory=list)
    first_chat: int | None = None  # first row whose prompt is a list of messages
    first_unanswered: int | None = None  # first row that is not a conversation with an assistant message
    first_unlabelled: int | None = None  # first row whose label is empty


FIRST = ("first_chat", "first_unanswered", "first_unlabelled")


def update_first(first: dict[str, int | None], part: Rows, num_before: int) -> None:
    """Set the row numbers in `first` that are still None from `part`, whose rows follow `num_before` other rows."""
    for key in FIRST:
        if first[key] is None and (number := getattr(part, key)) is not None:
            first[key] = num_before + number


def canonical(block: Block, columns: Columns) -> Rows:
    """Return the canonical rows of a block.

    Raises:
        DataError: malformed line, missing column, or a prompt, metadata or tools of the wrong type.
    """
    result = Rows()
    for number, (where, record) in enumerate(block.records()):
        prompt = _prompt(record, where, columns)
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
        row = [prompt, label, _metadata(record.get(columns.metadata), where, columns.metadata)]
        if columns.tools and (tools := _tools(record.get(columns.tools), where, columns.tools)):
            row.append(tools)
        result.rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str).encode())
    return result


def missing_column(where: str, key: str, names: list[str], columns: Columns) -> str:
    """Return the error message for a missing column."""
    flag = "--input-key" if key == columns.prompt else "--label-key"
    return (
        f"{where} has no column {key!r}; it has {', '.join(map(repr, names)) or 'none'}: name one of them with {flag}"
    )


def _prompt(record: dict[str, Any], where: str, columns: Columns) -> str | list[dict[str, Any]]:
    for key in filter(None, (columns.prompt, columns.label)):
        if key not in record:
            raise DataError(missing_column(where, key, list(record), columns))
    prompt: str | list[dict[str, Any]] = record[columns.prompt]
    if not is_text_or_messages(prompt):
        raise DataError(
            f"{where}: column {columns.prompt!r} holds {_short(prompt)}; a prompt is text, or a list of "
            "messages with role and content: repair the row, or name another column with --input-key"
        )
    return prompt


def is_text_or_messages(prompt: Any) -> bool:
    """Return whether `prompt` is valid: non-empty text, or a non-empty list of `{"role", "content"}`."""
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    )


def _metadata(value: Any, where: str, key: str) -> dict[str, Any]:
    """Return metadata as a dictionary; JSON text is parsed, and None becomes {}."""
    value = _parse_json_text(value, where, key, "--metadata-key")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: column {key!r} holds a {type(value).__name__}; metadata must be a dictionary: repair the row, "
            "or name another column with --metadata-key"
        )
    return value


def _tools(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    """Return tool definitions as a list; JSON text is parsed, and None becomes []. Null fields, which Parquet adds, are
    removed."""
    value = _parse_json_text(value, where, key, "--tool-key")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: column {key!r} holds {_short(value)}; tools must be a list of definitions (JSON schemas): "
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


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
