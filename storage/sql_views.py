"""Query the commits and samples of a store's runs with SQL (DuckDB). docs/queries.md describes the views.

Commit records are read when the connection is opened. Shards are Arrow data sets, which are read while a query runs:
only the columns that it uses, and only the shards that its conditions on run, round and policy version select. Shards
are those that commit records list; their hashes are not verified (`penstock verify` does).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from penstock.storage.commit import BUFFER, Commit, RunKeys, commit_key
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import OptionError, PenstockError, RunError
from penstock.storage.history.run_record import RunRecord, read_run_record
from penstock.storage.maintenance.deletion import expired_versions, is_removed, read_tombstone
from penstock.storage.samples.sample import SCHEMA
from penstock.storage.samples.shards import TOKENS_SCHEMA
from penstock.storage.store import Store, committed_prefixes

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
}

_NUM_REQUESTS = 16  # commit records read in parallel from an object store
_RUN, _VERSION, _TIME = ("run", pa.string()), ("policy_version", pa.int64()), ("created_at", pa.timestamp("us"))
_SAMPLES = pa.schema([_RUN, _VERSION, *SCHEMA])
_EVAL_SAMPLES = pa.schema([_RUN, _VERSION, ("data_set", pa.string()), *SCHEMA])
_TRAINED_TOKENS = pa.schema([_RUN, ("rollout_id", pa.int64()), *TOKENS_SCHEMA])
_STEP_METRICS = {  # column of `steps` -> metric of the commit
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr-pg_0",
    "kl_loss": "train/kl_loss",
    "entropy": "train/entropy_loss",
    "train_rollout_logprob_abs_diff": "train/train_rollout_logprob_abs_diff",
    "tokens_per_second": "perf/actor_train_tok_per_s",
}
_TABLES = {
    "runs": pa.schema(
        [
            *(_RUN, ("flow", pa.string()), ("num_rollouts", pa.int64()), ("num_steps", pa.int64())),
            *(("parent", pa.string()), ("forked_at", pa.int64()), _TIME),
            *(("code_version", pa.string()), ("config_hash", pa.string()), ("config", pa.string())),
        ]
    ),
    "commits": pa.schema(
        [
            *(_RUN, ("kind", pa.string()), ("index", pa.int64()), _VERSION, _TIME, ("attempt", pa.string())),
            *(("bytes", pa.int64()), ("rows", pa.int64()), ("seconds", pa.float64())),
            *(("seconds_by_part", pa.map_(pa.string(), pa.float64())), ("config_hash", pa.string())),
            *(("code_version", pa.string()), ("key", pa.string())),
        ]
    ),
    "metrics": pa.schema(
        [_RUN, ("kind", pa.string()), ("index", pa.int64()), ("name", pa.string()), ("value", pa.float64())]
    ),
    "evaluations": pa.schema(
        [
            *(_RUN, _VERSION, ("data_set", pa.string()), ("mean_reward", pa.float64()), ("ci_low", pa.float64())),
            *(("ci_high", pa.float64()), ("num_prompts", pa.int64()), ("num_samples", pa.int64()), _TIME),
        ]
    ),
    "checkpoints": pa.schema(
        [
            *(_RUN, _VERSION, ("bytes", pa.int64()), ("uri", pa.string()), _TIME, ("expired", pa.bool_())),
            *(("expired_at", pa.timestamp("us")), ("expired_reason", pa.string())),
        ]
    ),
    "steps": pa.schema(
        [
            *(_RUN, ("rollout_id", pa.int64()), _VERSION, *((name, pa.float64()) for name in _STEP_METRICS)),
            *(("seconds", pa.float64()), _TIME),
        ]
    ),
    "_dropped": pa.schema(
        [
            *(_RUN, ("rollout_id", pa.int64()), _VERSION, ("group_id", pa.string()), ("reason", pa.string())),
            *(("source_epoch", pa.int64()), ("source_file", pa.int64()), ("source_row", pa.int64())),
        ]
    ),
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


@dataclass
class _Contents:
    """The rows of the views of commits, and the shards of the views of samples."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in _TABLES})
    samples: list[_Shard] = field(default_factory=list)
    buffered: list[_Shard] = field(default_factory=list)
    eval_samples: list[_Shard] = field(default_factory=list)
    trained_tokens: list[_Shard] = field(default_factory=list)

    def extend(self, other: _Contents) -> None:
        """Add the rows and shards of `other`."""
        for name, rows in other.rows.items():
            self.rows[name] += rows
        self.samples += other.samples
        self.buffered += other.buffered
        self.eval_samples += other.eval_samples
        self.trained_tokens += other.trained_tokens


def open_connection(store: Store, runs: Sequence[str]) -> tuple[duckdb.DuckDBPyConnection, dict[str, str]]:
    """Return a DuckDB connection with the views of VIEWS, and the damaged runs, which the views lack: run -> problem.

    SQL statements cannot access files or change this restriction. Removed runs are left out.
    """
    try:
        import duckdb
    except ImportError as error:
        raise OptionError(
            "penstock query needs DuckDB, which is not installed: pip install 'penstock-rl[query]'"
        ) from error
    contents, problems = _Contents(), {}
    for run in runs:
        try:
            contents.extend(read_run(store, RunKeys(run)))
        except (PenstockError, OSError) as error:
            problems[run] = str(error)
    connection = duckdb.connect(":memory:")
    for name, schema in _TABLES.items():
        connection.register(name, pa.Table.from_pylist(contents.rows[name], schema=schema))
    connection.register("samples", _dataset(store, _SAMPLES, contents.samples))
    connection.register("_buffered", _dataset(store, _SAMPLES, contents.buffered))
    connection.register("eval_samples", _dataset(store, _EVAL_SAMPLES, contents.eval_samples))
    connection.register("trained_tokens", _dataset(store, _TRAINED_TOKENS, contents.trained_tokens))
    for statement in (_PROMPTS, *_SETTINGS):
        connection.execute(statement)
    return connection, problems


def execute(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[list[str], duckdb.DuckDBPyConnection]:
    """Execute SQL statements. Return the column names of the last one's result, and the cursor to fetch its rows."""
    import duckdb

    try:
        cursor = connection.execute(sql)
    except duckdb.Error as error:
        raise sql_error(error) from error
    if cursor is None or cursor.description is None:
        raise OptionError("the SQL contains no statement: write one, for example 'select * from runs'")
    return [column[0] for column in cursor.description], cursor


def sql_error(error: Exception) -> OptionError:
    """Return DuckDB's error as an error of the request: its message and hints, without the quoted SQL line."""
    message = str(error).partition("\n\nLINE ")[0]
    return OptionError(f"the query failed: {message}")


def list_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[str, str]]]:
    """Return the columns of every view: view -> [(column, type)]."""
    return {view: [(row[0], row[1]) for row in connection.execute(f"describe {view}").fetchall()] for view in VIEWS}


# ---- reading a run ---------------------------------------------------------------------------------------------------


def read_run(store: Store, keys: RunKeys) -> _Contents:
    """Return the contents of one run. They are empty if it was removed, or has neither a record nor commits."""
    contents = _Contents()
    if is_removed(store, keys):
        return contents
    record = read_run_record(store, keys)
    prefixes = committed_prefixes(store, keys)
    if record is None:
        if prefixes:
            raise RunError("run.json is missing: restore it from a backup")
        return contents
    commits = map_in_threads(store.committed, prefixes, 1 if store.is_local else _NUM_REQUESTS)
    committed = [(prefix, commit) for prefix, commit in zip(prefixes, commits, strict=True) if commit is not None]
    contents.rows["runs"].append(run_row(keys.run, record, [commit for _, commit in committed]))
    for prefix, commit in committed:
        add_commit(contents, store, keys.run, prefix, commit)
    for version in expired_versions(store, keys):
        tombstone = read_tombstone(store, keys.checkpoint_prefix(version))
        if tombstone is not None and store.committed(keys.checkpoint_prefix(version)) is None:
            row = _checkpoint_row(store, keys.run, tombstone.commit)
            row |= {"expired": True, "expired_at": _timestamp(tombstone.expired_at), "expired_reason": tombstone.why}
            contents.rows["checkpoints"].append(row)
    return contents


def run_row(run: str, record: RunRecord, commits: list[Commit]) -> dict[str, Any]:
    return {
        **record.model_dump(include={"flow", "code_version", "config_hash"}),
        "run": run,
        "num_rollouts": sum(commit.kind == "rollout" for commit in commits),
        "num_steps": sum(commit.kind == "step" for commit in commits),
        "parent": record.parent.run if record.parent else None,
        "forked_at": record.parent.at if record.parent else None,
        "created_at": _timestamp(record.created_at),
        "config": json.dumps(record.config),
    }


def add_commit(contents: _Contents, store: Store, run: str, prefix: str, commit: Commit) -> None:
    """Add the rows and shards of one commit of `run`. A fork's commits also list files of its parent's attempts, so the
    run is that of the record's directory, not that of its files."""
    rows, version = contents.rows, commit.policy_version
    place: dict[str, str | int]
    created_at, seconds = _timestamp(commit.created_at), sum(commit.seconds.values())
    common = {"run": run, "kind": commit.listed_kind, "index": commit.index}
    row = commit.model_dump(include={"attempt", "config_hash", "code_version"})
    row |= {"bytes": sum(file.bytes for file in commit.files), "rows": sum(file.rows or 0 for file in commit.files)}
    row |= {"policy_version": version, "created_at": created_at, "key": commit_key(prefix)}
    rows["commits"].append(common | row | {"seconds": seconds, "seconds_by_part": list(commit.seconds.items())})
    rows["metrics"] += [common | {"name": name, "value": value} for name, value in commit.summary.items()]
    if commit.kind == "rollout":
        place = {"run": run, "policy_version": version, "rollout_id": commit.index}
        contents.samples += [_Shard(shard.path, place) for shard in commit.shards()]
        contents.buffered += [_Shard(shard.path, place) for shard in commit.shards(BUFFER)]
        for group in commit.state.get("dropped", []):
            row = place | {"group_id": group["group_id"], "reason": group["reason"]}
            source = group.get("source") or {}
            rows["_dropped"].append(row | {f"source_{name}": source.get(name) for name in ("epoch", "file", "row")})
    elif commit.kind == "eval":
        data_set = prefix.rpartition("/")[2]
        metric, summary = f"eval/{data_set}", commit.summary
        columns = {"mean_reward": "", "ci_low": "-ci_low", "ci_high": "-ci_high", "num_prompts": "/num_prompts"}
        scores = {column: summary.get(metric + suffix) for column, suffix in columns.items()}
        rows["evaluations"].append(
            {"run": run, "policy_version": version, "data_set": data_set, "created_at": created_at}
            | {**scores, "num_samples": commit.num_samples()}
        )
        place = {"run": run, "policy_version": version, "data_set": data_set}
        contents.eval_samples += [_Shard(shard.path, place) for shard in commit.shards()]
    elif commit.kind == "checkpoint":
        rows["checkpoints"].append(_checkpoint_row(store, run, commit))
    elif commit.kind == "step":
        metrics = {column: commit.summary.get(name) for column, name in _STEP_METRICS.items()}
        step = {"run": run, "rollout_id": commit.index, "policy_version": version}
        rows["steps"].append(step | metrics | {"seconds": seconds, "created_at": created_at})
        contents.trained_tokens += [
            _Shard(file.path, {"run": run, "rollout_id": commit.index}) for file in commit.files
        ]


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


# ---- shards ----------------------------------------------------------------------------------------------------------


def _dataset(store: Store, schema: pa.Schema, shards: Iterable[_Shard]) -> ds.Dataset:
    """Return shards as one Arrow data set. No shard is opened until a query needs it.

    Columns that a shard lacks are null, unless they are among its constants.
    """
    files = pafs.LocalFileSystem() if store.is_local else pafs.PyFileSystem(pafs.FSSpecHandler(store.fs))
    parquet = ds.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(
            store.path(shard.key),
            files,
            partition_expression=reduce(and_, (ds.field(name) == value for name, value in shard.constants.items())),
        )
        for shard in shards
    ]
    return ds.FileSystemDataset(fragments, schema, parquet, files)
