"""Rollout shards: samples in Parquet, written once, read by trainers, evaluations and people with DuckDB."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.refs import Commit
from storage.sample import Sample, current, from_table, to_table
from storage.store import Store

SAMPLES_PER_SHARD = 4096

# pyarrow's default, a dictionary for every column, costs time and space where values hardly repeat: only these get one. The bytes of
# log-probs compress better sorted by their place. So would those of ids, but DuckDB 1 does not read that (docs/benchmarks.md).
_REPEATED = ["group_id", "prompt", "label", "loss_mask.list.element", "status", "metadata"]
_SPLIT = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"}


def write_shards(directory: Path, samples: Sequence[Sample], name: str = "part") -> None:
    """Write samples as `<name>-00000.parquet`, ... (zstd, at most SAMPLES_PER_SHARD rows each; at least one file)."""
    for index, start in enumerate(range(0, max(len(samples), 1), SAMPLES_PER_SHARD)):
        table, path = to_table(samples[start : start + SAMPLES_PER_SHARD]), directory / f"{name}-{index:05d}.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=_REPEATED, column_encoding=_SPLIT)


def read_table(store: Store, commit: Commit, name: str = "part") -> pa.Table:
    """The committed samples as one Arrow table with SCHEMA's columns, in the order written.

    Only shards that the commit names are read (on a local disk a late attempt may have left others beside them), and only after their
    sizes and hashes have been found as committed.

    Raises:
        StoreError: a shard is missing or is not what was committed.
        RunError: written by a newer Penstock.
    """
    paths = [Path(record.path).relative_to(commit.attempt or "") for record in commit.files]
    shards = sorted(path for path in paths if re.fullmatch(rf"{re.escape(name)}-\d+\.parquet", path.name))
    assert shards, f"the commit has no shards named {name}"
    with store.reading(commit, only=[path.as_posix() for path in shards]) as directory:
        tables = [pq.ParquetFile(directory / path).read() for path in shards]
    return pa.concat_tables([current(table) for table in tables])


def read_samples(store: Store, commit: Commit, name: str = "part") -> list[Sample]:
    """The committed samples as objects."""
    return from_table(read_table(store, commit, name))
