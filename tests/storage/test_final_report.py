"""The report that a run writes into its store at the end, and its way to the trackers."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import config_of, make_run, write_data
from mlflow.artifacts import load_text

from penstock.flows.inspect.track import main
from penstock.flows.reporting import prefect_page
from penstock.flows.reporting.prefect_page import write_final_report
from penstock.flows.runtime.runs import read_existing_record
from penstock.storage.commit import RunKeys
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import find_orphans, remove_run
from penstock.storage.report.page import GENERATOR
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
from penstock.storage.tracking.tracker import TrackedRun, tracking_directory
from penstock.storage.tracking.trackers import tracked_run

KEYS = RunKeys("r")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "store"))
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 2, save=(2,))
    return store


def report_in_mlflow(database: Path, run: TrackedRun) -> str | None:
    """Return the artifact `report.html` of the run in an MLflow database, or None if there is none."""
    client = MlflowOptions.connect(f"sqlite:///{database}", run).client
    [experiment] = client.search_experiments(filter_string="name = 'penstock'")
    [shown] = client.search_runs([experiment.experiment_id], "attributes.run_name = 'r'")
    if not [file for file in client.list_artifacts(shown.info.run_id) if file.path == "report.html"]:
        return None
    return load_text(f"{shown.info.artifact_uri}/report.html")


def test_report_is_replaced_by_the_next_start_and_belongs_to_the_run(store: Store) -> None:
    notes: list[str] = []
    store.replace(KEYS.report, b"of an earlier start")
    content = write_final_report(store, KEYS, notes.append)
    assert content is not None and GENERATOR.encode() in content and notes == []
    assert store.read(KEYS.report) == content
    assert find_orphans(store, older_than=0) == [] and audit_run(store, KEYS).problems == []
    remove_run(store, KEYS)
    assert store.read(KEYS.report) is None


def test_report_that_fails_or_takes_too_long_is_one_note(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assert write_final_report(store, RunKeys("missing"), notes.append) is None
    monkeypatch.setattr(prefect_page, "TIMEOUT", 0.0)
    assert write_final_report(store, KEYS, notes.append) is None
    assert "RunError" in notes[0] and "not written within 0 s" in notes[1] and len(notes) == 2


@pytest.mark.full
def test_report_reaches_mlflow_and_track_restores_it(store: Store, database: Path, tmp_path: Path) -> None:
    run = tracked_run(store, KEYS, read_existing_record(store, KEYS))
    content = write_final_report(store, KEYS, print)
    assert content is not None
    tracker = RunTracking(run, tracking_directory(store, "r"), [f"sqlite:///{database}"]).start()
    assert tracker.record_report(KEYS.report, content) and not tracker.record_report(KEYS.report, content)
    assert (tracker.close(timeout=60), tracker.problem) == (0, None)
    assert report_in_mlflow(database, run) == content.decode()

    fresh = tmp_path / "fresh" / "mlflow.db"
    assert main(["r", "--to", "mlflow", "--tracking-uri", f"sqlite:///{fresh}", "--store", store.root]) == 0
    assert report_in_mlflow(fresh, run) == content.decode()


def test_report_that_was_deleted_before_its_delivery_is_skipped(store: Store, database: Path, tmp_path: Path) -> None:
    run = tracked_run(store, KEYS, read_existing_record(store, KEYS))
    tracker = RunTracking(run, tmp_path / "out", [f"sqlite:///{database}"]).start()
    tracker.record_report(f"{KEYS.prefix}/deleted.html", b"deleted")
    assert (tracker.close(timeout=60), tracker.problem) == (0, None)
    assert report_in_mlflow(database, run) is None
