"""`penstock query`: the views over commits and shards, the questions of docs/queries.md, and what SQL may not do."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import commit_files, commit_samples
from run_records import parent_record, run_json

from penstock.flows.cli import main
from penstock.flows.inspect.sql_query import USAGE
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.maintenance.deletion import Tombstone, tombstone_key
from penstock.storage.samples.sample import SCHEMA, Sample, Status
from penstock.storage.sql_views import VIEWS, execute, list_columns, open_connection
from penstock.storage.store import Store

DOC = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()
KEYS, FORK = RunKeys("my-run"), RunKeys("my-fork")
REWARDS: list[dict[str, tuple[float, float]]] = [  # round -> prompt -> rewards of its two samples
    {"p0": (1, 1), "p1": (0, 1), "p2": (0, 0)},  # p3 is dropped
    {"p0": (1, 0), "p1": (1, 1), "p2": (0, 0), "p3": (0, 1)},
    {"p0": (0, 0), "p1": (1, 1), "p2": (0, 0)},  # p3 is buffered
    {"p0": (0, 0), "p1": (1, 1), "p2": (0, 0), "p3": (1, 1)},
]


def sample(rollout_id: int, prompt: str, index: int, reward: float, prefix: str = "") -> Sample:
    """Return a sample with two prompt tokens and `rollout_id + 1` response tokens; the last one of p2 has 8, in round 2
    of policy versions 1 and 2."""
    row = int(prompt[1:])
    num_tokens = 8 if (prompt, index) == ("p2", 1) else rollout_id + 1
    group = f"{prefix}{4 * rollout_id + row:09d}"
    result = Sample(f"{group}-{index:02d}", group, f"{group}-{index:02d}", rollout_id, prompt, label="right")
    result.response = "right" if reward else f"wrong {prompt}"
    result.token_ids, result.rollout_logprobs = [7] * (2 + num_tokens), [0.0] * 2 + [-0.5] * num_tokens
    result.loss_mask = [0] * 2 + [1] * num_tokens
    result.reward, result.status = reward, Status.TRUNCATED if num_tokens == 8 else Status.COMPLETED
    result.policy_versions = (rollout_id, rollout_id)
    result.metadata = {"source": {"epoch": rollout_id, "file": 0, "row": row}}
    if rollout_id == 2 and num_tokens == 8:
        result.policy_versions, result.metadata["policy_spans"] = (1, 2), [[1, 5], [2, 3]]
    return result


def commit_round(store: Store, keys: RunKeys, r: int) -> None:
    samples = [sample(r, p, i, reward) for p, pair in REWARDS[r].items() for i, reward in enumerate(pair)]
    buffer = {"buffer": [sample(r, "p3", i, 0.0) for i in range(2)]} if r == 2 else {}
    source = {"epoch": 0, "file": 0, "row": 3}
    dropped = [{"group_id": "000000003", "reason": "zero_std_0.0", "source": source}] if r == 0 else []
    fields = {"kind": "rollout", "run": keys.run, "index": r, "policy_version": r, "state": {"dropped": dropped}}
    fields["summary"] = {"rollout/num_samples": float(len(samples)), "perf/tokens_per_gpu_per_sec": 50.0}
    fields |= {"seconds": {"generate": 4.0, "write": 0.5}, "created_at": 1e9 + r}
    commit_samples(store, keys.rollout_prefix(r), samples, buffer, **fields)
    summary = {"train/loss": 1.0 / (r + 1), "train/grad_norm": 2.0, "perf/actor_train_tok_per_s": 100.0}
    summary["train/train_rollout_logprob_abs_diff"] = 0.01 * (r + 1)
    step = Commit(kind="step", run=keys.run, index=r, policy_version=r + 1, summary=summary)
    step.seconds = {"read": 1.0, "update": 2.0}
    store.commit(keys.step_prefix(r), step)


def commit_evaluation(store: Store, keys: RunKeys, version: int, mean: float) -> None:
    summary = {"eval/sums": mean, "eval/sums-ci_low": mean - 0.1, "eval/sums-ci_high": mean + 0.1}
    summary |= {"eval/sums-pass@1": mean, "eval/sums/num_prompts": 4.0}
    fields = {"kind": "eval", "run": keys.run, "index": version, "policy_version": version, "summary": summary}
    samples = [sample(version, f"p{row}", 0, float(row < 4 * mean), f"eval-{version:06d}-sums-") for row in range(4)]
    commit_samples(store, keys.eval_prefix(version, "sums"), samples, **fields)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of four rounds with checkpoints 1 (expired), 2 and 4, and a fork of it at round 2."""
    store = Store(str(tmp_path_factory.mktemp("store")))
    config = {"train": {"lr": 0.5}}
    for keys, more in ((KEYS, {}), (FORK, {"parent": parent_record("my-run", 2)})):
        store.create(keys.record, run_json(config=config, created_at=1e9, **more))
    for r in range(4):
        commit_round(store, KEYS, r)
    for version in (1, 2, 4):
        fields = {"kind": "checkpoint", "run": "my-run", "index": version, "policy_version": version}
        prefix = KEYS.checkpoint_prefix(version)
        saved = commit_files(store, prefix, {"weights": b"w"}, created_at=1e9, **fields)
        if version == 1:
            tombstone = Tombstone(why="keep 2", expired_at=1e9 + 60, commit=saved)
            store.create(tombstone_key(prefix), tombstone.model_dump_json().encode())
            store.delete([commit_key(prefix)])
    for r in range(2):
        for prefix in (RunKeys.rollout_prefix, RunKeys.step_prefix):
            store.create(commit_key(prefix(FORK, r)), store.read(commit_key(prefix(KEYS, r))) or b"")
    for keys, version, mean in ((KEYS, 0, 0.25), (KEYS, 4, 0.75), (FORK, 4, 0.5)):
        commit_evaluation(store, keys, version, mean)
    commit_samples(store, KEYS.rollout_prefix(9), [sample(9, "p0", 0, 1.0)], kind="rollout", index=9)
    store.delete([commit_key(KEYS.rollout_prefix(9))])  # an attempt that was not committed
    return store


@pytest.fixture(scope="module")
def sql(store: Store) -> Callable[[str], list[tuple]]:
    connection, problems = open_connection(store, store.list("runs"))
    assert problems == {}
    return lambda text: execute(connection, text)[1].fetchall()


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Store:
    """A copy of the store, which a test may damage."""
    return Store(str(shutil.copytree(store.root, tmp_path / "copy")))


def query(store: Store, *words: str) -> int:
    return main(["query", *words, "--store", store.root])


# ---- views -----------------------------------------------------------------------------------------------------------


def test_views_have_the_documented_columns(store: Store) -> None:
    columns = list_columns(open_connection(store, [])[0])
    assert list(columns) == list(VIEWS)
    names = {view: {name for name, _ in rows} for view, rows in columns.items()}
    documented = {}
    for view, text in re.findall(r"^### (\w+)\n(.*?)(?=^##)", DOC, re.M | re.S):
        documented[view] = set(re.findall(r"^\| `(\w+)` \| .+ \|$", text, re.M))
    shared = documented.pop("shared")
    documented["eval_samples"] |= documented["samples"]
    assert {view: rows | shared & names[view] for view, rows in documented.items()} == names
    assert {field.name for field in SCHEMA} <= names["samples"]


def test_samples_are_those_of_commits_and_forks_share_the_shards_of_their_parent(sql) -> None:
    counts = [(run, r, r, 2 * len(REWARDS[r])) for run, n in (("my-fork", 2), ("my-run", 4)) for r in range(n)]
    assert sql("select run, rollout_id, policy_version, count(*) from samples group by all order by all") == counts
    assert sql("select count(*) from samples where run = 'my-fork' and rollout_id = 1") == [(8,)]
    text = "select policy_version, sum(reward) from eval_samples where run = 'my-run' group by all order by all"
    assert sql(text) == [(0, 1.0), (4, 3.0)]


def test_views_of_commits(sql) -> None:
    assert sql("select run, flow, num_rollouts, num_steps, parent, forked_at, config->>'$.train.lr' from runs") == [
        ("my-fork", "train", 2, 2, "my-run", 2, "0.5"),
        ("my-run", "train", 4, 4, None, None, "0.5"),
    ]
    kinds = sql("select kind, count(*) from commits where run = 'my-run' group by 1 order by 1")
    assert kinds == [("checkpoint", 2), ("eval", 2), ("rollout", 4), ("step", 4)]
    rollout = (
        "select rows, seconds, seconds_by_part['write'], epoch(created_at), key from commits where kind = 'rollout'"
    )
    [row] = sql(f"{rollout} and run = 'my-run' and index = 2")
    assert row == (8, 4.5, 0.5, 1e9 + 2, "runs/my-run/rollouts/000002.commit.json")
    assert sql(
        "select policy_version, expired, expired_reason, date_diff('second', created_at, expired_at) "
        "from checkpoints order by 1"
    ) == [(1, True, "keep 2", 60), (2, False, None, None), (4, False, None, None)]
    [step] = sql("select loss, grad_norm, seconds from steps where run = 'my-run' and rollout_id = 1")
    assert step == (0.5, 2.0, 3.0)
    assert sql("select value from metrics where name = 'train/loss' and run = 'my-run' and index = 3") == [(0.25,)]


def test_shards_are_opened_only_if_a_query_needs_them(copy: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (lost,) = Path(copy.root).glob("runs/my-run/rollouts/000003/*/part-*.parquet")
    lost.unlink()
    connection, problems = open_connection(copy, ["my-run", "my-fork"])
    assert problems == {}
    assert execute(connection, "select count(*) from runs")[1].fetchall() == [(2,)]
    for where, count in (("rollout_id = 2", 6), ("rollout_id < 2 and run = 'my-run'", 14), ("run = 'my-fork'", 14)):
        assert execute(connection, f"select count(reward) from samples where {where}")[1].fetchall() == [(count,)]
    assert query(copy, "select avg(reward) from samples") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and lost.name in error


def test_s3_store_is_queried_like_a_local_one(
    store: Store, s3_store: Callable[..., Store], tmp_path: Path, sql: Callable[[str], list[tuple]]
) -> None:
    remote = s3_store(tmp_path.name)
    remote.fs.put(f"{store.root}/", remote.root, recursive=True)
    connection, problems = open_connection(remote, ["my-run", "my-fork"])
    assert problems == {}
    text = "select run, rollout_id, avg(reward), max(len(token_ids)) from samples group by all order by all"
    assert execute(connection, text)[1].fetchall() == sql(text)
    assert execute(connection, "select uri from checkpoints")[1].fetchone()[0].startswith("s3://bucket/")


def test_empty_store_has_empty_views(tmp_path: Path) -> None:
    connection, _ = open_connection(Store(str(tmp_path)), [])
    for view in VIEWS:
        assert execute(connection, f"select count(*) from {view}")[1].fetchall() == [(0,)]


# ---- the questions of the documentation ------------------------------------------------------------------------------

QUESTIONS = {int(n): re.findall(r"```sql\n(.*?)```", text, re.S)
             for n, text in re.findall(r"^### (\d+)\. (.*?)(?=^### |\Z)", DOC, re.M | re.S)}  # fmt: skip
ANSWERS = {
    1: [(0, 0.5, pytest.approx(13 / 6), 6), (1, 0.5, pytest.approx(22 / 8), 8),
        (2, pytest.approx(1 / 3), pytest.approx(23 / 6), 6), (3, 0.5, 4.5, 8)],
    2: [(1, 0, 0, 6, 3, 0.5), (2, 1, 1, 8, 4, 0.5), (4, 2, 3, 14, 4, pytest.approx(6 / 14))],
    3: [(0, 3, 2, 1), (1, 4, 2, 1), (2, 3, 3, 2), (3, 4, 4, 2)],
    4: [("p0", 4, 1, 3, "forgotten"), ("p2", 4, None, 3, "never solved")],
    5: [(r, pytest.approx(0.01 * (r + 1)), pytest.approx(0.005 * (r + 2)), pytest.approx(0.01)) for r in range(4)],
    6: [(0, 89, pytest.approx(89 / 94)), (1, 5, pytest.approx(5 / 94))],
    8: [("sums", 0, "my-run", 0.25, 0.15, 0.35, 4), ("sums", 4, "my-fork", 0.5, 0.4, 0.6, 4),
        ("sums", 4, "my-run", 0.75, 0.65, 0.85, 4)],
    10: [(0, "dropped", "zero_std_0.0", 1), (0, "trained", None, 3), (1, "trained", None, 4),
         (2, "buffered", None, 1), (2, "trained", None, 3), (3, "trained", None, 4)],
    11: [("p2", "right", "wrong p2", 8), ("p0", "right", "wrong p0", 5), ("p1", "right", "wrong p1", 1),
         ("p3", "right", "wrong p3", 1)],
}  # fmt: skip


@pytest.mark.parametrize("number", QUESTIONS)
def test_documented_question_is_answered(number: int, sql) -> None:
    answers = [sql(text) for text in QUESTIONS[number]]
    assert answers and all(answers)
    if number in ANSWERS:
        assert answers == [ANSWERS[number]]
    if number == 7:
        assert answers[0][:2] == [("rollout", "generate", 4, 16.0, 4.0), ("step", "update", 4, 8.0, 2.0)]
        assert answers[1] == [(r, 50.0, 100.0) for r in range(4)]
    if number == 9:
        assert answers[0][0] == (0, "000000002-01", "truncated", 8, 0.0, "wrong p2")


# ---- several runs ----------------------------------------------------------------------------------------------------

MIXES = [
    "select rollout_id, avg(reward) from samples group by 1",
    "SELECT COUNT ( * ) FROM eval_samples",
    "with s as (select * from samples) select quantile_cont(reward, 0.9) from s -- of each run",
    "select sum(seconds) over (order by rollout_id) from steps where rollout_id = 1 /* run */",
    "create temp table t as select mode(status) as m from samples; select * from t",
]
KEEPS_APART = [
    "select run, rollout_id, avg(reward) from samples group by all",
    "select avg(reward) from samples as s where s.\"run\" = 'my-run'",
    "select count(*) from runs",
    "select reward from samples limit 1",
]


@pytest.mark.parametrize("text", MIXES + KEEPS_APART)
def test_aggregate_over_several_runs_warns_unless_run_is_named(
    text: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert query(store, text) == 0
    assert capsys.readouterr().err.startswith("warning: ") == (text in MIXES)
    assert query(store, text, "--run", "my-run") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", re.findall(r'penstock query "(select .*?)"', USAGE + DOC) + QUESTIONS[1])
def test_printed_queries_do_not_mix_runs(text: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert query(store, text) == 0
    assert capsys.readouterr().err == ""


# ---- what SQL may not do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from glob('/etc/*')",
        "copy (select 1) to '{path}'",
        "attach '{path}'",
        "install httpfs",
        "create persistent secret (type s3)",
        "set enable_external_access=true",
        "set lock_configuration=false",
        "select * from REWARDS",  # a Python variable
    ],
)
def test_statement_that_accesses_files_or_settings_is_refused(
    statement: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(store.walk("runs"))
    assert query(store, statement.format(path=tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith("penstock: the query failed: ")
    assert list(tmp_path.iterdir()) == [] and list(store.walk("runs")) == before


# ---- the command -----------------------------------------------------------------------------------------------------


def test_formats(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "select 'a' || chr(27) || '[b]' as a, 0.5 as b, [1, 2] as c, 'nan'::double as d, null as e, repeat('x', 99) f"
    )
    out = {}
    for name in ("table", "csv", "json", "jsonl"):
        assert query(store, text, "--format", name) == 0
        out[name] = capsys.readouterr().out
    row = {"a": "a\x1b[b]", "b": 0.5, "c": [1, 2], "d": "NaN", "e": None, "f": "x" * 99}
    assert json.loads(out["json"]) == [row] and [json.loads(line) for line in out["jsonl"].splitlines()] == [row]
    assert out["csv"].splitlines()[1] == 'a\x1b[b],0.5,"[1,2]",nan,,' + "x" * 99
    title, line = out["table"].splitlines()
    assert title.split() == [*"abcdef"] and line.split() == ["a\\u001b[b]", "0.5", "[1,2]", "nan", "x" * 57 + "..."]
    assert query(store, "select * from runs where false", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_limit_of_rows(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    text = "select * from range(3000)"
    for words, rows in (((), 1001), (("--limit", "5"), 6), (("--limit", "3000"), 3001), (("--format", "csv"), 3001)):
        assert query(store, text, *words) == 0
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == rows and ("only the first" in err) == (rows < 3001)


def test_sql_from_file_and_standard_input(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "q.sql"
    file.write_text("-- comment\ncreate temp table t as select count(*) as n from runs;\nselect n from t;\n")
    assert query(store, "--file", str(file), "--run", "my-run", "--format", "csv") == 0
    assert capsys.readouterr().out == "n\n1\n"
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert query(store, "-", "--run", "my-run", "my-fork", "--format", "csv") == 0
    assert capsys.readouterr().out == "n\n2\n"


def test_without_sql_the_views_are_listed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert query(store) == 0
    out = capsys.readouterr().out
    assert all(f"\n{view}: " in f"\n{out}" for view in VIEWS) and re.search(r"^  reward +DOUBLE$", out, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["select rewrd from samples"], 'Candidate bindings: "reward"'),
        (["select"], "Parser Error"),
        ([" "], "the SQL is empty"),
        (["/* none */"], "contains no statement"),
        (["select 1", "--file", "q.sql"], "pass one of them"),
        (["select 1", "--format", "xml"], "--format takes table, csv, json, jsonl"),
        (["select 1", "--run", "ghost"], "no run 'ghost'"),
        (["select 1", "--lr", "1"], "--lr has no effect on penstock query"),
        (["--file", "/nonexistent/q.sql"], "no such file"),
        (["--file", sys.executable], "is not UTF-8 text"),
    ],
)
def test_invalid_request_is_a_one_line_error(
    words: list[str], message: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert query(store, *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and "LINE 1" not in error, error


def test_damaged_run_is_left_out(copy: Store, capsys: pytest.CaptureFixture[str]) -> None:
    Path(copy.path(commit_key(FORK.step_prefix(1)))).write_text("{")
    copy.create("runs/lost/steps/000000.commit.json", Commit(kind="step").model_dump_json().encode())
    copy.create("runs/bad/run.json", b"[]")
    copy.create("runs/removed/removed.json", b"")
    copy.create("runs/removed/run.json", b"{")
    assert query(copy, "select run, num_steps from runs", "--format", "csv") == 0
    out, err = capsys.readouterr()
    assert out == "run,num_steps\nmy-run,4\n"
    assert re.findall(r"^run (\S+) is damaged and is left out: ", err, re.M) == ["bad", "lost", "my-fork"]
    assert len(err.splitlines()) == 3


def test_missing_duckdb_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert query(store, "select 1") == 2
    assert "pip install 'penstock-rl[query]'" in capsys.readouterr().err
