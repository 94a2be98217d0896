"""Data sets: prompt files, rollout shards and the samples of evaluations.

A data set has a content digest, its number of rows, its schema and the policy version; a preview is a table among the
artifacts of the MLflow run that uses it.
"""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.refs import Commit, commit_key
from penstock.storage.samples.sample import SCHEMA
from penstock.storage.tracking.mlflow.values import replace_forbidden_characters

if TYPE_CHECKING:
    from mlflow.entities import Dataset, DatasetInput

PREVIEW_ROWS, _PREVIEW_TEXT = 20, 2000  # rows of a preview, and characters of a cell
_ROLE = "prompt_data/"  # inputs of rollouts and evaluations that are prompt files
_COLUMN_TYPES = {"int64": "long", "double": "double", "string": "string"}  # Arrow -> MLflow
Rows = list[dict[str, Any]]


def shards_dataset(key: str, commit: Commit, store_uri: str) -> Dataset:
    """Return the samples of a rollout or an evaluation as an MLflow data set, e.g. `my-run/rollout/000012`.

    Args:
        key: of the commit record.
        commit: of the shards.
        store_uri: URI of the store.
    """
    directory = commit.attempt.rpartition("/")[0] if commit.attempt else key.removesuffix(commit_key(""))
    run, kind, *rest = directory.removeprefix("runs/").split("/")
    profile = {
        "num_rows": commit.num_samples(),
        "num_files": len(commit.files),
        "num_bytes": sum(file.bytes for file in commit.files),
        "policy_version": commit.policy_version,
    }
    columns = [(column.name, _COLUMN_TYPES.get(str(column.type), "string")) for column in SCHEMA]
    digest = _hash("".join(file.xxh3 for file in commit.files))
    name = "/".join([run, kind.removesuffix("s"), *rest])
    return make_dataset(name, digest, f"{store_uri.rstrip('/')}/{commit.attempt}", columns, profile)


def prompt_files(commit: Commit) -> list[str]:
    """Return the paths of the prompt files of a rollout or an evaluation."""
    return [path for role, path in sorted(commit.inputs.items()) if role.startswith(_ROLE)]


def prompt_dataset(commit: Commit, index: int, path: str, preview: Rows) -> Dataset:
    """Return a prompt file as an MLflow data set. It is the same for all rounds and policy versions.

    Args:
        commit: of a rollout or an evaluation that used the file.
        index: of the file among the prompt files of `commit`.
        path: of the file.
        preview: its first rows, from which the schema is taken.
    """
    segments = (commit.state.get("data_source") or {}).get("segments") or []
    segments = [segment for segment in segments if segment["file"] == index]
    profile = {"num_rows": sum(segment["rows"] for segment in segments)} if segments else {}
    digest = _hash(" ".join(segment["digest"] for segment in segments) or path)  # the same in a moved store
    columns = [(name, "string") for name in dict.fromkeys(name for row in preview for name in row)]
    return make_dataset(path.rpartition("/")[2], digest, path, columns, profile)


def read_preview(path: str) -> Rows:
    """Return the first rows of a prompt file, with shortened texts; [] if the file cannot be read here."""
    file = Path(path.partition("@[")[0])  # a path may end with a range of rows
    try:
        if file.suffix == ".parquet":
            batch = next(pq.ParquetFile(file).iter_batches(batch_size=PREVIEW_ROWS), None)
            rows = batch.to_pylist() if batch else []
        else:
            with file.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in islice(lines, PREVIEW_ROWS) if line.strip()]
    except (OSError, ValueError, pa.ArrowException):
        return []
    return [{name: _shorten(value) for name, value in row.items()} for row in rows if isinstance(row, dict)]


def preview_table(rows: Rows) -> str:
    """Return rows as the JSON of a table that MLflow shows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[row.get(name, "") for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False)


def dataset_input(dataset: Dataset, context: str, commit: Commit | None = None) -> DatasetInput:
    """Return a data set as input of an MLflow run. `context` is what it was used for, e.g. "training"."""
    from mlflow.entities import DatasetInput, InputTag

    tags = [InputTag("mlflow.data.context", context)]
    if commit is not None:
        tags.append(InputTag("penstock.policy_version", str(commit.policy_version)))
    return DatasetInput(dataset, tags)


def make_dataset(name: str, digest: str, uri: str, columns: list[tuple[str, str]], profile: dict[str, Any]) -> Dataset:
    """Return an MLflow data set. Its source has one of MLflow's types (`local`, `s3`, ...), so that the UI can open
    it. `columns` are names and MLflow types."""
    from mlflow.entities import Dataset

    source_type = uri.split("://")[0] if "://" in uri else "local"
    specs = [{"type": type, "name": column, "required": False} for column, type in columns]
    schema = json.dumps({"mlflow_colspec": specs}) if specs else None
    return Dataset(
        replace_forbidden_characters(name), digest, source_type, json.dumps({"uri": uri}), schema, json.dumps(profile)
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _shorten(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _PREVIEW_TEXT else f"{text[:_PREVIEW_TEXT]} ..."
