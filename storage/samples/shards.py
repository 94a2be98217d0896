"""Shards: the samples of a rollout or evaluation in Parquet files, which tools such as DuckDB can read, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.commit import TRAINED, Commit
from penstock.storage.samples.sample import Sample, check_schema, from_table, to_table
from penstock.storage.store import Store

SAMPLES_PER_SHARD = 4096

# Only columns with repeated values are dictionary-encoded; pyarrow's default, all columns, costs time and space.
# Log-probs compress better with byte-stream split. Token ids would too, but DuckDB 1 cannot read them
# (docs/benchmarks.md).
_REPEATED = ["group_id", "prompt", "label", "loss_mask.list.element", "status", "metadata"]
_SPLIT = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"}


def write_shards(directory: Path, samples: Sequence[Sample], name: str = "part") -> None:
    """Write samples to `<name>-00000.parquet`, ..., with up to SAMPLES_PER_SHARD rows each. Writes at least one
    file."""
    for index, start in enumerate(range(0, max(len(samples), 1), SAMPLES_PER_SHARD)):
        table, path = to_table(samples[start : start + SAMPLES_PER_SHARD]), directory / f"{name}-{index:05d}.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=_REPEATED, column_encoding=_SPLIT)


def read_table(store: Store, commit: Commit, name: str = "part") -> pa.Table:
    """Return the committed samples as one Arrow table with SCHEMA's columns, in the order in which they were written.

    Only shards that the commit lists are read, after verifying their sizes and hashes. (In a local store the directory
    may contain other files.)

    Args:
        store: of the commit.
        commit: of a rollout or an evaluation.
        name: of the shards, TRAINED or BUFFER (commit.py).
    """
    files = sorted(record.path for record in commit.files if is_shard(record.path, name))
    shards = [Path(file).relative_to(commit.attempt or "") for file in files]
    assert shards, f"the commit lists no shards with the name {name}"
    with store.reading(commit, only=[path.as_posix() for path in shards]) as directory:
        tables = [pq.ParquetFile(directory / path).read() for path in shards]
    for table in tables:
        check_schema(table.schema)
    return pa.concat_tables(tables)


def read_samples(store: Store, commit: Commit, name: str = "part") -> list[Sample]:
    """Return the committed samples as `Sample` objects. See `read_table`."""
    return from_table(read_table(store, commit, name))


def is_shard(path: str, name: str = TRAINED) -> bool:
    """Return whether a committed file is a shard with the given name, TRAINED or BUFFER (commit.py)."""
    return re.fullmatch(rf"{re.escape(name)}-\d+\.parquet", path.rpartition("/")[2]) is not None
