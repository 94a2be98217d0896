"""What every tracker must do with a run's records: MLflow, TensorBoard, W&B offline, and a JSONL file as the smallest
implementation."""

import json
import math
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracked_run import CONFIG, KEYS, RUN, commits, track
from tracker_points import mlflow_points, tensorboard_points, wandb_points

from penstock.storage.tracking import trackers
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions

Content = Callable[[], dict[str, Any]]


def mlflow_content(database: Path) -> dict[str, Any]:
    """Metric points, status and parameters of the main run; inputs of child runs."""
    tables = ("runs", "metrics", "params", "inputs", "datasets", "logged_models", "logged_model_metrics")
    with sqlite3.connect(database) as connection:
        counts = {table: connection.execute(f"select count(*) from {table}").fetchone()[0] for table in tables}
        [(status,)] = connection.execute("select status from runs where name = 'demo'").fetchall()
        params = dict(connection.execute("select key, value from params"))
        inputs = connection.execute(
            "select r.name, d.name from inputs i join datasets d on i.source_id = d.dataset_uuid "
            "join runs r on i.destination_id = r.run_uuid where i.source_type = 'DATASET' and r.name like 'train%'"
        ).fetchall()
    return {
        "points": mlflow_points(database),
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
    points = [(what[7:], step, value, 0) for what, _, step, _, value in rows if what.startswith("metric ")]
    return {
        "points": sorted(point for point in points if not math.isnan(point[2])),
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
    [run] = directory.glob("demo-*")
    text = "".join(path.read_bytes().decode("latin-1") for path in run.iterdir())
    config = "0.0003" if "| train.lr | 0.0003 |" in text else None
    return {"points": tensorboard_points(directory), "config": config, "text": text, "status": None, "inputs": None}


def wandb_content(directory: Path) -> dict[str, Any]:
    """The same from the files of offline runs."""
    points = wandb_points(directory, RUN)
    text = b"".join(path.read_bytes() for path in directory.rglob("*.wandb")).decode("latin-1")
    config = "0.0003" if re.search(r"train\.lr.{1,6}0\.0003", text, re.DOTALL) else None
    return {"points": points, "config": config, "text": text, "status": None, "inputs": None}


@pytest.fixture(params=["mlflow", "jsonl", "tensorboard", pytest.param("wandb", marks=pytest.mark.integration)])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Content]:
    """The URI of a tracker, and a function that returns what it shows."""
    if request.param == "mlflow":
        database = request.getfixturevalue("database")
        return f"sqlite:///{database}", lambda: mlflow_content(database)
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
        return f"tensorboard://{tmp_path}/tb", lambda: tensorboard_content(tmp_path / "tb")
    if request.param == "wandb":
        pytest.importorskip("wandb.sdk")
        return f"wandb://?project=p&mode=offline&dir={tmp_path}/wb", lambda: wandb_content(tmp_path / "wb")
    uri = request.getfixturevalue("jsonl_uri")
    return uri, lambda: jsonl_content(Path(uri.removeprefix("jsonl://")))


def test_a_scheme_without_a_row_is_mlflow() -> None:
    for uri in ("http://localhost", "sqlite:///x.db", "databricks", "/a/directory"):
        assert trackers.tracker_of(uri) is MlflowOptions


def test_every_record_is_shown_once(served: tuple[str, Content], tmp_path: Path) -> None:
    uri, content = served
    track(tmp_path / "out", uri, commits())
    shown = content()
    points = {name: [point[1:3] for point in shown["points"] if point[0] == name] for name, *_ in shown["points"]}
    assert points["rollout/raw_reward"] == [(r, 0.25 * r) for r in range(4)]
    assert points["eval/heldout"] == [(2, 0.5), (4, 0.5)]
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
    assert [step for _, step, *_ in content()["points"]] == [0, 2]
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
    assert ("rollout/raw_reward", 0, 0.0) in [point[:3] for point in content()["points"]]
