"""The Parquet files of a run: shards with the samples of a rollout or an evaluation, and files with what the trainer
computed for each trained token. Other tools, such as DuckDB, can read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from penstock.storage.commit import TRAINED, Commit
from penstock.storage.samples.sample import Sample, check_schema, from_table, to_table
from penstock.storage.store import Store

SAMPLES_PER_SHARD = 4096

# Only columns with repeated values are dictionary-encoded; pyarrow's default, all columns, costs time and space.
# Log-probs compress better with byte-stream split. Token ids would too, but DuckDB 1 cannot read them
# (docs/benchmarks.md).
_REPEATED = ["group_id", "prompt", "label", "loss_mask.list.element", "status", "metadata"]
_SPLIT = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"}


def write_shards(directory: Path, samples: Sequence[Sample], name: str = TRAINED) -> None:
    """Write samples to the shards `<name>-00000.parquet`, ... in `directory`, with up to SAMPLES_PER_SHARD rows each.
    Without samples, one empty shard is written."""
    for index, start in enumerate(range(0, max(len(samples), 1), SAMPLES_PER_SHARD)):
        table, path = to_table(samples[start : start + SAMPLES_PER_SHARD]), directory / f"{name}-{index:05d}.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=_REPEATED, column_encoding=_SPLIT)


def read_table(store: Store, commit: Commit, name: str = TRAINED, columns: list[str] | None = None) -> pa.Table:
    """Return the samples of a commit as one Arrow table with SCHEMA's columns, and the TEACHER_COLUMNS that they have,
    in the order in which they were written. `name` is TRAINED or BUFFER; `columns`: only these. Sizes and hashes of the
    shards are verified. Other files in the directory, which the commit does not list, are not read."""
    shards = [Path(shard.path).relative_to(commit.attempt or "") for shard in commit.shards(name)]
    assert shards, f"the commit lists no shards with the name {name}"
    with store.reading(commit, only=[path.as_posix() for path in shards]) as directory:
        files = [pq.ParquetFile(directory / path) for path in shards]
        for file in files:
            check_schema(file.schema_arrow)
        tables = [file.read(columns) for file in files]
    return pa.concat_tables(tables, promote_options="default")  # only shards with samples of a teacher have its columns


def read_samples(store: Store, commit: Commit, name: str = TRAINED) -> list[Sample]:
    """Return the samples of a commit as `Sample` objects (see `read_table`)."""
    return from_table(read_table(store, commit, name))


def list_column(table: pa.Table | pa.RecordBatch, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets [B + 1] and the concatenated values [S] of a column of lists."""
    column = table[name]
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False).copy()


def trained_mask(table: pa.Table | pa.RecordBatch, *, needs_rewards: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets [B + 1] of B samples, and for each of their S tokens whether it is trained on [S]: its loss
    mask is 1, and it is not the first token of a sample, which is not predicted. With `needs_rewards`, samples without
    a reward are not trained on."""
    offsets, mask = list_column(table, "loss_mask")
    mask, lengths = mask.astype(bool), np.diff(offsets)
    mask[offsets[:-1][lengths > 0]] = False
    if needs_rewards:
        rewards = table["reward"].to_numpy(zero_copy_only=False)  # null becomes NaN
        mask &= np.repeat(~np.isnan(rewards.astype(np.float64)), lengths)
    return offsets, mask


def encode_runs(values: Iterable[int]) -> list[tuple[int, int]]:
    """Encode equal values in a row as (value, number of times)."""
    return [(int(value), len(list(same))) for value, same in groupby(values)]


# ---- replayed groups -------------------------------------------------------------------------------------------------


class StoredGroup(NamedTuple):
    """A group of samples that is stored of a round."""

    rollout_id: int
    group_id: str
    oldest_version: int  # policy version that generated its oldest token


def choose_replayed(
    stored: Iterable[StoredGroup], num_new: int, train: Mapping[str, Any], rollout_id: int
) -> list[StoredGroup]:
    """Return the stored groups that a round with `num_new` new groups also trains on (--replay-share), in the order of
    `stored`: those with the lowest hashes of seed, round and group among the groups that are new enough. So the choice
    is random, but the same at every replay and in every audit. `train`: the options of the trainer."""
    replay = train["replay"]
    allowed = [group for group in stored if rollout_id - group.oldest_version <= replay["replay_max_staleness"]]

    def order(group: StoredGroup) -> int:
        return xxhash.xxh3_64_intdigest(f"{train['seed']} {rollout_id} {group.group_id}".encode())

    number = int(replay["replay_share"] * num_new + 1e-9)  # 0.29 x 100 is 28.999999999999996
    chosen = set(sorted(allowed, key=order)[:number])
    return [group for group in allowed if group in chosen]


def read_with_replayed(
    store: Store, rollout: Commit, earlier: Iterable[Commit], train: Mapping[str, Any]
) -> tuple[pa.Table, list[tuple[StoredGroup, int]]]:
    """Return the samples of a rollout, followed by those of the groups of `earlier` rollouts that are replayed with it,
    and these groups in the same order, each with its number of samples."""
    tables, stored = [read_table(store, rollout)], list[StoredGroup]()
    by_index = {commit.index: commit for commit in earlier}
    for index, commit in by_index.items():
        columns = read_table(store, commit, columns=["group_id", "policy_versions"]).to_pydict()
        oldest: dict[str, int] = {}
        for group_id, (version, _) in zip(columns["group_id"], columns["policy_versions"]):
            oldest[group_id] = min(version, oldest.get(group_id, version))
        stored += [StoredGroup(index, group_id, version) for group_id, version in oldest.items()]
    num_new = pc.count_distinct(tables[0]["group_id"]).as_py()
    chosen = choose_replayed(stored, num_new, train, rollout.index) if stored else []
    for index, groups in groupby(chosen, lambda group: group.rollout_id):
        table = read_table(store, by_index[index])
        tables += [table.filter(pc.equal(table["group_id"], group.group_id)) for group in groups]
    sizes = [(group, len(table)) for group, table in zip(chosen, tables[1:], strict=True)]
    return pa.concat_tables(tables, promote_options="default"), sizes


# ---- regraded rounds -------------------------------------------------------------------------------------------------

REGRADED_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("old_reward", pa.float64()),
        ("reward", pa.float64()),  # null if grading failed
        ("error", pa.string()),  # why generation or grading failed
        ("old_advantage", pa.float64()),  # of the last trained token, from the old rewards alone
        ("advantage", pa.float64()),
    ]
)


def write_regraded(directory: Path, columns: Sequence[Sequence[Any] | np.ndarray]) -> None:
    """Write the file of a regraded round: the columns of REGRADED_SCHEMA, where NaN stands for null."""
    arrays = [pa.array(values, field.type, from_pandas=True) for field, values in zip(REGRADED_SCHEMA, columns)]
    table = pa.Table.from_arrays(arrays, schema=REGRADED_SCHEMA)
    pq.write_table(table, directory / f"{TRAINED}-00000.parquet", compression="zstd")


# ---- trained tokens --------------------------------------------------------------------------------------------------
# The file of trained tokens belongs to the commit of a training round. Reports, SQL, `penstock samples --explain` and
# `penstock export --round` read it, never training or replay.

_TRAINED_TOKENS = "trained-tokens.parquet"
TOKENS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("trainer_logprobs", pa.list_(pa.float32())),  # before the round; if not computed then, in the optimizer step
        ("advantages", pa.list_(pa.float32())),
        # A file has only those of the following columns that its round has computed.
        ("step_logprobs", pa.list_(pa.float32())),  # in the optimizer step of the token (--keep-step-logprobs)
        ("entropy", pa.list_(pa.float32())),  # in the optimizer step, if the loss uses it
        ("ref_logprobs", pa.list_(pa.float32())),
        ("trainer_teacher_logprobs", pa.list_(pa.float32())),  # of a teacher in the trainer (--opd-teacher-load)
        ("values", pa.list_(pa.float32())),  # of the critic before its update
        ("divergence", pa.list_(pa.float32())),  # from the teacher's distribution, in the optimizer step
    ]
)
TOKEN_COLUMNS = TOKENS_SCHEMA.names[1:]


def write_trained_tokens(
    directory: Path, sample_ids: pa.ChunkedArray, num_tokens: np.ndarray, columns: Mapping[str, np.ndarray]
) -> None:
    """Write trained-tokens.parquet for a round with B samples and N trained tokens. `sample_ids` and `num_tokens`
    (trained tokens of each sample) are [B]; `columns` (name in TOKEN_COLUMNS -> values) are [N], by sample and
    position."""
    offsets, names = pa.array(np.concatenate([[0], np.cumsum(num_tokens)]), pa.int32()), columns.keys() & TOKEN_COLUMNS
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(columns[name], pa.float32())) for name in sorted(names)}
    pq.write_table(pa.table({"sample_id": sample_ids, **lists}), directory / _TRAINED_TOKENS, compression="zstd")


def read_trained_tokens(store: Store, step: Commit) -> pa.Table | None:
    """Return the trained tokens (TOKENS_SCHEMA) of a committed training round, or None if it has no such file."""
    if not any(file.path == f"{step.attempt}/{_TRAINED_TOKENS}" for file in step.files):
        return None
    with store.reading(step, only=[_TRAINED_TOKENS]) as directory:
        return pq.read_table(directory / _TRAINED_TOKENS)
