"""The same rows in every format give the same prompts; what a format cannot express is refused with row and column."""

import csv
import datetime
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from chat_templates import chat_tokenizer
from scripted_engine import write_jsonl
from sft_templates import QWEN3
from test_prompt_files import rows_of, texts

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts import prompt_files
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.storage.errors import DataError, RewardError
from tests.forked_worker import forked_workers  # noqa: F401 fixture

Rows = list[dict[str, Any]]


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_ipc_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def save_to_disk(path: Path, table: pa.Table) -> None:
    """Write a directory as `save_to_disk` of Hugging Face's datasets does; shards are not in the order of names."""
    path.mkdir()
    half = table.num_rows // 2
    write_stream(path / "data-00001-of-00002.arrow", table.slice(0, half))
    write_stream(path / "data-00000-of-00002.arrow", table.slice(half))
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows
        )


def write_array(path: Path, rows: Rows, **options: Any) -> None:
    path.write_text(json.dumps(rows, **options))


FORMATS: dict[str, Callable[[Path, Rows], object]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_array,
    "indented.json": lambda path, rows: write_array(path, rows, indent=2, ensure_ascii=False),
    "rows.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "rows.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7),
    "stream.arrow": lambda path, rows: write_stream(path, pa.Table.from_pylist(rows)),
    "file.arrow": lambda path, rows: write_ipc_file(path, pa.Table.from_pylist(rows)),
    "rows.feather": lambda path, rows: pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path),
    "saved": lambda path, rows: save_to_disk(path, pa.Table.from_pylist(rows)),
    "rows.csv": write_csv,
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
}
COLUMNAR = [name for name in FORMATS if "json" not in name]
STRUCTS = [name for name in COLUMNAR if name not in ("rows.csv", "rows.tsv")]


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Rows], Path]:
    def write(rows: Rows) -> Path:
        FORMATS[request.param](tmp_path / request.param, rows)
        return tmp_path / request.param

    return write


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "_BLOCK_BYTES", 50)
    monkeypatch.setattr(prompt_files, "_BLOCK_ROWS", 3)


def text_rows(count: int) -> Rows:
    return [
        {"input": f'{i}: "é",\n\t]}}' + "x" * (i * 7 % 90), "answer": f"{i:03}", "metadata": {"i": i, "t": "[,"}}
        for i in range(count)
    ]


# ---- every format ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_rows_do_not_depend_on_the_format(written: Callable[[Rows], Path], tmp_path: Path) -> None:
    rows = text_rows(40)
    expected = rows_of(write_jsonl(tmp_path / "expected.jsonl", rows), label_key="answer")
    path = written(rows)
    for options in ({}, {"num_data_workers": 2}, {"streaming_data": True, "data_cache": str(tmp_path / "cache")}):
        assert rows_of(path, label_key="answer", **options) == expected, options


@pytest.mark.usefixtures("small_blocks")
def test_slices_of_every_format_are_those_of_a_list(written: Callable[[Rows], Path], tmp_path: Path) -> None:
    rows = text_rows(40)
    path = written(rows)
    for options in ({}, {"streaming_data": True, "data_cache": str(tmp_path / "cache")}):
        for part in (":5", "17:31", "-4:", "2:-30", "0:100", "-100:1"):
            start, stop = (int(number) if number else None for number in part.split(":"))
            assert texts(f"{path}@[{part}]", **options) == [row["input"] for row in rows[start:stop]], part
        with pytest.raises(ValueError, match=r"@\[5:5\]"):
            rows_of(f"{path}@[5:5]", **options)


@pytest.mark.usefixtures("small_blocks")
def test_an_empty_prompt_is_named_in_every_format(written: Callable[[Rows], Path]) -> None:
    rows = text_rows(12)
    rows[8]["input"] = ""
    path = written(rows)
    where = r":9" if path.name == "rows.jsonl" else r" row 8"
    where = r"data-00000-of-00002.arrow row 2" if path.name == "saved" else where
    with pytest.raises(DataError, match=rf"{where}: column 'input' holds \"\""):
        rows_of(path)


def test_a_missing_column_is_named_in_every_format(written: Callable[[Rows], Path]) -> None:
    path = written(text_rows(4))
    assert prompt_files.read_column_names(f"{path}@[1:3]") == ["input", "answer", "metadata"]
    with pytest.raises(DataError, match=r"no column 'question'; it has 'input', 'answer', 'metadata': .*--input-key"):
        rows_of(path, input_key="question")


def test_a_pattern_mixes_formats_and_file_systems(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for number, name in enumerate(["1.csv", "2.json", "3.arrow", "4.parquet", "5.tsv"]):
        kind = {"1.csv": "rows.csv", "2.json": "rows.json", "3.arrow": "stream.arrow", "5.tsv": "rows.tsv"}.get(name)
        FORMATS[kind or "rows.parquet"](tmp_path / name, [{"input": f"{number}a"}, {"input": f"{number}b"}])
        memory.pipe_file(f"/formats/{tmp_path.name}/{name}", (tmp_path / name).read_bytes())
    expected = [f"{number}{letter}" for number in range(5) for letter in "ab"]
    assert texts(tmp_path / "*.*") == expected
    assert texts(f"memory://formats/{tmp_path.name}/*@[1:9]") == expected[1:9]


MEASURE = """
import sys
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.source import PromptSource
def memory(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
before = memory()
for path in sys.argv[2:]:
    config = RolloutConfig(prompt_data=path, rollout_shuffle=True, streaming_data=True, data_cache=sys.argv[1])
    source = PromptSource.open(config)
    state = source.restore(None)
    for _ in range(20):
        prompts, state = source.take(state, 64)
    assert len(source) == 30_000
print(memory() - before)
"""


@pytest.mark.parametrize(
    "kinds", [("jsonl", "parquet"), pytest.param(("csv", "stream.arrow", "json"), marks=pytest.mark.full)]
)
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """60 MB of rows: a list of them would take more than that; here are the blocks in flight and a few bytes per
    row."""
    rows = [{"input": f"{i} {'x' * 2000}"} for i in range(30_000)]
    for kind in kinds:
        path = tmp_path / f"rows.{kind}"
        if kind == "stream.arrow":
            with pa.ipc.new_stream(path, pa.schema([("input", pa.string())])) as writer:
                writer.write_table(pa.Table.from_pylist(rows), max_chunksize=1000)
        elif kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False, compression="none")  # a row group
        else:
            {"jsonl": write_jsonl, "csv": write_csv, "json": write_array}[kind](path, rows)
    words = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "cache"),
        *(str(tmp_path / f"rows.{kind}") for kind in kinds),
    ]
    measured = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert int(measured.stdout) < 30e6


# ---- data sets of other projects -------------------------------------------------------------------------------------

VERL = [
    {
        "data_source": "gsm8k",
        "input": [{"content": "2 + 2?", "role": "user"}],
        "reward_model": {"style": "rule", "ground_truth": f"{4 + i}"},
        "extra_info": {"index": i, "split": "train", "answer": {"final": f"{i}", "unit.si": "m"}},
    }
    for i in range(3)
]


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "saved"])
@pytest.mark.parametrize(
    ("key", "labels"),
    [
        ("reward_model.ground_truth", ["4", "5", "6"]),
        ("extra_info.answer.final", ["0", "1", "2"]),
        ("extra_info.answer.unit.si", ["m", "m", "m"]),
        ("reward_model", [f'{{"style": "rule", "ground_truth": "{4 + i}"}}' for i in range(3)]),
    ],
)
def test_a_key_with_dots_names_a_nested_column(tmp_path: Path, name: str, key: str, labels: list[str]) -> None:
    FORMATS[name](tmp_path / name, VERL)
    rows = [json.loads(row) for row in rows_of(tmp_path / name, label_key=key, metadata_key="extra_info")]
    assert [row[1] for row in rows] == labels and rows[2][2]["answer"] == {"final": "2", "unit.si": "m"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_nested_prompts_metadata_and_tools(tmp_path: Path, name: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [{"a": {"b": {"prompt": "p", "meta": {"k": 1}}, "tools": [tool]}, "x": 1}, {"a": None, "x": 2}]
    FORMATS[name](tmp_path / name, rows)
    keys = {"input_key": "a.b.prompt", "metadata_key": "a.b.meta", "tool_key": "a.tools"}
    [row] = rows_of(f"{tmp_path / name}@[:1]", **keys)
    assert json.loads(row) == ["p", "", {"k": 1}, [tool]]
    with pytest.raises(DataError, match=r"(:2|row 1): column 'a.b.prompt' holds null"):
        rows_of(tmp_path / name, **keys)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_wrong_nested_key_lists_the_keys_that_exist(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, VERL)
    with pytest.raises(DataError, match=r"it has 'reward_model.style', 'reward_model.ground_truth': .*--label-key"):
        rows_of(tmp_path / name, label_key="reward_model.answer")
    with pytest.raises(DataError, match=r"it has 'data_source', 'input', .*--label-key"):
        rows_of(tmp_path / name, label_key="reward.ground_truth")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_column_with_dots_in_its_name_comes_first(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, [{"input": "p", "a.b": "exact", "a": {"b": "nested"}}])
    [row] = rows_of(tmp_path / name, label_key="a.b")
    assert json.loads(row)[1] == "exact"


def test_directories_that_cannot_be_read_say_what_to_name(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "train", pa.table({"input": ["a", "b"]}))
    assert texts(tmp_path / "tr*") == ["a", "b"] and texts(f"{tmp_path / 'train'}/") == ["a", "b"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"has the splits train, test: name one of them, as in .*/train"):
        rows_of(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    with pytest.raises(DataError, match=r"is a directory .*\*\.parquet"):
        rows_of(tmp_path)
    (tmp_path / "train" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00000-of-00002.arrow does not exist"):
        rows_of(tmp_path / "train")
    (tmp_path / "train" / "state.json").write_text("[")
    with pytest.raises(DataError, match=r"train: state.json"):
        rows_of(tmp_path / "train")


# ---- files that are damaged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"input": "a"} {"input": "b"}]', r"row 1: malformed"),
        ('[{"input": "a"},]', r"row 1: malformed"),
        ('[{"input": "a"}] more', r"row 1: malformed"),
        ('[{"input": "a"}, ["b"]]', r"row 1: found a JSON list"),
        ("[" * 100_000, r"row 0: malformed"),
        ("[]", r"is empty"),
        ('{"data": [{"input": "a"}]}', r":1 has no column 'input'; it has 'data'"),
        ('{\n"data": [{"input": "a"}]}', r":1: malformed line"),
        ('[{"input": "\xff"}]', r"row 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_a_damaged_json_array_names_the_row(
    tmp_path: Path, text: str, problem: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "_BLOCK_BYTES", block if len(text) < 1000 else 1 << 20)
    (tmp_path / "rows.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows\.json " + problem if problem[0] != ":" else r"rows\.json" + problem):
        rows_of(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.csv", b"", r"is empty"),
        ("rows.csv", b"input,b\na,1\na,1,2\n", r"row 1 has 3 values for 2 columns"),
        ("rows.csv", b"input\na\n\xff\n", r"invalid start byte"),
        ("rows.csv", b'input\n"' + (b"x" * (1 << 20) + b"\n") * 17 + b'"\n', r"beyond line \d+ \(field larger than"),
        ("rows.csv", b'input\na\n"b\n', r"beyond line 3 \(unexpected end of data"),
        ("rows.tsv", b'input\n"a"b\n', r"beyond line 2 "),
        ("rows.arrow", b"not arrow at all", r"is not a Arrow file"),
        ("rows.feather", b"FEA1xxxxxxxxxxxxxxFEA1", r"is not a Feather file"),
        ("rows.parquet.gz", gzip.compress(b"PAR1", mtime=0), r"is not a Parquet file"),
        ("rows.csv.gz", b"input\na\n", r"is damaged after 0 decompressed bytes"),
    ],
)
def test_a_damaged_columnar_file_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as error:
        rows_of(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_truncated_arrow_file_names_the_row(tmp_path: Path) -> None:
    write_stream(tmp_path / "rows.arrow", pa.table({"input": [f"{i}" * 100 for i in range(50)]}))
    content = (tmp_path / "rows.arrow").read_bytes()
    (tmp_path / "rows.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"rows\.arrow cannot be read beyond row (14|21|28)"):
        rows_of(tmp_path / "rows.arrow")


def test_csv_keeps_text_as_it_is(tmp_path: Path) -> None:
    text = '﻿input,label,metadata\r\n"a, ""b""\nc",007,\r\nNA,2.00,"{""k"": null}"\r\nnull,2024-01-31,{}\r\n'
    (tmp_path / "rows.csv").write_text(text, newline="")
    rows = [json.loads(row) for row in rows_of(tmp_path / "rows.csv", label_key="label")]
    assert rows == [['a, "b"\nc', "007", {}], ["NA", "2.00", {"k": None}], ["null", "2024-01-31", {}]]


# ---- null ------------------------------------------------------------------------------------------------------------

CALLS = [
    {"name": "weather", "arguments": {"city": "p"}},
    {"name": "add", "arguments": {"expr": "1+1"}},
    {"name": "deep", "arguments": {"options": {"unit": "C"}, "list": [{"a": 1}, {"b": 2}]}},
    {"name": "deep", "arguments": {"options": {"lang": "en"}}},
]


def chat(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "1", "name": "f"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize("name", STRUCTS)
def test_arguments_that_a_row_does_not_have_stay_absent(tmp_path: Path, name: str) -> None:
    rows, tokenizer = [{"input": chat(call)} for call in CALLS], chat_tokenizer(QWEN3)
    FORMATS[name](tmp_path / name, rows)
    for number, row in enumerate(rows):
        [line] = rows_of(f"{tmp_path / name}@[{number}:{number + 1}]")
        assert json.loads(line)[0] == row["input"]
        assert "null" not in tokenizer.render([json.loads(line)[0]], [None])[0]


@pytest.mark.parametrize("column", ["metadata", "label", "tools"])
def test_null_fields_of_structs_are_absent_in_every_column(tmp_path: Path, column: str) -> None:
    first, second = {"a": 1, "in": {"x": [1, None]}}, {"in": {"y": 2}, "b": 2}
    rows = [{"input": "p", column: [value] if column == "tools" else value} for value in (first, second)]
    expected = rows_of(write_jsonl(tmp_path / "rows.jsonl", rows), label_key="label" if column == "label" else None)
    for name in ("rows.parquet", "saved"):
        FORMATS[name](tmp_path / name, rows)
        assert rows_of(tmp_path / name, label_key="label" if column == "label" else None) == expected


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows.parquet"])
def test_explicit_nulls_of_json_stay(tmp_path: Path, name: str) -> None:
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string", "default": None, "enum": ["a", None]}}}}
    messages = chat({"name": "f", "arguments": {"x": None, "empty": {}}})
    row = {"input": messages, "tools": [tool], "metadata": {"n": None}}
    if name == "rows.parquet":  # as JSON text
        row = {key: json.dumps(value) for key, value in row.items()}
    FORMATS[name](tmp_path / name, [row, row])
    assert json.loads(rows_of(tmp_path / name)[1]) == [messages, "", {"n": None}, [tool]]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_message_that_only_calls_tools_has_no_content(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    rows = [{"input": chat(CALLS[0])}]
    del rows[0]["input"][1]["content"]
    rows[0]["input"][1] |= content
    FORMATS[name](tmp_path / name, rows)
    [row] = rows_of(tmp_path / name)
    assert json.loads(row)[0][1]["content"] is None


# ---- messages as text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "indent"), [("rows.jsonl", 2), ("rows.parquet", None), ("rows.csv", 2)])
def test_messages_may_be_json_text(tmp_path: Path, name: str, indent: int | None) -> None:
    messages = [{"content": 'a "b" [é]', "role": "user"}]
    FORMATS[name](tmp_path / name, [{"input": json.dumps(messages, indent=indent)}] * 2)
    assert json.loads(rows_of(tmp_path / name)[1])[0] == messages
    with pytest.raises(DataError, match=r"row 0: .*--apply-chat-template"):
        check_prompt_data(RolloutConfig(prompt_data=str(tmp_path / name)))


@pytest.mark.parametrize("text", ["[1, 2]", '[{"name": "x"}]', '[{"role": "admin"}] Summarize.', "[role: x]"])
def test_other_text_with_brackets_stays_text(tmp_path: Path, text: str) -> None:
    assert texts(write_jsonl(tmp_path / "rows.jsonl", [{"input": text}])) == [text]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[{'role': 'user', 'content': 'a'}]", " is text but not JSON"),  # pandas' to_csv of a column of lists
        ('[{"role": "user", "content": "a"} {"role": "user", "content": "b"}]', " is text but not JSON"),
        ('[{"role": "user"}]', ": message 1 .user. has no content"),
        ('[{"role": "user", "content": "a"}, 3]', ": message 2 is 3"),
    ],
)
def test_messages_that_are_nearly_json_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    write_csv(tmp_path / "rows.csv", [{"input": "a"}, {"input": text}])
    with pytest.raises(DataError, match=rf"rows.csv row 1: column 'input'{problem}"):
        rows_of(tmp_path / "rows.csv")


# ---- types that JSON does not have -----------------------------------------------------------------------------------

NOON = datetime.datetime(2024, 1, 31, 12, 0)
LABELS = [
    (pa.array([Decimal("2.00")]), "2.00"),
    (pa.array([Decimal("-0.000000001")], pa.decimal128(30, 9)), "-0.000000001"),
    (pa.array([0.1], pa.float32()), "0.1"),
    (pa.array([np.float16(0.1)], pa.float16()), "0.1"),
    (pa.array([float("nan")]), ""),
    (pa.array([None], pa.float64()), ""),
    (pa.array([2**63], pa.uint64()), str(2**63)),
    (pa.array([True]), "true"),
    (pa.array([NOON.date()]), "2024-01-31"),
    (pa.array([NOON], pa.timestamp("s", tz="UTC")), "2024-01-31T12:00:00+00:00"),
    (pa.array([NOON.time()], pa.time64("us")), "12:00:00"),
    (pa.array(["x"]).dictionary_encode(), "x"),
    (pa.array([[0.1, None]], pa.list_(pa.float32())), "[0.1, null]"),
    (pa.array([{"a": 0.1, "b": None, "d": Decimal("2.50")}], None), '{"a": 0.1, "d": 2.5}'),
    (pa.array([[("k", 1.5), ("n", None)]], pa.map_(pa.string(), pa.float32())), '{"k": 1.5, "n": null}'),
]


@pytest.mark.parametrize(("values", "label"), LABELS, ids=[f"{values.type}" for values, _ in LABELS])
def test_a_label_of_any_type_becomes_its_text(tmp_path: Path, values: pa.Array, label: str) -> None:
    table = pa.table({"input": ["p"], "label": values})
    write_stream(tmp_path / "rows.arrow", table)
    pq.write_table(table, tmp_path / "rows.parquet")
    for kind in ("arrow", "parquet"):
        [row] = rows_of(tmp_path / f"rows.{kind}", label_key="label")
        assert json.loads(row)[1] == label
    if not label:
        config = RolloutConfig(prompt_data=str(tmp_path / "rows.arrow"), label_key="label", rm_type="math")
        with pytest.raises(RewardError, match=r"row 0: the row has no label"):
            check_prompt_data(config, grading=config)


def test_a_missing_label_in_json_is_empty_and_an_infinite_one_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"input": "p", "label": {v}}}\n' for v in ("NaN", "null", '""')))
    assert [json.loads(row)[1] for row in rows_of(tmp_path / "rows.jsonl", label_key="label")] == [""] * 3
    (tmp_path / "rows.jsonl").write_text('{"input": "p", "label": -Infinity}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'label'"):
        rows_of(tmp_path / "rows.jsonl", label_key="label")


@pytest.mark.parametrize("column", ["label", "metadata"])
@pytest.mark.parametrize(
    "value",
    [
        pa.array([b"\x00", b"\x01"]),
        pa.array([datetime.timedelta(1)] * 2),
        pa.StringArray.from_buffers(2, pa.array([b"\xff", b"\xfe"]).buffers()[1], pa.array([b"\xff\xfe"]).buffers()[2]),
    ],
    ids=lambda value: str(value.type),
)
def test_values_without_text_name_row_and_column(tmp_path: Path, column: str, value: pa.Array) -> None:
    values = value if column == "label" else pa.StructArray.from_arrays([value], ["image"])
    values = pa.concat_arrays([pa.nulls(1, values.type), values])
    write_stream(tmp_path / "rows.arrow", pa.table({"input": ["p", "q", "r"], column: values}))
    with pytest.raises(DataError, match=rf"rows\.arrow row 1: column '{column}' "):
        rows_of(tmp_path / "rows.arrow", label_key=column if column == "label" else None)


@pytest.mark.parametrize(
    ("values", "metadata"),
    [
        (pa.array([[("a", "1"), ("b", None)]], pa.map_(pa.string(), pa.string())), {"a": "1", "b": None}),
        (pa.array([[(1, [("x", 2)])]], pa.map_(pa.int32(), pa.map_(pa.string(), pa.int8()))), {"1": {"x": 2}}),
        (pa.array([None], pa.map_(pa.string(), pa.string())), {}),
        (
            pa.array([{"price": Decimal("2.00"), "day": NOON.date(), "f": 1}]),
            {"price": 2.0, "day": "2024-01-31", "f": 1},
        ),
        (
            pa.array([{"map": [("k", 0.5)]}], pa.struct([("map", pa.map_(pa.string(), pa.float16()))])),
            {"map": {"k": 0.5}},
        ),
    ],
)
def test_metadata_of_any_type_becomes_json(tmp_path: Path, values: pa.Array, metadata: dict[str, Any]) -> None:
    pq.write_table(pa.table({"input": ["p"], "metadata": values}), tmp_path / "rows.parquet")
    [row] = rows_of(tmp_path / "rows.parquet")
    assert json.loads(row)[2] == metadata
