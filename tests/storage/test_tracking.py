"""MLflow gets every commit once, despite kills and outages, and tracking never blocks a run."""

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow_content import Shown
from tracked_run import CONFIG, KEYS, RUN, commits, offer, track

from penstock.storage.commit import Commit, commit_key, encode_commit
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import Outbox, RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
from penstock.storage.tracking.mlflow.mlflow_runs import Link, link_tags
from penstock.storage.tracking.tracker import Committed, RunCommits, RunStarted, TrackedRun, tracking_directory

TABLES = ("runs", "metrics", "params", "inputs", "datasets", "logged_models", "logged_model_metrics")


def counts(database: Path) -> dict[str, int]:
    with sqlite3.connect(database) as connection:
        return {table: connection.execute(f"select count(*) from {table}").fetchone()[0] for table in TABLES}


def shown_in(database: Path) -> tuple[MlflowClient, Shown]:
    client = MlflowClient(f"sqlite:///{database}")
    return client, Shown(client)


def test_runs_metrics_and_lineage_in_mlflow(database: Path, tmp_path: Path) -> None:
    track(tmp_path / "out", database, commits())
    client, shown = shown_in(database)
    runs = shown.named
    trained, evaluated = ("train-000000-000001", "train-000002-000003"), ("eval-000002-heldout", "eval-000004-heldout")
    assert set(runs) == {"demo", "convert-f00d", *trained, *evaluated}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    top = [name for name, run in runs.items() if "mlflow.parentRunId" not in run.data.tags]
    assert top == ["demo"], "a conversion is a child of the first run that starts from its model"

    main = runs["demo"]
    assert main.data.params == {"run.num_rollout": "4", "train.lr": "0.0003"}
    points = client.get_metric_history(main.info.run_id, "rollout/raw_reward")
    assert [(p.step, p.value, p.timestamp) for p in points] == [
        (r, 0.25 * r, int(1e12 + 1e5 * (r + 1))) for r in range(4)
    ]
    assert {artifact.path for artifact in client.list_artifacts(main.info.run_id)} == {"commits", "reward.png"}

    train = runs["train-000002-000003"]
    assert train.data.tags["mlflow.parentRunId"] == main.info.run_id
    assert [i.dataset.name for i in train.inputs.dataset_inputs] == ["demo/rollout/000002", "demo/rollout/000003"]
    first = runs["train-000000-000001"]
    assert [m.model_id for m in train.inputs.model_inputs] == [m.model_id for m in first.outputs.model_outputs]
    assert [m.model_id for m in first.inputs.model_inputs] == [
        m.model_id for m in runs["convert-f00d"].outputs.model_outputs
    ]

    scored = client.get_logged_model(train.outputs.model_outputs[0].model_id)
    assert scored.params["uri"] == "/store/runs/demo/c"
    assert {(m.key, m.value, m.dataset_name) for m in scored.metrics} == {
        ("eval/heldout", 0.5, "h.jsonl"),
        ("eval/heldout-pass_at_4", 0.75, "h.jsonl"),
    }


def with_samples() -> list[tuple[str, Commit]]:
    """Return the commits with sample previews in rollouts and evaluations."""
    offered = commits()
    for _, commit in offered:
        if commit.kind in ("rollout", "eval"):
            commit.state = {"shown": [{"reward": 1.0, "prompt": f"{commit.kind} {commit.index}", "turns": 2}]}
    return offered


def test_each_metric_has_one_point_a_step(database: Path, tmp_path: Path) -> None:
    # in the summaries of rollouts and of evaluations
    shared = {"perf/rollout_time": 1.0, "rollout/num_adopted_groups": 0.0}
    offered = commits()
    for _, commit in offered:
        if commit.kind in ("rollout", "eval"):
            commit.summary |= shared
    second = offered[-1][1].model_copy(update={"summary": {"eval/other": 0.5, **shared}})
    track(tmp_path / "out", database, [*offered, (commit_key(KEYS.eval_prefix(4, "other")), second)])
    with sqlite3.connect(database) as connection:
        points = connection.execute("select run_uuid, key, step, count(*) from metrics group by 1, 2, 3").fetchall()
        linked = connection.execute(
            "select model_id, metric_name, metric_step, count(*) from logged_model_metrics group by 1, 2, 3"
        ).fetchall()
    assert "eval/other/perf/rollout_time" in {key for _, key, _, _ in points}
    assert [row for row in points + linked if row[3] > 1] == []


@pytest.mark.full
def test_samples_are_tables_that_mlflow_can_show(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `load_table` searches there, not in the client's tracking URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    track(tmp_path / "out", database, with_samples()[:4])
    track(tmp_path / "out", database, with_samples())
    track(tmp_path / "another machine", database, with_samples())  # delivered twice, each table exists once
    client, shown = shown_in(database)
    runs, experiment = shown.named, client.get_experiment_by_name("penstock").experiment_id
    paths = [f"samples/{r:06d}.json" for r in range(4)]
    assert [artifact.path for artifact in client.list_artifacts(runs["demo"].info.run_id, "samples")] == paths
    listed = [{"path": path, "type": "table"} for path in paths]
    # what MLflow's page renders as a table
    assert json.loads(runs["demo"].data.tags["mlflow.loggedArtifacts"]) == listed
    for r, path in enumerate(paths):
        table = client.load_table(experiment, path, run_ids=[runs["demo"].info.run_id])
        assert table.to_dict("records") == [{"reward": 1.0, "prompt": f"rollout {r}", "turns": 2}]
    scored = client.load_table(experiment, "samples/000004.json", run_ids=[runs["eval-000004-heldout"].info.run_id])
    assert scored["prompt"].tolist() == ["eval 4"]


@pytest.mark.full
def test_mlflow_can_open_the_source_of_every_data_set(database: Path, tmp_path: Path) -> None:
    import mlflow.data

    track(tmp_path / "out", database, commits())
    found = [i.dataset for run in shown_in(database)[1].runs for i in run.inputs.dataset_inputs]
    assert len(found) == 2 * 4 + 2  # shards are data sets of the run and of a train run
    assert len({(dataset.name, dataset.digest) for dataset in found}) == 5  # both evaluations used the same data
    for dataset in found:
        assert mlflow.data.get_source(dataset).to_dict()["uri"].startswith("/")
        assert "mlflow_colspec" in json.loads(dataset.schema or '{"mlflow_colspec": []}')


def test_artifacts_are_beside_a_database_given_by_a_relative_path(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    track(tmp_path / "out", Path(database.name), commits()[:2])
    assert list(tmp_path.glob("artifacts/penstock/*/artifacts/commit.json"))


@pytest.mark.integration
@pytest.mark.parametrize("num_calls", [7, 12])
def test_delivery_that_ends_after_any_call_to_mlflow_is_completed(
    num_calls: int, database: Path, tmp_path: Path
) -> None:
    clean = tmp_path / "clean.db"
    clean.write_bytes(database.read_bytes())
    tracker, calls = MlflowOptions.connect(f"sqlite:///{database}", RUN), iter(range(num_calls))

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_die(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if next(calls) == num_calls - 1:
                raise SystemExit
            return result

        return call_and_die

    for name in ("log_batch", "create_run", "log_inputs", "log_outputs", "create_logged_model", "set_terminated"):
        setattr(tracker.client, name, dying(getattr(tracker.client, name)))
    index = RunCommits()
    with pytest.raises(SystemExit):
        tracker.deliver([RunStarted("start", 1e9, CONFIG)], index)
        for key, commit in commits():
            index.add(key, commit)
            tracker.deliver([Committed(key, commit.created_at, commit)], index)
    track(tmp_path / "out", database, commits())
    track(tmp_path / "clean", clean, commits())
    assert counts(database) == counts(clean)


@pytest.mark.full
def test_a_changed_schedule_is_a_tag_not_an_error(database: Path, tmp_path: Path) -> None:
    track(tmp_path / "out", database, commits()[:3])
    secrets = {"store_options": {"secret": 1}, "password": "x", "hf_token": "y"}
    config = {"run": {"num_rollout": 8, **secrets}, "a": {"b@c": [1, None]}, "max_tokens": 5}
    track(tmp_path / "out", database, commits(), config=config)
    run = shown_in(database)[1].named["demo"]
    assert run.data.tags["changed.run.num_rollout"] == "8"
    before = {"run.num_rollout": "4", "train.lr": "0.0003"}
    assert run.data.params == before | {"a.b_at_c": "[1, null]", "max_tokens": "5"}


def test_an_unreachable_server_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = RunTracking(TrackedRun("demo", "1"), tmp_path / "outbox", ["http://127.0.0.1:9"], CONFIG).start()
    deadline = time.monotonic() + 60
    while tracker.problem is None and time.monotonic() < deadline:
        time.sleep(0.02)
    start = time.perf_counter()
    offer(tracker, commits())
    assert time.perf_counter() - start < 10, "MLflow's own client would wait minutes"
    assert tracker.close(timeout=2) == len(commits()) + 2  # with start and end
    [line] = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert "\n" not in line and len(line) < 400 and "outbox" in line
    assert "\n" not in (tracker.problem or "") and not any(record.exc_info for record in caplog.records)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.integration
def test_a_locked_database_is_logged_in_one_line_and_loses_nothing(
    database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite waits a few seconds for a lock that another process holds."""
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("begin exclusive")
    tracker = RunTracking(RUN, tmp_path / "out", [f"sqlite:///{database}"], CONFIG).start()
    start = time.perf_counter()
    offer(tracker, commits())
    assert time.perf_counter() - start < 10, "the run does not wait for the database"
    deadline = time.monotonic() + 300
    while tracker.problem is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "database is locked" in tracker.problem
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("penstock")]
    assert "could not be sent to MLflow" in line and "database is locked" in line
    other.execute("rollback")
    other.close()
    assert tracker.close(timeout=120) == 0
    expected = {"demo", "convert-f00d", "train-000000-000001", "train-000002-000003"}
    with sqlite3.connect(database) as connection:
        assert expected <= {name for (name,) in connection.execute("select name from runs")}


def test_catch_up_records_the_missing_commits(jsonl_uri: str, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for key, commit in commits():
        store.create(key, encode_commit(commit))  # its files are not looked at here
    run = TrackedRun("demo", "1", store.uri)
    tracker = RunTracking(run, tracking_directory(store, "demo"), [jsonl_uri]).start()
    tracker.record_commit(*commits()[1])
    assert tracker.record_missing_commits(store, KEYS) == len(commits()) - 2  # the model belongs to no run
    assert tracker.record_missing_commits(store, KEYS) == 0
    assert tracker.close(timeout=60) == 0


# ---- the outbox ------------------------------------------------------------------------------------------------------


def test_a_key_is_accepted_once_even_after_a_restart(tmp_path: Path) -> None:
    assert Outbox(tmp_path).append("k", {"n": 1})
    again = Outbox(tmp_path)
    assert not again.append("k", {"n": 2})
    assert [line["n"] for line, _ in again.lines_from(0)] == [1]


@pytest.mark.parametrize("cut", [1, 2, 11])
def test_a_line_cut_by_a_kill_is_skipped(cut: int, tmp_path: Path) -> None:
    Outbox(tmp_path).append("a", {"n": 1})
    Outbox(tmp_path).append("b", {"n": 2})
    file = tmp_path / "outbox.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    outbox = Outbox(tmp_path)
    assert outbox.append("c", {"n": 3})
    kept = [line["key"] for line, _ in outbox.lines_from(0)]
    assert kept == (["a", "b", "c"] if cut == 1 else ["a", "c"])  # one byte is only the end of the line
    assert outbox.append("b", {"n": 2}) is (cut > 1)


def test_only_one_process_delivers(tmp_path: Path) -> None:
    first, second = Outbox(tmp_path), Outbox(tmp_path)
    assert first.try_lock()
    assert not second.try_lock()
    first.unlock()
    assert second.try_lock()


def test_description_with_many_links_fits_into_mlflow_and_shows_the_newest() -> None:
    roles = ("base model of run", "evaluated in", "trained in")
    tags: dict[str, str] = {"mlflow.note.content": "my own text"}
    for number in range(300):
        name = f"a-run-with-a-somewhat-long-name/eval-{number:06d}-aime"
        link = Link(roles[number % 3], name, f"#/experiments/1/runs/{number:032x}")
        tags |= link_tags(tags, [link])
    description = tags["mlflow.note.content"]
    assert description.startswith("my own text\n") and 6000 < len(description) <= 8000
    assert all(f"eval-{number:06d}-aime](" in description for number in (297, 298, 299))
    assert "eval-000000" not in description
    assert link_tags(tags, [link]) == {}
