"""Query the commits and samples of a store's runs with SQL (DuckDB). docs/queries.md describes the views.

Commit records are read when the connection is opened. Shards are Arrow data sets, which are read while a query runs:
only the columns that it uses, and only the shards that its conditions on run, round and policy version select. Only
shards that commit records list are read; their hashes are not verified (`penstock verify` does).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from penstock.storage.commit import BUFFER, Commit, RunKeys, commit_key
from penstock.storage.errors import OptionError, PenstockError, RunError
from penstock.storage.history.run_record import read_run_record
from penstock.storage.maintenance.deletion import expired_versions, is_removed, read_tombstone
from penstock.storage.samples.sample import SCHEMA, TEACHER_COLUMNS
from penstock.storage.samples.shards import REGRADED_SCHEMA, TOKENS_SCHEMA
from penstock.storage.store import Store, read_stages

if TYPE_CHECKING:
    import duckdb

VIEWS = {  # name -> content, in the order in which `penstock query` lists them
    "runs": "one row per run",
    "commits": "one row per committed stage of a run",
    "samples": "one row per sample in a training shard",
    "eval_samples": "one row per sample of an evaluation",
    "prompts": "one row per prompt and round: trained, buffered or dropped",
    "metrics": "one row per metric of a commit",
    "evaluations": "one row per evaluated policy version and data set",
    "checkpoints": "one row per checkpoint, including expired ones",
    "steps": "one row per trained round",
    "trained_tokens": "one row per sample of a trained round: what the trainer computed for each trained token",
    "regraded_samples": "one row per sample of a training round that was graded again: old and new reward, advantage",
}

_RUN, _VERSION = ("run", pa.string()), ("policy_version", pa.int64())
_SHARDS = {  # table -> schema of the shards from which it is read
    "samples": pa.schema([_RUN, _VERSION, *SCHEMA, *TEACHER_COLUMNS]),
    "_buffered": pa.schema([_RUN, _VERSION, *SCHEMA, *TEACHER_COLUMNS]),
    "eval_samples": pa.schema([_RUN, _VERSION, ("data_set", pa.string()), *SCHEMA, *TEACHER_COLUMNS]),
    "trained_tokens": pa.schema([_RUN, ("rollout_id", pa.int64()), *TOKENS_SCHEMA]),
    "regraded_samples": pa.schema([_RUN, ("rollout_id", pa.int64()), ("grading", pa.string()), *REGRADED_SCHEMA]),
}
_STEP_METRICS = {  # column of `steps` -> metric of the commit
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr-pg_0",
    "kl_loss": "train/kl_loss",
    "entropy": "train/entropy_loss",
    "train_rollout_logprob_abs_diff": "train/train_rollout_logprob_abs_diff",
    "tokens_per_second": "perf/actor_train_tok_per_s",
}
_INTEGERS = "num_rollouts num_steps forked_at rollout_id policy_version index bytes rows num_prompts num_samples"
_TYPES = {  # column -> type, of all columns of _TABLES that are not text
    **dict.fromkeys([*_INTEGERS.split(), "source_epoch", "source_file", "source_row"], pa.int64()),
    **dict.fromkeys([*_STEP_METRICS, "seconds", "value", "mean_reward", "ci_low", "ci_high"], pa.float64()),
    **dict.fromkeys(["created_at", "expired_at"], pa.timestamp("us")),
    "expired": pa.bool_(),
    "seconds_by_part": pa.map_(pa.string(), pa.float64()),
}
_COLUMNS = {  # table -> its columns in order
    "runs": "run flow num_rollouts num_steps parent forked_at created_at code_version config_hash config",
    "commits": "run kind index policy_version created_at attempt bytes rows seconds seconds_by_part config_hash "
    "code_version key",
    "metrics": "run kind index name value",
    "evaluations": "run policy_version data_set mean_reward ci_low ci_high num_prompts num_samples created_at",
    "checkpoints": "run policy_version bytes uri created_at expired expired_at expired_reason",
    "steps": f"run rollout_id policy_version {' '.join(_STEP_METRICS)} seconds created_at",
    "_dropped": "run rollout_id policy_version group_id reason source_epoch source_file source_row",
}
_TABLES = {
    name: pa.schema([(column, _TYPES.get(column, pa.string())) for column in columns.split()])
    for name, columns in _COLUMNS.items()
}
_PROMPTS_OF_SHARDS = """
    select run, rollout_id, policy_version, group_id, '{fate}' as fate, null::varchar as reason,
        try_cast(any_value(metadata)->>'$.source.epoch' as bigint) as source_epoch,
        try_cast(any_value(metadata)->>'$.source.file' as bigint) as source_file,
        try_cast(any_value(metadata)->>'$.source.row' as bigint) as source_row,
        any_value(prompt) as prompt, any_value(label) as label, count(*) as num_samples,
        avg(reward) as mean_reward, min(reward) as min_reward, max(reward) as max_reward
    from {table} group by run, rollout_id, policy_version, group_id"""
_PROMPTS = (
    f"create view prompts as {_PROMPTS_OF_SHARDS.format(fate='trained', table='samples')}"
    f" union all by name {_PROMPTS_OF_SHARDS.format(fate='buffered', table='_buffered')}"
    " union all by name select *, 'dropped' as fate from _dropped"
)
# No file is accessible to SQL, not even for spilled data, and no statement can change this.
_SETTINGS = (
    "set python_enable_replacements=false",
    "set temp_directory=''",
    "set enable_external_access=false",
    "set lock_configuration=true",
)


@dataclass
class _Shard:
    """A committed shard, and the values of columns that are equal in all of its rows."""

    key: str
    constants: dict[str, str | int]


Contents = defaultdict[str, list[Any]]  # name in _TABLES -> rows; name in _SHARDS -> _Shard


def open_connection(store: Store, runs: Sequence[str]) -> tuple[duckdb.DuckDBPyConnection, dict[str, str]]:
    """Return a DuckDB connection with the views of VIEWS, and the damaged runs, which the views lack: run -> problem.
    SQL statements cannot access files or change this restriction. Removed runs are left out."""
    try:
        import duckdb
    except ImportError as error:
        raise OptionError(
            "penstock query needs DuckDB, which is not installed: pip install 'penstock-rl[query]'"
        ) from error
    contents, problems = Contents(list), {}
    for run in runs:
        try:
            of_run = read_run(store, RunKeys(run))
        except (PenstockError, OSError) as error:
            problems[run] = str(error)
            continue
        for name, entries in of_run.items():
            contents[name] += entries
    connection = duckdb.connect(":memory:")
    for name, schema in _TABLES.items():
        connection.register(name, pa.Table.from_pylist(contents[name], schema=schema))
    files = pafs.LocalFileSystem() if store.is_local else pafs.PyFileSystem(pafs.FSSpecHandler(store.fs))
    parquet = ds.ParquetFileFormat()
    # No shard is opened until a query needs it. Columns that a shard lacks are null, unless they are its constants.
    for name, schema in _SHARDS.items():
        fragments = []
        for shard in contents[name]:
            constants = reduce(and_, (ds.field(column) == value for column, value in shard.constants.items()))
            fragments.append(parquet.make_fragment(store.path(shard.key), files, partition_expression=constants))
        connection.register(name, ds.FileSystemDataset(fragments, schema, parquet, files))
    for statement in (_PROMPTS, *_SETTINGS):
        connection.execute(statement)
    return connection, problems


def execute(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[list[str], duckdb.DuckDBPyConnection]:
    """Execute SQL statements. Return the column names of the last one's result, and the cursor to fetch its rows."""
    with translate_sql_errors():
        cursor = connection.execute(sql)
    if cursor is None or cursor.description is None:
        raise OptionError("the SQL contains no statement: write one, for example 'select * from runs'")
    return [column[0] for column in cursor.description], cursor


@contextmanager
def translate_sql_errors() -> Iterator[None]:
    """Turn an error of DuckDB inside the block into an OptionError with its message and hints, without the quoted SQL
    line."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        message = str(error).partition("\n\nLINE ")[0]
        raise OptionError(f"the query failed: {message}") from error


def list_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[str, str]]]:
    """Return the columns of every view of VIEWS: view -> [(column, SQL type)]."""
    return {view: [(row[0], row[1]) for row in connection.execute(f"describe {view}").fetchall()] for view in VIEWS}


# ---- reading a run ---------------------------------------------------------------------------------------------------


def read_run(store: Store, keys: RunKeys) -> Contents:
    """Return the table rows and shards of one run; nothing if it was removed, or has neither a record nor commits."""
    contents = Contents(list)
    if is_removed(store, keys):
        return contents
    record, stages = read_run_record(store, keys), read_stages(store, keys)
    if record is None:
        if stages:
            raise RunError(f"{keys.record} is missing, but the run has commits: restore it from a backup")
        return contents
    kinds = Counter(commit.kind for commit in stages.values())
    row = record.model_dump(include={"flow", "code_version", "config_hash"})
    row |= {"run": keys.run, "num_rollouts": kinds["rollout"], "num_steps": kinds["step"]}
    row |= {"created_at": _timestamp(record.created_at), "config": json.dumps(record.config)}
    if record.parent:
        row |= {"parent": record.parent.run, "forked_at": record.parent.at}
    contents["runs"].append(row)
    for prefix, commit in stages.items():
        add_commit(contents, store, keys.run, prefix, commit)
    for version in expired_versions(store, keys):
        tombstone = read_tombstone(store, keys.checkpoint_prefix(version))
        if tombstone is not None and store.committed(keys.checkpoint_prefix(version)) is None:
            row = _checkpoint_row(store, keys.run, tombstone.commit)
            row |= {"expired": True, "expired_at": _timestamp(tombstone.expired_at), "expired_reason": tombstone.why}
            contents["checkpoints"].append(row)
    return contents


def add_commit(contents: Contents, store: Store, run: str, prefix: str, commit: Commit) -> None:
    """Add the rows and shards of one commit to `contents`. `run` is the run whose directory contains the commit record;
    the files may be in another run's directory, since the commits of a fork list files of its parent."""
    version = commit.policy_version
    place: dict[str, str | int]
    created_at, seconds = _timestamp(commit.created_at), sum(commit.seconds.values())
    common = {"run": run, "kind": commit.listed_kind, "index": commit.index}
    row = commit.model_dump(include={"attempt", "config_hash", "code_version"})
    row |= {"bytes": sum(file.bytes for file in commit.files), "rows": sum(file.rows or 0 for file in commit.files)}
    row |= {"policy_version": version, "created_at": created_at, "key": commit_key(prefix)}
    contents["commits"].append(common | row | {"seconds": seconds, "seconds_by_part": list(commit.seconds.items())})
    contents["metrics"] += [common | {"name": name, "value": value} for name, value in commit.summary.items()]
    if commit.kind == "rollout":
        place = {"run": run, "policy_version": version, "rollout_id": commit.index}
        contents["samples"] += [_Shard(shard.path, place) for shard in commit.shards()]
        contents["_buffered"] += [_Shard(shard.path, place) for shard in commit.shards(BUFFER)]
        for group in commit.state.get("dropped", []):
            row = place | {"group_id": group["group_id"], "reason": group["reason"]}
            source = group.get("source") or {}
            contents["_dropped"].append(row | {f"source_{name}": source.get(name) for name in ("epoch", "file", "row")})
    elif commit.kind == "eval":
        data_set = prefix.rpartition("/")[2]
        metric, summary = f"eval/{data_set}", commit.summary
        columns = {"mean_reward": "", "ci_low": "-ci_low", "ci_high": "-ci_high", "num_prompts": "/num_prompts"}
        scores = {column: summary.get(metric + suffix) for column, suffix in columns.items()}
        contents["evaluations"].append(
            {"run": run, "policy_version": version, "data_set": data_set, "created_at": created_at}
            | {**scores, "num_samples": commit.num_samples()}
        )
        place = {"run": run, "policy_version": version, "data_set": data_set}
        contents["eval_samples"] += [_Shard(shard.path, place) for shard in commit.shards()]
    elif commit.kind == "checkpoint":
        contents["checkpoints"].append(_checkpoint_row(store, run, commit))
    elif commit.kind == "step":
        metrics = {column: commit.summary.get(name) for column, name in _STEP_METRICS.items()}
        step = {"run": run, "rollout_id": commit.index, "policy_version": version}
        contents["steps"].append(step | metrics | {"seconds": seconds, "created_at": created_at})
        contents["trained_tokens"] += [
            _Shard(file.path, {"run": run, "rollout_id": commit.index}) for file in commit.files
        ]
    elif commit.kind == "regrade":
        place = {"run": run, "rollout_id": commit.index, "grading": prefix.rpartition("/")[2]}
        contents["regraded_samples"] += [_Shard(file.path, place) for file in commit.files]


def _checkpoint_row(store: Store, run: str, commit: Commit) -> dict[str, Any]:
    return {
        "run": run,
        "policy_version": commit.policy_version,
        "bytes": sum(file.bytes for file in commit.files),
        "uri": f"{store.uri}/{commit.attempt}",
        "created_at": _timestamp(commit.created_at),
        "expired": False,
    }


def _timestamp(seconds: float) -> datetime:
    """Return a time in seconds since the epoch as a time stamp in UTC, without a time zone."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
