"""Reading prompt files: JSONL and Parquet, local or on any fsspec URI. What is wrong with them is said here, with file and line.

A row becomes one line of canonical JSON, `[prompt, label, metadata]`: compact in memory for millions of rows, and what the data
source hashes to prove that a resumed run still sees the same data. Other columns do not matter. Order and epochs are not owned
here, but by data_source.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from stages.rollout.config import RolloutConfig

_JSONL = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def read_rows(path: str, config: RolloutConfig) -> list[bytes]:
    """The rows of one file.

    Raises:
        ValueError: missing or empty file, unknown format, malformed line, missing column, or a prompt that is none.
    """
    name = path.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    if not name.endswith((*_JSONL, ".parquet")):
        raise ValueError(
            f"{path} is neither JSONL ({', '.join(_JSONL)}) nor Parquet (.parquet): convert it, or give it the right ending"
        )
    read = _parquet_records if name.endswith(".parquet") else _jsonl_records
    try:
        with fsspec.open(path, "rb", compression="infer" if read is _jsonl_records else None) as file:
            rows = [_row(record, where, config) for where, record in read(file, path, config)]
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"prompt file {path} does not exist: give --prompt-data JSONL or Parquet files") from None
    except PermissionError:
        raise ValueError(f"prompt file {path} may not be read by this user: change its permissions") from None
    if not rows:
        raise ValueError(f"prompt file {path} is empty: give --prompt-data a file with at least one row")
    return rows


def _jsonl_records(file: BinaryIO, path: str, config: RolloutConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # JSON or UTF-8
            raise ValueError(
                f"{where}: malformed line ({error}); every line must be one JSON object: repair or remove it"
            ) from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{where}: found a JSON {type(record).__name__}; every line must be one JSON object: repair or remove it"
            )
        yield where, record


def _parquet_records(file: BinaryIO, path: str, config: RolloutConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file ({error}): write it again") from None
    found = parquet.schema_arrow.names
    for key in filter(None, (config.input_key, config.label_key)):
        if key not in found:
            raise ValueError(_missing_column(path, key, found, config))
    wanted = [key for key in (config.input_key, config.label_key, config.metadata_key) if key in found]
    number = 0
    for batch in parquet.iter_batches(columns=wanted):
        for record in batch.to_pylist():
            yield f"{path} row {number}", record
            number += 1


def _row(record: dict[str, Any], where: str, config: RolloutConfig) -> bytes:
    for key in filter(None, (config.input_key, config.label_key)):
        if key not in record:
            raise ValueError(_missing_column(where, key, list(record), config))
    prompt = record[config.input_key]
    if not is_text_or_messages(prompt):
        raise ValueError(
            f"{where}: column {config.input_key!r} holds {json.dumps(prompt, default=str)[:80]}; a prompt is text, or a list of "
            "messages with role and content: repair the row, or name another column with --input-key"
        )
    label = record[config.label_key] if config.label_key else ""
    metadata = _metadata(record.get(config.metadata_key), where, config.metadata_key)
    return json.dumps([prompt, _text(label), metadata], ensure_ascii=False, separators=(",", ":"), default=str).encode()


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


def _metadata(value: Any, where: str, key: str) -> dict[str, Any]:
    """A dictionary as it is, JSON text parsed, nothing as {}."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(
                f"{where}: column {key!r} is text but not JSON ({error}): repair it, or name another with --metadata-key"
            ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: column {key!r} holds a {type(value).__name__}; a dictionary is needed: repair it, or use --metadata-key"
        )
    return value


def _missing_column(where: str, key: str, found: list[str], config: RolloutConfig) -> str:
    flag = "--input-key" if key == config.input_key else "--label-key"
    return f"{where} has no column {key!r}; it has {', '.join(map(repr, found)) or 'none'}: name one of them with {flag}"
