"""Patterns, slices, several processes, rows on the disk: always the same rows, and always the place of what is
wrong."""

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts import prompt_files
from penstock.stages.rollout.prompts.prompt_files import parse_slice, read_entry
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.prompts.spool import STRIDE, SpooledRows
from tests.forked_worker import forked_workers, fresh_workers  # noqa: F401 fixtures


def rows_of(entry: Path | str, **options: Any) -> list[bytes]:
    rows = read_entry(str(entry), RolloutConfig(**options)).rows
    return [rows[index] for index in range(len(rows))]


def texts(entry: Path | str, **options: Any) -> list[str]:
    return [json.loads(row)[0] for row in rows_of(entry, **options)]


def some_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"input": f"{i} " + "é" * rng.randint(0, 60), "metadata": {"i": i}} for i in range(count)]


def test_pattern_lists_files_in_numeric_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_jsonl(tmp_path / f"shard-{number}.jsonl", [{"input": f"{number}:{row}"} for row in range(2)])
    assert texts(tmp_path / "shard-*.jsonl") == ["1:0", "1:1", "2:0", "2:1", "10:0", "10:1"]
    pq.write_table(pa.table({"input": ["p"]}), tmp_path / "shard-3.parquet")
    assert texts(tmp_path / "shard-[23].*") == ["2:0", "2:1", "p"]
    with pytest.raises(ValueError, match=r"no prompt file matches .*none-\*\.jsonl"):
        rows_of(tmp_path / "none-*.jsonl")
    (tmp_path / "shard-4.txt").write_text("")
    with pytest.raises(ValueError, match=r"shard-4\.txt is neither JSONL"):
        rows_of(tmp_path / "shard-*")


def test_a_file_that_is_named_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a[1].jsonl", [{"input": "x"}])
    assert texts(tmp_path / "a[1].jsonl") == ["x"]


def test_a_file_that_is_added_to_a_pattern_is_a_new_segment(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "day-9.jsonl", some_rows(3))
    config = RolloutConfig(prompt_data=str(tmp_path / "day-*.jsonl"), rollout_shuffle=True)
    first = PromptSource.open(config)
    _, state = first.take(first.restore(None), 2)
    write_jsonl(tmp_path / "day-10.jsonl", some_rows(4, seed=1))
    resumed = PromptSource.open(config).restore(state.model_dump(mode="json"))
    assert [(s.file, s.start, s.rows) for s in resumed.segments] == [(0, 0, 3), (0, 3, 4)]
    write_jsonl(tmp_path / "day-1.jsonl", some_rows(4, seed=1))  # before what the run has seen
    with pytest.raises(ValueError, match="--prompt-data"):
        PromptSource.open(config).restore(state.model_dump(mode="json"))


def test_rows_outside_slice_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a"}\n{broken\n{"input": "b"}\n')
    assert texts(f"{path}@[:1]") == ["a"] and texts(f"{path}@[2:]") == ["b"]
    with pytest.raises(ValueError, match=r"rows.jsonl:2: "):
        rows_of(f"{path}@[1:]")
    assert parse_slice("s3://b/a@[x].jsonl") == ("s3://b/a@[x].jsonl", None, None)


def test_a_slice_grows_with_its_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", some_rows(5))
    config = RolloutConfig(prompt_data=f"{path}@[3:]")
    first = PromptSource.open(config)
    _, state = first.take(first.restore(None), 1)
    write_jsonl(tmp_path / "rows.jsonl", some_rows(8))
    resumed = PromptSource.open(config).restore(state.model_dump(mode="json"))
    assert [(s.start, s.rows) for s in resumed.segments] == [(0, 2), (2, 3)]


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pattern of a long JSONL file, a compressed one and a Parquet file, read in many blocks."""
    monkeypatch.setattr(prompt_files, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(prompt_files, "_BLOCK_ROWS", 50)
    rows = some_rows(1500)
    write_jsonl(tmp_path / "a-1.jsonl", [*rows[:200], {"input": "long " * 1000}, *rows[200:500]])
    lines = "\n\n".join(json.dumps(row) for row in rows[500:900])  # blank lines, and none at the end
    (tmp_path / "a-2.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(rows[900:]), tmp_path / "a-3.parquet")
    return str(tmp_path / "a-*")


def test_rows_and_states_do_not_depend_on_processes_or_storage(mixed: str, tmp_path: Path) -> None:
    options = {"prompt_data": [mixed], "rollout_shuffle": True}
    memory = PromptSource.open(RolloutConfig(**options))
    disk = PromptSource.open(
        RolloutConfig(**options, streaming_data=True, data_cache=str(tmp_path / "cache"), num_data_workers=2)
    )
    prompts, state = memory.take(memory.restore(None), 2000)
    assert disk.take(disk.restore(None), 2000) == (prompts, state)
    assert disk.restore(state.model_dump(mode="json")) == state, "the hash of the rows on the disk is that of the rows"


@pytest.mark.parametrize("workers", [1, 3])
def test_first_invalid_row_is_reported_by_any_worker(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "_BLOCK_BYTES", 500)
    lines = [json.dumps({"input": "x" * 40}) for _ in range(400)]
    lines[207], lines[330] = '{"input": 3}', "{"
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines))  # a blank line behind each
    with pytest.raises(ValueError, match=r"rows.jsonl:415: column 'input' holds 3"):
        rows_of(tmp_path / "rows.jsonl", num_data_workers=workers)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.usefixtures("fresh_workers")
def test_dead_worker_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "_BLOCK_BYTES", 100)
    path = write_jsonl(tmp_path / "rows.jsonl", some_rows(50))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="--num-data-workers"):
        rows_of(path, num_data_workers=2)


def test_any_fsspec_file_system_works(tmp_path: Path) -> None:
    memory, place = fsspec.filesystem("memory"), f"memory://prompts/{tmp_path.name}"
    for number in (1, 2):
        content = gzip.compress(b'{"input": "a%d"}\n{"input": "b"}\n' % number)
        memory.pipe_file(f"/prompts/{tmp_path.name}/{number}.jsonl.gz", content)
    memory.pipe_file(f"/prompts/{tmp_path.name}/4.jsonl", b'{"input": 4}')
    for options in ({}, {"streaming_data": True, "data_cache": str(tmp_path / "cache")}):
        assert texts(f"{place}/*.gz@[1:3]", **options) == ["b", "a2"]
        assert texts(f"{place}/2.jsonl.gz", **options) == ["a2", "b"]
    for entry, problem in (
        (f"{place}/3.jsonl", r"memory://prompts/.*/3\.jsonl does not exist"),
        ("nonsense://a.jsonl", r"cannot be opened .*nonsense"),
        (f"{place}/[4].jsonl", r"memory://.*/4\.jsonl:1: column 'input' holds 4"),
    ):
        with pytest.raises(ValueError, match=problem):
            rows_of(entry)


# ---- rows on the disk ------------------------------------------------------------------------------------------------


def test_spooled_rows_are_a_sequence(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", some_rows(5 * STRIDE + 3))
    plain = rows_of(path)
    spool = read_entry(path, RolloutConfig(streaming_data=True, data_cache=str(tmp_path / "cache"))).rows
    assert isinstance(spool, SpooledRows) and len(spool) == len(plain)
    assert spool[10:40:3] == plain[10:40:3]
    with pytest.raises(IndexError):
        spool[len(plain)]
    rng = random.Random(0)
    for _ in range(50):
        start, stop = sorted(rng.choices(range(len(plain) + 1), k=2))
        assert b"".join(spool.read_bytes(start, stop)) == b"".join(row + b"\n" for row in plain[start:stop])


def test_cache_is_reused_until_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    write_jsonl(path, some_rows(40))
    options = {"streaming_data": True, "data_cache": str(cache)}
    before = rows_of(path, **options)
    [kept] = cache.glob("*.rows")
    with monkeypatch.context() as patch:
        patch.setattr(prompt_files, "_jsonl_blocks", None)  # would raise if the file were read again
        assert rows_of(path, **options) == before
    in_use = read_entry(str(path), RolloutConfig(**options)).rows
    write_jsonl(path, some_rows(41))
    assert len(rows_of(path, **options)) == 41
    assert not kept.exists() and len(list(cache.iterdir())) == 2, "unused files are deleted"
    assert in_use[39] == before[39], "who has it open can still read it"
    assert texts(path, **options, metadata_key="none") == texts(path, **options), "other columns, other files"
    [kept] = [file for file in cache.glob("*.rows") if file.stat().st_size > 0][:1]
    kept.write_bytes(kept.read_bytes()[:-5])
    assert len(rows_of(path, **options)) == 41, "a damaged file is written again"


def test_unwritable_cache_raises(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", some_rows(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/cache .*--data-cache"):
        rows_of(path, streaming_data=True, data_cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"absent.jsonl does not exist"):
        rows_of(tmp_path / "absent.jsonl", streaming_data=True, data_cache=str(tmp_path / "cache"))
