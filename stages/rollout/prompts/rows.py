"""What a row of a prompt file must look like, and the one form in which it is kept. What is wrong with it is said here, with its place.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`, and `[..., tools]` behind it where the row has tools: compact for
millions of rows, and what the data source hashes to prove that a resumed run still sees the same data. Other columns do not matter.
Files are opened by files.py; here is nothing but functions from records to rows, so that any process can do it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from stages.rollout.config import RolloutConfig
from storage.errors import DataError


@dataclass(frozen=True)
class Columns:
    """Names of the columns that matter."""

    prompt: str
    label: str | None
    metadata: str
    tools: str | None

    @classmethod
    def of(cls, config: RolloutConfig) -> Columns:
        """Those that a config names."""
        tools = "tools" if config.tool_key is None else config.tool_key or None
        return cls(config.input_key, config.label_key, config.metadata_key, tools)


@dataclass(frozen=True)
class JsonLines:
    """Some lines of a JSONL file, none of them blank."""

    path: str
    numbers: list[int]  # of the lines, from 1
    lines: list[bytes]

    def __len__(self) -> int:
        return len(self.lines)

    def cut(self, start: int, stop: int | None) -> JsonLines:
        """Rows `start` to `stop` of this block."""
        return JsonLines(self.path, self.numbers[start:stop], self.lines[start:stop])

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and content of every row. Raises DataError for a line that is not a JSON object."""
        for number, line in zip(self.numbers, self.lines):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # JSON or UTF-8
                raise DataError(
                    f"{where}: malformed line ({error}); every line must be one JSON object: repair or remove it"
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: found a JSON {type(record).__name__}; every line must be one JSON object: repair or remove it"
                )
            yield where, record


@dataclass(frozen=True)
class ParquetRows:
    """Some rows of a Parquet file."""

    path: str
    first: int  # number of the first row, from 0
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def cut(self, start: int, stop: int | None) -> ParquetRows:
        """Rows `start` to `stop` of this block."""
        length = (len(self) if stop is None else min(stop, len(self))) - start
        return ParquetRows(self.path, self.first + start, self.batch.slice(start, length))

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and content of every row."""
        for number, record in enumerate(self.batch.to_pylist(), start=self.first):
            yield f"{self.path} row {number}", record


Block = JsonLines | ParquetRows


@dataclass
class Rows:
    """Canonical rows, and what a flow must know of them all. Numbers count the rows given here, from 0."""

    rows: list[bytes] = field(default_factory=list)
    first_chat: int | None = None  # first row whose prompt is a list of messages
    first_unanswered: int | None = None  # first row that is not a conversation with an assistant message
    first_unlabelled: int | None = None  # first row whose label is empty


FIRST = ("first_chat", "first_unanswered", "first_unlabelled")


def update_first(first: dict[str, int | None], part: Rows, num_before: int) -> None:
    """Note in `first` what `part` has, whose first row is number `num_before`."""
    for key in FIRST:
        if first[key] is None and (number := getattr(part, key)) is not None:
            first[key] = num_before + number


def canonical(block: Block, columns: Columns) -> Rows:
    """The rows of a block.

    Raises:
        DataError: malformed line, missing column, or a prompt, a dictionary or tools of another type.
    """
    found = Rows()
    for number, (where, record) in enumerate(block.records()):
        prompt = _prompt(record, where, columns)
        if isinstance(prompt, list) and found.first_chat is None:
            found.first_chat = number
        if found.first_unanswered is None and not (isinstance(prompt, list) and any(m["role"] == "assistant" for m in prompt)):
            found.first_unanswered = number
        label = _text(record[columns.label]) if columns.label else ""
        if not label and found.first_unlabelled is None:
            found.first_unlabelled = number
        row = [prompt, label, _dictionary(record.get(columns.metadata), where, columns.metadata)]
        if columns.tools and (tools := _tools(record.get(columns.tools), where, columns.tools)):
            row.append(tools)
        found.rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str).encode())
    return found


def missing_column(where: str, key: str, found: list[str], columns: Columns) -> str:
    """The sentence for a column that is not there."""
    flag = "--input-key" if key == columns.prompt else "--label-key"
    return f"{where} has no column {key!r}; it has {', '.join(map(repr, found)) or 'none'}: name one of them with {flag}"


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
    """Whether this can be a prompt: non-empty text, or a non-empty list of `{"role", "content"}`."""
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    )


def _text(label: Any) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)


def _dictionary(value: Any, where: str, key: str) -> dict[str, Any]:
    """A dictionary as it is, JSON text parsed, nothing as {}."""
    value = _parsed(value, where, key, "--metadata-key")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: column {key!r} holds a {type(value).__name__}; a dictionary is needed: repair it, or use --metadata-key"
        )
    return value


def _tools(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    """Tool definitions as they are, JSON text parsed, nothing as []. What Parquet has added (null fields) is taken away again."""
    value = _parsed(value, where, key, "--tool-key")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: column {key!r} holds {_short(value)}; a list of tool definitions (JSON schemas) is needed: repair it, "
            "name another with --tool-key, or read none with --tool-key ''"
        )
    return [_without_nulls(tool) for tool in value]


def _parsed(value: Any, where: str, key: str, flag: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise DataError(
            f"{where}: column {key!r} is text but not JSON ({error}): repair it, or name another with {flag}"
        ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
