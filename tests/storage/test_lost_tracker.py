"""A tracker that has lost the run gets all records again, not only the undelivered ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonl_tracker import JsonlTracker
from tracked_run import CONFIG, RUN, commits, offer, track

from penstock.storage.tracking.delivery import Delivery, Outbox, RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions

ROUNDS = [0, 1, 2, 3]


def rounds_in_file(uri: str) -> list[int]:
    rows = [json.loads(line) for line in Path(uri.removeprefix("jsonl://")).read_text().splitlines()]
    return sorted(row[2] for row in rows if row[0] == "metric rollout/raw_reward")


def rounds_in_mlflow(database: Path) -> list[int]:
    tracker = MlflowOptions.connect(f"sqlite:///{database}", RUN)
    run = tracker.runs.find_part("", RUN)
    assert run is not None
    return [point.step for point in tracker.client.get_metric_history(run.info.run_id, "rollout/raw_reward")]


def delete_file(uri: str) -> None:
    Path(uri.removeprefix("jsonl://")).unlink()


@pytest.mark.parametrize("first", [6, 13], ids=["after three rounds", "after all"])
def test_deleted_file_is_filled_again_by_the_next_start(jsonl_uri: str, tmp_path: Path, first: int) -> None:
    track(tmp_path / "out", jsonl_uri, commits()[:first])
    delete_file(jsonl_uri)
    track(tmp_path / "out", jsonl_uri, commits())
    assert rounds_in_file(jsonl_uri) == ROUNDS


def test_file_deleted_during_an_outage_is_filled_again(jsonl_uri: str, tmp_path: Path, monkeypatch) -> None:
    deliver, failed = JsonlTracker.deliver, []

    def fail_once(self, records, commits) -> None:
        if self.path.exists() and not failed:
            delete_file(jsonl_uri)
            failed.append(True)
            raise ConnectionError("the database is gone")
        deliver(self, records, commits)

    track(tmp_path / "out", jsonl_uri, commits()[:6])
    monkeypatch.setattr(JsonlTracker, "deliver", fail_once)
    tracking = offer(RunTracking(RUN, tmp_path / "out", [jsonl_uri], CONFIG).start(), commits())
    delivery = tracking.deliveries[0]
    while delivery.num_waiting() or delivery.problem:
        delivery.thread.join(0.05)
    tracking.close(timeout=60)
    assert failed and rounds_in_file(jsonl_uri) == ROUNDS


def test_driver_killed_while_it_fills_the_file_continues(jsonl_uri: str, tmp_path: Path, monkeypatch) -> None:
    """The tracker has the run again, but the mark of the records that it has must not be the old one."""
    track(tmp_path / "out", jsonl_uri, commits())
    delete_file(jsonl_uri)
    deliver = JsonlTracker.deliver

    def write_and_die(self, records, commits) -> None:
        deliver(self, records[:1], commits)
        raise SystemExit

    monkeypatch.setattr("penstock.storage.tracking.delivery.Delivery.close", lambda self, timeout: self.thread.join())
    with monkeypatch.context() as patch:
        patch.setattr(JsonlTracker, "deliver", write_and_die)
        RunTracking(RUN, tmp_path / "out", [jsonl_uri], CONFIG).start().close()
    assert rounds_in_file(jsonl_uri) == [] and Outbox(tmp_path / "out", "-jsonl").delivered_offset == 0
    (tmp_path / "out" / "delivery-jsonl.lock").unlink()  # of this process
    track(tmp_path / "out", jsonl_uri, commits())
    assert rounds_in_file(jsonl_uri) == ROUNDS


def test_tracker_that_has_the_run_gets_nothing_again(jsonl_uri: str, tmp_path: Path, monkeypatch) -> None:
    track(tmp_path / "out", jsonl_uri, commits())
    sent: list[int] = []
    deliver = JsonlTracker.deliver

    def count(self, records, commits) -> None:
        sent.append(len(records))
        deliver(self, records, commits)

    monkeypatch.setattr(JsonlTracker, "deliver", count)
    track(tmp_path / "out", jsonl_uri, commits())
    assert sum(sent) == 2, "the start and the end"


def delete_run(database: Path) -> None:
    tracker = MlflowOptions.connect(f"sqlite:///{database}", RUN)
    run = tracker.runs.find_part("", RUN)
    assert run is not None
    tracker.client.delete_run(run.info.run_id)


@pytest.mark.full
@pytest.mark.parametrize("lose", ["replaced by an empty one", delete_run], ids=["replaced by an empty one", "deleted"])
def test_mlflow_without_the_run_gets_all_rounds(
    lose: str | Callable[[Path], None], database: Path, empty_database: Path, tmp_path: Path
) -> None:
    track(tmp_path / "out", database, commits()[:6])
    if callable(lose):
        lose(database)
    else:
        database = tmp_path / "new.db"
        database.write_bytes(empty_database.read_bytes())
    track(tmp_path / "out", database, commits())
    assert rounds_in_mlflow(database) == ROUNDS


@pytest.mark.parametrize(
    ("delivered", "sent"),
    [
        (["start", "a", "end"], ["start", "end"]),
        (["start", "a", "end", "start", "b"], ["start", "b", "start", "end"]),
        (["start", "a", "start", "b"], ["start", "a", "start", "b", "start", "end"]),
        (["start", "a", "start", "b", "end", "start"], ["start", "start", "end"]),
        ([], ["start", "end"]),
    ],
    ids=" ".join,
)
def test_records_since_a_start_without_an_end_are_sent_again(
    jsonl_uri: str, delivered: list[str], sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(JsonlTracker, "buffers", True)
    monkeypatch.setattr(
        JsonlTracker, "wants_all", property(lambda self: False, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(JsonlTracker, "deliver", lambda self, records, commits: keys.extend(r.key for r in records))
    for names in re.findall(r"start[^e]*?(?:end|(?= start)|$)", " ".join(delivered)):  # each by its own process
        outbox = Outbox(tmp_path, "-jsonl")
        for number, name in enumerate(names.split()):
            kind = name if name in ("start", "end") else "metrics"
            line = {"type": kind, "at": 1.0, "config": {}, "status": "FINISHED", "step": number, "metrics": {}}
            outbox.append(f"{name}-{len(keys)}-{number}", line)
        delivery = Delivery(jsonl_uri, RUN, tmp_path)
        delivery.thread.start()
        delivery.closing.set()  # as if it were killed after the delivery
        delivery.wake.set()
        delivery.thread.join()
    keys.clear()
    assert RunTracking(RUN, tmp_path, [jsonl_uri]).start().close(timeout=60) == 0
    assert [key.partition("-")[0] for key in keys] == sent
