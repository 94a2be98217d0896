"""Which start of `penstock deploy --retries` continues: test_deploy.py kills real ones."""

import os
import threading
from pathlib import Path

import pytest
from run_records import run_json

from penstock.flows.config import validate_config
from penstock.flows.runtime import retries
from penstock.flows.runtime.retries import refuse_retry, wait_for_other_drivers
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.history.run_record import Start, record_end, record_start
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.store import Store

KEYS = RunKeys("r")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path))
    store.create(KEYS.record, run_json(config=validate_config({"run": {"run": "r"}}).model_dump(mode="json")))
    return store


def start(store: Store, at: float, outcome: str = "", error: str = "") -> None:
    """Record a start; without an outcome it was killed."""
    number = record_start(store, KEYS, Start(at=at))
    if outcome:
        record_end(store, KEYS, number, outcome, None, error)


def commit(store: Store, r: int, at: float) -> None:
    store.commit(KEYS.step_prefix(r), Commit(kind="step", index=r, policy_version=r + 1, created_at=at))


def test_retries_in_a_row_are_limited(store: Store) -> None:
    assert refuse_retry(store, KEYS, 3, 3, has_waited=False) == ""
    assert "after 3 retries (--retries 3)" in refuse_retry(store, KEYS, 4, 3, has_waited=False)


def test_two_kills_with_a_commit_between_are_retried(store: Store) -> None:
    start(store, 100.0)
    assert refuse_retry(store, KEYS, 1, 9, has_waited=False) == "", "one kill"
    commit(store, 0, 150.0)
    start(store, 200.0)
    assert "(killed) without a new commit" in refuse_retry(store, KEYS, 2, 9, has_waited=False)
    commit(store, 1, 250.0)
    assert refuse_retry(store, KEYS, 2, 9, has_waited=False) == ""


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("StoreError: s3 does not answer", "StoreError: s3 does not answer", True),
        ("EngineError: process 4711 at port 30001 died", "EngineError: process 815 at port 30007 died", True),
        ("StoreError: s3 does not answer", "EngineError: process 815 died", False),
    ],
)
def test_same_failure_twice_without_a_commit_ends_the_retries(
    store: Store, first: str, second: str, is_refused: bool
) -> None:
    start(store, 100.0, "FAILED", first)
    start(store, 200.0, "FAILED", second)
    assert (second in refuse_retry(store, KEYS, 2, 9, has_waited=False)) == is_refused


def test_a_failure_after_a_kill_or_a_normal_end_is_retried(store: Store) -> None:
    start(store, 100.0)
    start(store, 200.0, "FAILED", "StoreError: full")
    assert refuse_retry(store, KEYS, 1, 9, has_waited=False) == ""
    start(store, 300.0, "FINISHED")
    start(store, 400.0, "FINISHED")
    assert refuse_retry(store, KEYS, 1, 9, has_waited=False) == ""


def test_run_that_was_resumed_and_stopped_by_its_user_is_not_retried(store: Store) -> None:
    start(store, 100.0)
    start(store, 200.0, "STOPPED")
    assert refuse_retry(store, KEYS, 1, 9, has_waited=False) == ""
    assert "stopped on request" in refuse_retry(store, KEYS, 1, 9, has_waited=True)


def test_start_waits_for_the_lease_of_another_driver(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Log:
        def warning(self, text: str, *args: object) -> None:
            lines.append(text % args)
            threading.Timer(0.05, lease.release).start()

    monkeypatch.setattr(retries, "get_run_logger", Log)
    monkeypatch.setattr(retries, "POLL", 0.01)
    lease = Lease(store, new_driver_lease_key(KEYS))
    assert wait_for_other_drivers(store, KEYS) and not wait_for_other_drivers(store, KEYS)
    [line] = lines
    assert f"run r is driven by process {os.getpid()} on" in line
