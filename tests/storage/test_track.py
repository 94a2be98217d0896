"""All trackers hold the same numbers of a run, and `penstock report --to` restores them from the store alone."""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from made_run import config_of, make_run, write_data
from mlflow import MlflowClient
from penstock_command import penstock
from tracked_run import CONFIG, commits
from tracker_points import Points, mlflow_points, tensorboard_points, wandb_points
from wandb_files import read_history

from penstock.flows.inspect.track import main
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, read_existing_record
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError, RunError, TrackerError
from penstock.storage.history.run_record import Start, record_end, record_start
from penstock.storage.maintenance.deletion import expire_checkpoints
from penstock.storage.store import Store
from penstock.storage.tracking import trackers
from penstock.storage.tracking.delivery import RunTracking, read_cost_metrics
from penstock.storage.tracking.tracker import (
    Committed,
    MetricsLogged,
    RunCommits,
    RunStarted,
    TrackedRun,
    tracking_directory,
)
from penstock.storage.tracking.wandb import RECORD, WandbTracker


def mlflow_content(database: Path) -> dict[str, list[Any]]:
    """Everything in MLflow that must be equal after the run was told again, without ids and locations."""
    queries = {
        "runs": "select name, status from runs",
        "metrics": "select name, key, step, value, timestamp from metrics join runs using (run_uuid)",
        "params": "select name, key, value from params join runs using (run_uuid) where key != 'run.store'",
        "datasets": "select name, digest from datasets",
        "models": "select name from logged_models",
        "scores": "select metric_name, metric_step, metric_value, dataset_name from logged_model_metrics",
        "inputs": "select r.name, d.name from inputs i join datasets d on i.source_id = d.dataset_uuid "
        "join runs r on i.destination_id = r.run_uuid where i.source_type = 'DATASET'",
    }
    with sqlite3.connect(database) as connection:
        return {table: sorted(connection.execute(query).fetchall()) for table, query in queries.items()}


def files_of(directory: Path) -> dict[str, int]:
    """Return the files with their times, except for W&B's logs, which another process writes."""
    return {str(p): p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file() and p.suffix != ".log"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the run `r`: four rounds in two starts, two checkpoints, one evaluation."""
    store = Store(str(tmp_path / "store"))
    config = config_of(store, write_data(tmp_path / "data.jsonl"))
    for rounds in (2, 4):
        number = record_start(store, RunKeys("r"), Start(trainer_devices=2, engine_devices=1))
        keys = make_run(store, config, rounds, save=(2, 4), score=(0, 4))
        record_end(store, keys, number, "FINISHED")
    extra = Commit(kind="eval", run="r", index=2, policy_version=2, summary={"eval/x": 0.1, "eval/x-pass@4": 1 / 3})
    store.commit(keys.eval_prefix(2, "x"), extra.model_copy(update={"seconds": {"generate": 1.25}}))
    return store


@pytest.fixture
def run(store: Store) -> TrackedRun:
    keys = RunKeys("r")
    return trackers.tracked_run(store, keys, read_existing_record(store, keys))


def deliver(store: Store, run: TrackedRun, uris: list[str]) -> None:
    """Track the run `r` as a flow does."""
    config = parse_config(["--run", "r", "--store", store.root]).model_dump(mode="json")
    tracker = RunTracking(run, tracking_directory(store, "r"), uris, config).start()
    tracker.record_missing_commits(store, RunKeys("r"))
    for costs in read_cost_metrics(store, RunKeys("r"), None):
        tracker.enqueue_metrics(costs.key, costs.metrics, costs.step, costs.at)
    assert (tracker.close("FAILED", timeout=60), tracker.problem) == (0, None)


def uris_of(database: Path, directory: Path) -> list[str]:
    return [
        f"sqlite:///{database}",
        f"tensorboard://{directory}/tb",
        f"wandb://?project=p&mode=offline&dir={directory}/wb",
    ]


@pytest.mark.integration
def test_all_trackers_hold_the_same_points(store: Store, run: TrackedRun, database: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb.sdk")
    deliver(store, run, uris_of(database, tmp_path))
    points = mlflow_points(database)
    assert ("rollout/raw_reward", 3, 0.25) in [point[:3] for point in points]
    assert [point[1] for point in points if point[0] == "usage/device_hours"] == [2, 4]  # rounds after each start
    assert ("eval/x-pass@4", 2, float(numpy.float32(1 / 3))) in [point[:3] for point in points]
    assert tensorboard_points(tmp_path / "tb") == points
    assert wandb_points(tmp_path / "wb", run) == points
    keys = [row[RECORD] for row in read_history(tmp_path / "wb", run.identity)]
    assert len(set(keys)) == len(keys), "no start was killed"


@pytest.mark.integration
def test_track_into_an_empty_mlflow_gives_the_original_content_without_writing_to_the_store(
    store: Store, run: TrackedRun, database: Path, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh.db"
    shutil.copy(database, fresh)
    deliver(store, run, [f"sqlite:///{database}"])
    assert expire_checkpoints(store, RunKeys("r"), num_to_keep=1) == [2]
    before = files_of(Path(store.root))
    for _ in range(2):
        assert main(["r", "--to", "mlflow", "--tracking-uri", f"sqlite:///{fresh}", "--store", store.root]) == 0
        # `deliver` gives other options than the run's record has
        assert mlflow_content(fresh) | {"params": []} == mlflow_content(database) | {"params": []}
    assert files_of(Path(store.root)) == before


@pytest.mark.parametrize("to", ["tensorboard", pytest.param("wandb", marks=pytest.mark.integration)])
def test_track_repeated_adds_only_what_is_missing(
    to: str, store: Store, run: TrackedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb.sdk" if to == "wandb" else to)
    words = ["--tb-dir", f"{tmp_path}/tb"]
    if to == "wandb":
        words = ["--wandb-dir", f"{tmp_path}/wb", "--wandb-mode", "offline"]

    def points() -> Points:
        return tensorboard_points(tmp_path / "tb") if to == "tensorboard" else wandb_points(tmp_path / "wb", run)

    assert main(["--all", "--to", to, "--store", store.root, *words]) == 0
    first, files = points(), files_of(tmp_path)
    assert main(["r", "--to", to, "--store", store.root, *words]) == 0
    assert points() == first
    assert to == "wandb" or files_of(tmp_path) == files
    store.commit(RunKeys("r").step_prefix(4), Commit(kind="step", run="r", index=4, summary={"train/loss": 0.5}))
    assert main(["r", "--to", to, "--store", store.root, *words]) == 0
    assert [point[:3] for point in points() if point not in first] == [("train/loss", 4, 0.5)]
    assert "commits with" in capsys.readouterr().out


@pytest.mark.integration
def test_run_and_artifacts_move_with_the_store(store: Store, run: TrackedRun, database: Path, tmp_path: Path) -> None:
    own = Path(store.root, "mlflow", "mlflow.db")
    own.parent.mkdir()
    shutil.copy(database, own)
    deliver(store, run, [f"sqlite:///{own}"])
    before = mlflow_content(own)
    moved = shutil.move(store.root, tmp_path / "moved")
    penstock("report", "r", "--to", "mlflow", "--store", str(moved))  # MLflow has cached the old paths in this process
    assert mlflow_content(Path(moved, "mlflow", "mlflow.db")) | {"params": []} == before | {"params": []}
    client = MlflowClient(f"sqlite:///{moved}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("penstock")
    assert experiment is not None
    models = client.search_logged_models([experiment.experiment_id])
    locations = [experiment.artifact_location, *(model.artifact_location for model in models)]
    for shown in client.search_runs([experiment.experiment_id]):
        locations.append(shown.info.artifact_uri)
        assert client.list_artifacts(shown.info.run_id)
    root = f"{Path(moved).as_uri()}/mlflow/artifacts/"
    assert len(locations) > 5 and [place for place in locations if not place.startswith(root)] == []
    assert not Path(store.root).exists()


def test_track_refuses_invalid_requests_and_an_unreachable_server(store: Store) -> None:
    where = ["--store", store.root]
    for words, message in (
        (["r", "--to", "comet"], "found comet"),
        (["--to", "mlflow"], "names of runs"),
        (["r", "--all", "--to", "mlflow"], "names of runs"),
        (["r", "--to", "wandb", "--tracking-uri", "x"], "--tracking-uri has no effect"),
        (["r", "--to", "mlflow", "--tb-dir", "x"], "--tb-dir has no effect"),
    ):
        with pytest.raises(OptionError, match=message):
            main([*words, *where])
    with pytest.raises(RunError, match="has no run 'other'"):
        main(["other", "--to", "mlflow", *where])
    with pytest.raises(TrackerError, match=r"could not be sent to MLflow .*run the command again"):
        main(["r", "--to", "mlflow", "--tracking-uri", "http://127.0.0.1:9", *where])


# ---- delivery --------------------------------------------------------------------------------------------------------


def test_an_outage_of_one_tracker_does_not_delay_another(database: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    uris = ["http://127.0.0.1:9", f"tensorboard://{tmp_path}/tb"]
    tracker = RunTracking(TrackedRun("demo", "1"), tmp_path / "out", uris, CONFIG).start()
    for key, commit in commits():
        tracker.record_commit(key, commit)
    tracker.close(timeout=20)
    mlflow, tensorboard = tracker.deliveries
    assert (mlflow.num_waiting(), tensorboard.num_waiting()) == (len(commits()) + 2, 0)
    mlflow.thread.join()
    again = RunTracking(TrackedRun("demo", "1"), tmp_path / "out", [f"sqlite:///{database}", uris[1]], CONFIG).start()
    assert again.close(timeout=60) == 0
    assert tensorboard_points(tmp_path / "tb") == mlflow_points(database)


@pytest.mark.integration
@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_kill_between_delivery_and_mark_loses_nothing_and_changes_no_chart(
    to: str, store: Store, run: TrackedRun, database: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb.sdk" if to == "wandb" else to)
    uris = uris_of(database, tmp_path)
    uri = uris[1] if to == "tensorboard" else uris[2]
    program = f"""
import os
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import read_committed
from penstock.storage.tracking.tracker import RunCommits, TrackedRun
from penstock.storage.tracking.trackers import tracker_of
tracker = tracker_of({uri!r}).connect({uri!r}, {run!r})
tracker.deliver(read_committed(Store({store.root!r}), RunKeys("r"))[:5], RunCommits())
os._exit(9)
"""
    # W&B would let the program use this process's background process, which the kill is to end.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=120)
    assert result.returncode == 9
    deliver(store, run, [uris[0], uri])
    points = tensorboard_points(tmp_path / "tb") if to == "tensorboard" else wandb_points(tmp_path / "wb", run)
    assert points == mlflow_points(database)


def test_a_truncated_event_file_is_completed(store: Store, run: TrackedRun, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    deliver(store, run, [f"tensorboard://{tmp_path}/tb"])
    points = tensorboard_points(tmp_path / "tb")
    [file] = (tmp_path / "tb").rglob("events*")
    file.write_bytes(file.read_bytes()[:-10])
    deliver(store, run, [f"tensorboard://{tmp_path}/tb"])
    assert tensorboard_points(tmp_path / "tb") == points != []


@pytest.mark.integration
def test_wandb_run_id_names_the_run_whose_history_is_continued(store: Store, run: TrackedRun, tmp_path: Path) -> None:
    pytest.importorskip("wandb.sdk")
    uri = f"wandb://?project=p&mode=offline&dir={tmp_path}/wb&id=run-7"
    for _ in range(2):
        deliver(store, run, [uri])
    keys = [row[RECORD] for row in read_history(tmp_path / "wb", "run-7") if row[RECORD].startswith("runs/")]
    assert len(keys) == len(set(keys)) > 1, "the first start has delivered its end"
    assert not list(read_history(tmp_path / "wb", run.identity))


def test_wandb_online_gets_one_row_for_each_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history: list[dict[str, Any]] = []
    opened: list[dict[str, Any]] = []
    updates: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        opened.append(options)
        return SimpleNamespace(
            url="https://wandb.example/p/runs/r",
            config=SimpleNamespace(update=lambda values, allow_val_change: updates.append(values)),
            define_metric=lambda name, step_metric=None: None,
            log=lambda row, commit: history.append(row),
        )

    fake = SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    records = [RunStarted("start", 1.0, {"run": {"run": "demo"}}), MetricsLogged("a", 2.0, 0, {"x": 1.0})]
    records += [Committed(key, commit.created_at, commit) for key, commit in commits()]
    uri = f"wandb://?project=p&entity=e&group=g&mode=online&key=local-key-1&dir={tmp_path}"
    tracker = WandbTracker(uri, TrackedRun("demo", "1"))
    tracker.deliver(records, RunCommits())
    assert tracker.page == "https://wandb.example/p/runs/r"
    assert [row[RECORD] for row in history] == [record.key for record in records]
    assert len(updates) == 1
    assert opened[0]["settings"]["api_key"] == "local-key-1" and opened[0]["settings"]["finish_timeout"] > 0
    assert (opened[0]["project"], opened[0]["entity"], opened[0]["group"]) == ("p", "e", "g")
    assert opened[0]["id"] == TrackedRun("demo", "1", "/elsewhere").identity


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_choose_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "TENSORBOARD_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOME_KEY", "key-of-wandb")
    store = Store(str(tmp_path))

    def uris(*words: str) -> list[str]:
        return trackers.tracking_uris(store, parse_config(list(words)).run)

    assert uris() == [f"sqlite:///{tmp_path}/mlflow/mlflow.db"]
    assert uris("--use-tensorboard")[1:] == [f"tensorboard://{tmp_path}/tensorboard"]
    assert uris("--use-tensorboard", "--tb-dir", "/a b")[1:] == ["tensorboard:///a b"]
    names = ("--tb-project-name", "p", "--tb-experiment-name", "e/1")
    assert uris("--use-tensorboard", "--tb-dir", "/a b", *names)[1:] == ["tensorboard:///a b/p/e/1"]
    [uri] = uris("--use-wandb", "--wandb-project", "p&q", "--wandb-group", "g", "--wandb-key", "env:SOME_KEY")[1:]
    options = WandbTracker(uri, TrackedRun("r", "1")).options
    assert options == {"project": "p&q", "group": "g", "mode": "online", "dir": str(tmp_path), "key": "key-of-wandb"}
    assert len(uris("--use-wandb", "--wandb-mode", "disabled")) == 1
    [uri] = uris("--use-wandb", "--wandb-run-id", "run-7", "--wandb-mode", "offline")[1:]
    assert WandbTracker(uri, TrackedRun("demo", "1")).run_id == "run-7"
    monkeypatch.setenv("TENSORBOARD_DIR", "/logs")
    assert uris("--use-tensorboard")[1:] == ["tensorboard:///logs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-tensorboard", "--tb-project-name", "/etc"], "--tb-project-name"),
        (["--use-tensorboard", "--tb-project-name", "a//b"], "--tb-project-name"),
        (["--use-tensorboard", "--tb-project-name", "a/../b"], "--tb-project-name"),
        (["--use-tensorboard", "--tb-project-name", ""], "--tb-project-name"),
        (["--tb-experiment-name", "e"], "--tb-experiment-name has no effect without --use-tensorboard"),
        (["--wandb-run-id", "r"], "--wandb-run-id has no effect without --use-wandb"),
    ],
)
def test_invalid_options_of_trackers_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_config(words)


def test_a_literal_api_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--wandb-key must be a reference") as error:
        parse_config(["--use-wandb", "--wandb-key", "literal-key-123"])
    assert "literal-key-123" not in str(error.value)
    store = Store(str(tmp_path))
    create_run_record(
        store, resolve("train", parse_config(["--run", "r", "--use-wandb", "--wandb-key", "env:SOME_KEY"]), store)
    )
    assert read_existing_record(store, RunKeys("r")).config["run"]["wandb_key"] == "env:SOME_KEY"


def test_missing_packages_and_keys_are_reported_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for origin in (None, "found"):
        spec = SimpleNamespace(origin=origin)
        monkeypatch.setattr("penstock.storage.tracking.tracker.find_spec", lambda name, spec=spec: spec)
        for package in ("tensorboard", "wandb"):
            run = parse_config([f"--use-{package}"]).run
            message = "no API key" if origin else rf"pip install 'penstock-rl\[{package}\]'"
            if origin and package == "tensorboard":
                trackers.check_trackers(run)
                continue
            with pytest.raises(OptionError, match=message):
                trackers.check_trackers(run)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    trackers.check_trackers(parse_config(["--use-wandb"]).run)
