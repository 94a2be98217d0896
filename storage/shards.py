"""Rollout shards: samples in Parquet, written once, read by trainers, evaluations and people with DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.refs import Commit
from storage.sample import Sample, check_schema, from_table, to_table
from storage.store import Store

SAMPLES_PER_SHARD = 4096


def write_shards(directory: Path, samples: Sequence[Sample], name: str = "part") -> None:
    """Write samples as `<name>-00000.parquet`, ... (zstd, at most SAMPLES_PER_SHARD rows each; at least one file)."""
    for index, start in enumerate(range(0, max(len(samples), 1), SAMPLES_PER_SHARD)):
        table = to_table(samples[start : start + SAMPLES_PER_SHARD])
        pq.write_table(table, directory / f"{name}-{index:05d}.parquet", compression="zstd")


def read_table(store: Store, commit: Commit, name: str = "part") -> pa.Table:
    """The committed samples as one Arrow table, in the order written.

    Raises:
        StoreError: a shard is missing or has another size than committed.
        ValueError: written by a newer Penstock.
    """
    with store.reading(commit) as directory:
        tables = [pq.read_table(path, memory_map=False) for path in sorted(directory.glob(f"{name}-*.parquet"))]
    for table in tables:
        check_schema(table.schema)
    return pa.concat_tables(tables)


def read_samples(store: Store, commit: Commit, name: str = "part") -> list[Sample]:
    """The committed samples as objects."""
    return from_table(read_table(store, commit, name))
