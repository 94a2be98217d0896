"""What every tracker must do with a run's records: MLflow, TensorBoard, W&B offline, and a JSONL file as the smallest
implementation."""

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonl_tracker import JsonlTracker
from tracked_run import CONFIG, KEYS, RUN, commits, track
from wandb_files import read_history, wait_for_end

from penstock.storage.tracking import trackers
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions

Content = Callable[[], dict[str, Any]]


def mlflow_content(database: Path) -> dict[str, Any]:
    """Metric points by run name, metric and step; status and parameters of the main run; inputs of child runs."""
    tables = ("runs", "metrics", "params", "inputs", "datasets", "logged_models", "logged_model_metrics")
    with sqlite3.connect(database) as connection:
        counts = {table: connection.execute(f"select count(*) from {table}").fetchone()[0] for table in tables}
        points = connection.execute(
            "select r.name, m.key, m.step, m.value from metrics m join runs r using (run_uuid) where not m.is_nan"
        ).fetchall()
        [(status,)] = connection.execute("select status from runs where name = 'demo'").fetchall()
        params = dict(connection.execute("select key, value from params"))
        inputs = connection.execute(
            "select r.name, d.name from inputs i join datasets d on i.source_id = d.dataset_uuid "
            "join runs r on i.destination_id = r.run_uuid where i.source_type = 'DATASET' and r.name like 'train%'"
        ).fetchall()
    return {
        "points": sorted(point[1:] for point in points if point[0] == "demo" and "pass" not in point[1]),
        "status": status,
        "config": params.get("train.lr"),
        "text": database.read_bytes().decode("latin-1"),
        "inputs": sorted((part, int(rollout.removeprefix("demo/rollout/"))) for part, rollout in inputs),
        "counts": counts,
    }


def jsonl_content(path: Path) -> dict[str, Any]:
    """The same from the file of the JSONL tracker."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    values = {(what, part): value for what, part, _, _, value in rows}
    points = [(what[7:], step, value) for what, _, step, _, value in rows if what.startswith("metric ")]
    return {
        "points": sorted(point for point in points if point[2] == point[2] and "pass" not in point[0]),
        "status": values["status", ""],
        "config": str(values.get(("config", ""), {}).get("train", {}).get("lr")),
        "text": path.read_text(),
        "inputs": sorted(
            (part, int(key.rpartition("/")[2][:6]))
            for (what, part), keys in values.items()
            if what == "inputs"
            for key in keys
        ),
    }


def tensorboard_content(directory: Path) -> dict[str, Any]:
    """The same from event files, which have neither a status nor inputs."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

    [run] = directory.glob("demo-*")
    events = EventAccumulator(str(run), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    points = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    configs = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("config")]
    return {
        "points": sorted(point for point in points if point[2] == point[2] and "pass" not in point[0]),
        "status": None,
        "config": "0.0003" if "| train.lr | 0.0003 |" in configs[0] else configs[0],
        "text": "".join(path.read_bytes().decode("latin-1") for path in run.iterdir()),
        "inputs": None,
    }


def wandb_content(directory: Path) -> dict[str, Any]:
    """The same from the files of offline runs. Points that were sent twice are equal, and count once."""
    from penstock.storage.tracking.wandb import RECORD, STEP

    wait_for_end(directory, RUN.identity)
    rows = read_history(directory, RUN.identity)
    points = {(name, row[STEP], value) for row in rows for name, value in row.items() if "/" in name}
    files = b"".join(path.read_bytes() for path in directory.rglob("*.wandb"))
    return {
        "points": sorted(p for p in points if p[0] not in (RECORD, STEP) and p[2] == p[2] and "pass" not in p[0]),
        "status": None,
        "config": "0.0003" if re.search(rb"train\.lr.{1,6}0\.0003", files, re.DOTALL) else None,
        "text": files.decode("latin-1"),
        "inputs": None,
    }


@pytest.fixture(params=["mlflow", "jsonl", "tensorboard", pytest.param("wandb", marks=pytest.mark.integration)])
def served(
    request: pytest.FixtureRequest, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Content]:
    """The URI of a tracker, and a function that returns what it shows."""
    if request.param == "mlflow":
        return f"sqlite:///{database}", lambda: mlflow_content(database)
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
        return f"tensorboard://{tmp_path}/tb", lambda: tensorboard_content(tmp_path / "tb")
    if request.param == "wandb":
        pytest.importorskip("wandb.sdk")
        return f"wandb://?project=p&mode=offline&dir={tmp_path}/wb", lambda: wandb_content(tmp_path / "wb")
    monkeypatch.setitem(trackers.TRACKERS, "jsonl", SimpleNamespace(title="JSONL", connect=JsonlTracker))
    path = tmp_path / "run.jsonl"
    return f"jsonl://{path}", lambda: jsonl_content(path)


def test_a_scheme_without_a_row_is_mlflow() -> None:
    for uri in ("http://localhost", "sqlite:///x.db", "databricks", "/a/directory"):
        assert trackers.tracker_of(uri) is MlflowOptions


def test_every_record_is_shown_once(served: tuple[str, Content], tmp_path: Path) -> None:
    uri, content = served
    track(tmp_path / "out", uri, commits())
    shown = content()
    rewards = [(step, value) for name, step, value in shown["points"] if name == "rollout/raw_reward"]
    assert rewards == [(r, 0.25 * r) for r in range(4)]
    assert [point for point in shown["points"] if point[0] == "eval/heldout"] == [
        ("eval/heldout", 2, 0.5),
        ("eval/heldout", 4, 0.5),
    ]
    assert shown["inputs"] in (None, [(f"train-{a:06d}-{b:06d}", r) for a, b in ((0, 1), (2, 3)) for r in (a, b)])
    assert shown["status"] in (None, "FINISHED")
    assert shown["config"] == "0.0003"
    assert "s3cret" not in shown["text"]


def test_delivery_after_a_restart_and_from_another_machine_changes_nothing(
    served: tuple[str, Content], tmp_path: Path
) -> None:
    uri, content = served
    track(tmp_path / "out", uri, commits()[:5], "FAILED")
    assert content()["status"] in (None, "FAILED")
    track(tmp_path / "out", uri, commits())
    first = content()
    [delivered] = (tmp_path / "out").glob("delivered*.json")
    delivered.unlink()
    track(tmp_path / "out", uri, [])
    track(tmp_path / "another machine", uri, commits())
    assert {**content(), "text": ""} == {**first, "text": ""}


def test_a_refused_record_is_skipped_and_the_others_are_delivered(served: tuple[str, Content], tmp_path: Path) -> None:
    uri, content = served
    if uri.startswith(("tensorboard:", "wandb:")):
        pytest.skip("accepts all names and numbers")
    tracking = RunTracking(RUN, tmp_path / "out", [uri]).start()
    tracking.enqueue_metrics("good", {"perf/overhead": 0.25}, step=0)
    tracking.enqueue_metrics("bad", {"n" * 400: 0.25}, step=1)
    tracking.enqueue_metrics("also good", {"perf/overhead": 0.5}, step=2)
    assert tracking.close(timeout=60) == 0
    assert [step for name, step, _ in content()["points"]] == [0, 2]
    [path] = (tmp_path / "out").glob("refused*.jsonl")
    refused = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["line"]["key"] for entry in refused] == ["bad"]


def test_a_failing_tracker_keeps_the_records_for_the_next_start(
    served: tuple[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, content = served
    with monkeypatch.context() as patched:

        def unreachable(*args: object) -> None:
            raise ConnectionError("http://user:pa55word@server is down")

        patched.setattr(trackers.tracker_of(uri), "connect", unreachable)
        tracking = RunTracking(RUN, tmp_path / "out", [uri], CONFIG).start()
        tracking.record_commit(*commits()[1])
        assert tracking.close(timeout=5) == 3
        assert tracking.problem is not None and "pa55word" not in tracking.problem
    track(tmp_path / "out", uri, [(key, commit) for key, commit in commits() if KEYS.prefix in key])
    assert ("rollout/raw_reward", 0, 0.0) in content()["points"]
