"""status.json of a run: what it contains, that a run does not depend on it, and what a reader concludes from it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from made_run import config_of, make_run, write_data

from penstock.engines.training import MemorySwitch
from penstock.engines.weights.transfer import ProcessPlace
from penstock.flows.cli import main
from penstock.flows.reporting.status import StatusWriter, describe_gpus
from penstock.flows.terminal.panel import Panel
from penstock.storage.commit import RunKeys
from penstock.storage.errors import StoreError
from penstock.storage.history.run_record import Start, read_starts, record_end, record_start
from penstock.storage.history.run_status import RunStatus, read_run_status, run_state
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import find_orphans, remove_run
from penstock.storage.store import Store

KEYS = RunKeys("r")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def display() -> SimpleNamespace:
    lines: list[str] = []
    return SimpleNamespace(panel=Panel("r", "train", 9), lines=lines, forward=lines.append)


class MadeReplica:
    """An engine that is starting while `known_url` is None."""

    def __init__(self, index: int, gpu: str = "", known_url: str | None = None) -> None:
        self.label, self.known_url = f"engine {index}", known_url
        self.gpus = lambda: [("a", gpu)] if gpu else []
        self.client = SimpleNamespace(num_requests=lambda url, timeout: (3, index) if url else None)


def made_processes(*replicas: MadeReplica, gpus: tuple[str, ...] = (), **pools: Any) -> SimpleNamespace:
    places = [ProcessPlace("a", (gpu,)) for gpu in gpus] or [ProcessPlace("a")]
    return SimpleNamespace(
        pools={role: SimpleNamespace(replicas=of) for role, of in {"rollout": replicas, **pools}.items()},
        started_trainer=SimpleNamespace(places=lambda: places),
        engine_options=SimpleNamespace(external=()),
    )


def writer_of(store: Store, display: SimpleNamespace, processes: Any = None) -> StatusWriter:
    run = SimpleNamespace(store=store, keys=KEYS, start=0)
    return StatusWriter(run, display, processes or made_processes())  # type: ignore[arg-type]


def make_status(**fields: Any) -> RunStatus:
    return RunStatus(**({"at": time.time(), "start": 0, "host": "node", "pid": 1} | fields))


def state_kind(store: Store, status: RunStatus | None, **options: bool) -> str:
    return run_state(store, KEYS, read_starts(store, KEYS), status, **options).kind


# ---- what is written -------------------------------------------------------------------------------------------------


def test_record_has_activities_updates_messages_and_machine(store: Store, display: SimpleNamespace) -> None:
    panel, writer = display.panel, writer_of(store, display)
    panel.machine = {"system/cpu_utilization_percentage": 12.345}
    panel.messages["warning"].append((5.0, "x" * 1000))
    panel.messages["info"].append((4.0, "engine 1 died"))
    sizes = ("device_bytes_before", "device_bytes_after", "host_bytes_before", "host_bytes_after")
    switch = MemorySwitch(name="policy: offload weights", seconds=2.0, at=100.0, **dict.fromkeys(sizes, 0))
    with panel.activities.show("restore", "restore"):
        pass
    writer.on_publish(3, [], {"perf/update_weights_time": 1.5}, [switch])
    writer.on_overlap(3, {"rollout/queue_depth": 2.0})
    with panel.activities.show("rollout, round 3: samples", "rollout") as activity:
        activity.done, activity.total = 5, 8
        status = writer.status()
    [running] = status.activities
    assert (running.title, running.done, running.total) == ("rollout, round 3: samples", 5, 8)
    assert abs(running.since - time.time()) < 60  # of the wall clock, not of the monotonic one
    assert [(p.lanes, p.phase, p.index) for p in status.phases] == [
        (["trainer"], "policy: offload weights", None),
        (["trainer"], "publish", 3),  # it began 1.5 s ago
        (["trainer"], "restore", None),
    ]
    assert (status.phases[0].start, status.phases[0].end) == (98.0, 100.0)
    assert status.phases[1].end - status.phases[1].start == pytest.approx(1.5)
    assert [(m.level, len(m.text)) for m in status.messages] == [("info", 13), ("warning", 400)]
    assert status.series["system/cpu_utilization_percentage"] == [12.3] and status.queue["rollout/queue_depth"] == 2
    assert (status.pid, status.start) == (os.getpid(), 0)


def test_record_has_a_lane_and_the_queue_of_each_engine(store: Store, display: SimpleNamespace) -> None:
    first, second, judge = (MadeReplica(index, gpu=str(index), known_url=f"http://{index}") for index in range(3))
    processes = made_processes(first, second, gpus=("0", "1"), evaluation=(judge,))
    writer = writer_of(store, display, processes)
    status = writer.status()
    assert [(lane.group, lane.name, lane.devices) for lane in status.lanes] == [
        ("engines", "engine 0", "GPU 0"), ("engines", "engine 1", "GPU 1"), ("evaluation", "engine 2", "GPU 2"),
        ("trainer", "trainer", "GPUs 0-1"),
    ]  # fmt: skip
    assert (status.series["requests/running/engine 1"], status.series["requests/waiting/engine 1"]) == ([3], [1])
    for urls, lanes in ((["http://0", "http://1"], ["engines"]), (["http://1"], ["engine 1"])):
        writer.on_publish(3, urls, {"perf/update_weights_time": 1.5}, [])
        assert writer.status().phases[-1].lanes == ["trainer", *lanes]
    second.known_url = None  # it restarts
    status = writer.status()
    assert [lane.name for lane in status.lanes if lane.starting_since] == ["engine 1"]
    assert status.series["requests/running/engine 1"][-1] is None
    second.known_url = "http://1b"
    phase = writer.status().phases[-1]
    assert (phase.lanes, phase.phase) == (["engine 1"], "start")
    processes.pools, processes.started_trainer = {}, None
    assert len(writer.status().lanes) == 4  # after the end of the processes, too


@pytest.mark.parametrize(
    "gpus, words",
    [
        ("a0 a1 a2", "GPUs 0-2"), ("a0 a2", "GPUs 0, 2"), ("a7", "GPU 7"), ("", ""),
        ("a6 a7 b6 b7", "node 0: GPUs 6-7; node 1: GPUs 6-7"), ("aMIG-4 aMIG-5", "GPUs MIG-4, MIG-5"),
    ],
)  # fmt: skip
def test_gpus_are_named_with_their_node_if_there_are_several(gpus: str, words: str) -> None:
    pairs = [(each[0], each[1:]) for each in gpus.split()]
    assert describe_gpus(pairs, ["a", "b"] if "b" in gpus else ["a"]) == words


def test_record_stays_small(store: Store, display: SimpleNamespace) -> None:
    writer = writer_of(store, display, made_processes(*(MadeReplica(k, known_url=f"http://{k}") for k in range(8))))
    for number in range(150):
        display.panel.messages["warning"].append((number, "w" * 400))
        names = ("utilization_percentage", "memory_usage_megabytes", "power_usage_watts")
        display.panel.machine = {f"system/gpu_{gpu}_{name}": 79997.5 for gpu in range(8) for name in names}
        writer.on_publish(number, [f"http://{k}" for k in range(7)], {"perf/update_weights_time": 1.0}, [])
        with display.panel.activities.show("convert", "convert"):
            status = writer.status()
    assert len(status.model_dump_json()) < 32_000


def test_thread_writes_while_the_run_runs_and_at_its_end(
    store: Store, display: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(store, "replace", lambda key, data: written.append(data))
    with writer_of(store, display):
        display.panel.phase = "stopping"
    assert RunStatus.model_validate_json(written[-1]).phase == "stopping"


def test_store_that_fails_gives_one_note_and_no_error(
    store: Store, display: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, data: bytes) -> None:
        raise StoreError("the bucket is gone")

    monkeypatch.setattr(store, "replace", fail)
    writer = writer_of(store, display)
    for _ in range(3):
        writer._write()
    [line] = display.lines
    assert "the bucket is gone" in line and "penstock watch" in line


# ---- what a reader concludes -----------------------------------------------------------------------------------------


@pytest.fixture
def lease(store: Store) -> Iterator[Lease]:
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    yield lease
    lease.stop_renewing()


def test_state_follows_starts_status_and_lease(store: Store, lease: Lease) -> None:
    assert state_kind(store, None) == "waiting"
    record_start(store, KEYS, Start())
    assert state_kind(store, None) == "running"  # the first record is not written yet
    assert state_kind(store, make_status()) == "running"
    old = make_status(at=time.time() + 0.01)  # later than the start
    late = old.model_copy(update={"at": old.at + 100})  # a clock that is ahead
    assert state_kind(store, late) == "silent" and state_kind(store, late, is_fresh=True) == "running"
    lease.release()
    assert state_kind(store, late) == "killed"
    record_end(store, KEYS, 0, "STOPPED")
    state = run_state(store, KEYS, read_starts(store, KEYS), make_status())
    assert (state.kind, state.outcome) == ("ended", "STOPPED")
    record_start(store, KEYS, Start())
    assert state_kind(store, make_status(start=0)) == "killed", "the status of an earlier start does not count"


# ---- other commands --------------------------------------------------------------------------------------------------


def test_verify_gc_fork_and_rm_know_the_record(store: Store, tmp_path: Path) -> None:
    keys = make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 2)
    store.replace(keys.status, make_status().model_dump_json().encode())
    assert read_run_status(store, keys) is not None
    assert audit_run(store, keys).num_orphans == 0
    assert [o for o in find_orphans(store, older_than=0) if keys.status in o.files] == []
    assert main(["fork", "r", "--at", "1", "--name", "f", "--store", store.root]) == 0
    assert read_run_status(store, RunKeys("f")) is None  # the fork has not started
    assert main(["rm", "f", "--yes", "f", "--store", store.root]) == 0
    remove_run(store, keys)
    assert not store.exists(keys.prefix)
    store.replace(keys.status, b"{}")  # by the thread of a driver that was stopped meanwhile
    [orphan] = find_orphans(store, older_than=0)
    assert orphan.files == (keys.status,)


@pytest.mark.parametrize("content", [b"{", b'{"record_version": 99}', bytes(range(256))])
def test_damaged_record_is_like_none(store: Store, content: bytes) -> None:
    store.replace(KEYS.status, content)
    assert read_run_status(store, KEYS) is None
