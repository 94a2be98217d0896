"""Which start of `penstock deploy --retries` continues: test_deploy.py kills real ones."""

import json
import os
import subprocess
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow_engine
from prefect.concurrency import _leases
from run_records import run_json

from penstock.flows.config import validate_config
from penstock.flows.runtime import retries
from penstock.flows.runtime.retries import NO_RETRY, AlreadyDone, check_retry, driving, retried
from penstock.flows.runtime.runs import driver_lease
from penstock.storage import leases
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.history.run_record import Start, record_end, record_start
from penstock.storage.leases import Lease, describe_live_drivers, new_driver_lease_key, process_start_time
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


def refusal(store: Store, number: int, allowed: int, *, began: float = 0.0, has_waited: bool = False) -> str:
    try:
        check_retry(store, KEYS, number, allowed, began=began, has_waited=has_waited)
    except RunError as error:
        return str(error)
    return ""


def test_retries_in_a_row_are_limited(store: Store) -> None:
    assert refusal(store, 3, 3) == ""
    assert "after 3 retries (--retries 3)" in refusal(store, 4, 3)


KILLED, FINISHED, STOPPED = ("", ""), ("FINISHED", ""), ("STOPPED", "")
STORE_FAILED = ("FAILED", "StoreError: s3 does not answer")


@pytest.mark.parametrize(
    ("starts", "commits", "more", "reason"),
    [
        ([KILLED], [], {}, ""),
        ([KILLED, KILLED], [150.0], {}, "(killed) without a new commit"),
        ([KILLED, KILLED], [150.0, 250.0], {}, ""),
        ([("FAILED", "process 4711 died"), ("FAILED", "process 815 died")], [], {}, "process 815 died"),
        ([STORE_FAILED, ("FAILED", "EngineError: process 815 died")], [], {}, ""),
        ([KILLED, STORE_FAILED], [], {}, ""),
        ([FINISHED, FINISHED], [], {"began": 500.0}, ""),  # the crashed start, at 500, has not recorded itself
        ([KILLED, STOPPED], [], {}, ""),
        ([KILLED, STOPPED], [], {"has_waited": True}, "stopped on request"),  # resumed and stopped by the user
    ],
)
def test_retry_depends_on_the_last_two_starts_and_the_commits_between(
    store: Store, starts: list[tuple[str, str]], commits: list[float], more: dict[str, Any], reason: str
) -> None:
    for number, (outcome, error) in enumerate(starts, 1):
        start(store, 100.0 * number, outcome, error)
    for r, at in enumerate(commits):
        commit(store, r, at)
    found = refusal(store, 2, 9, **more)
    assert reason in found and bool(found) == bool(reason)


def test_retry_of_a_start_that_was_completed_meanwhile_does_not_begin_another_one(store: Store) -> None:
    start(store, 100.0)
    start(store, 200.0, "FINISHED")
    with pytest.raises(AlreadyDone):
        check_retry(store, KEYS, 4, 3, began=100.0, has_waited=False)


def test_final_state_of_a_deployed_flow_has_prefects_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "deployment", SimpleNamespace(id="x"))

    def end(error: Exception) -> Any:
        @retried
        def flow(config: Any) -> Any:
            raise error

        state = flow(None)  # type: ignore[arg-type]
        return state.name, state.message

    assert end(OptionError("--lr is missing")) == ("Failed", f"--lr is missing {NO_RETRY}")
    assert end(AlreadyDone("done")) == ("Completed", "done")
    monkeypatch.setattr(retries, "deployment", SimpleNamespace(id=None))
    with pytest.raises(OptionError):
        end(OptionError("--lr is missing"))


def test_run_continues_if_the_slot_of_its_deployment_cannot_be_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise ConnectionError("410 Gone")

    monkeypatch.setattr(_leases, "_lease_renewal_loop", fail)
    with flow_engine.maintain_concurrency_lease(uuid.uuid4(), 300, raise_on_lease_renewal_failure=True):
        assert failed.wait(60)
        for _ in range(10):  # an exception that Prefect injects arrives between two instructions
            time.sleep(0.01)


# ---- one driver ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of starts of a deployment in this process, which look often for other drivers."""
    lines: list[str] = []
    log = SimpleNamespace(warning=lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(retries, "get_run_logger", lambda: log)
    monkeypatch.setattr(retries, "deployment", SimpleNamespace(id="x"))
    monkeypatch.setattr(retries, "POLL", 0.01)
    return lines


def run_config(store: Store) -> Any:
    return validate_config({"run": {"run": KEYS.run, "store": store.root}}).run


def test_of_starts_that_wait_together_one_at_a_time_drives_the_run(store: Store, lines: list[str]) -> None:
    """Regression test: a retry and a resume by hand both saw the end of the driver, and both started engines."""
    other, drivers, together = Lease(store, new_driver_lease_key(KEYS)).take(), list[int](), list[int]()

    def drive(number: int) -> None:
        with driving(run_config(store)):
            drivers.append(number)
            time.sleep(0.05)  # another one would begin meanwhile
            together.append(len(drivers))
            drivers.remove(number)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not drivers
    other.release()
    for thread in threads:
        thread.join(60)
    assert together == [1, 1, 1]
    assert f"run r is driven by process {os.getpid()} on" in lines[0]


def test_command_that_starts_while_a_retry_takes_the_lease_is_refused_or_first(
    store: Store, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command takes its lease between the retry's look and the retry's lease."""
    seen: list[str] = []
    lease_class = Lease

    def lease_after_a_command(*args: Any) -> Lease:
        if not seen:
            seen.append("command")
            command = lease_class(store, new_driver_lease_key(KEYS)).take()
            threading.Timer(0.1, command.release).start()
        return lease_class(*args)

    monkeypatch.setattr("penstock.flows.runtime.runs.Lease", lease_after_a_command)
    with driving(run_config(store)) as lease:
        assert describe_live_drivers(store, KEYS, own_lease=lease.key) == []
        with pytest.raises(RunError, match=f"driven by process {os.getpid()}"), driver_lease(store, KEYS):
            pass
    assert len(lines) == 1


def test_refused_start_does_not_take_the_name_of_a_run(tmp_path: Path, lines: list[str]) -> None:
    store = Store(str(tmp_path / "new"))
    with pytest.raises(OptionError), driving(run_config(store)):
        raise OptionError("invalid")
    assert store.list("runs") == []


def test_driver_that_was_paused_for_longer_than_its_lease_still_drives_the_run(store: Store) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:  # in place of a paused driver
        try:
            key = new_driver_lease_key(KEYS)
            own = Lease(store, key).take()
            lease = json.loads(store.read(key) or b"")
            own.release()
            lease |= {"pid": process.pid, "started": process_start_time(process.pid)}
            late = {"renewed": lease["renewed"] - leases.TTL - 1}
            store.create(key, json.dumps(lease | late).encode())
            assert len(describe_live_drivers(store, KEYS)) == 1
            with pytest.raises(RunError, match=f"driven by process {process.pid}"), driver_lease(store, KEYS):
                pass
            store.replace(key, json.dumps(lease | late | {"host": "other"}).encode())
            assert describe_live_drivers(store, KEYS) == [], "not known to live"
            store.replace(key, json.dumps(lease | {"host": "other"}).encode())
            assert len(describe_live_drivers(store, KEYS)) == 1
            with driver_lease(store, KEYS):
                pass  # a command does not wait for a machine that may be lost
            store.replace(key, json.dumps(lease).encode())
        finally:
            process.kill()
    assert describe_live_drivers(store, KEYS) == []
