"""A step of the wall clock: leases of this machine depend on its boot-time clock only, others on the store's clock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.storage.commit import RunKeys
from penstock.storage.leases import TTL, Lease, describe_lease_holder, describe_live_drivers, store_time
from penstock.storage.maintenance.deletion import find_orphans, remove_orphan
from penstock.storage.store import Store

KEYS = RunKeys("r")
KEY = f"{KEYS.prefix}/drivers/x.lease"
STEPS = [-86400.0, -60.0, 60.0, 86400.0]  # seconds by which the clock jumps
Change = Callable[[dict], dict]


def write_lease(store: Store, change: Change) -> None:
    lease = Lease(store, KEY).take()
    lease.stop_renewing()
    store.replace(KEY, json.dumps(change(json.loads(store.read(KEY) or b""))).encode())


def step_clock(store: Store, seconds: float) -> None:
    """Make the clocks of this machine and of the store differ by `seconds` from those when the lease was written."""
    now = time.time() - seconds
    os.utime(store.path(KEY), (now, now))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", [{}, {"processes": 1, "host": "container"}], ids=["same container", "another one"])
def test_live_holder_on_this_machine_keeps_its_lease(store: Store, step: float, place: dict) -> None:
    write_lease(store, lambda process: {**process, **place})
    step_clock(store, step)
    assert len(describe_live_drivers(store, KEYS)) == 1


@pytest.mark.parametrize("step", STEPS)
def test_dead_holder_in_another_container_of_this_machine_loses_its_lease(store: Store, step: float) -> None:
    write_lease(store, lambda process: {**process, "processes": 1, "renewed": process["renewed"] - TTL - 1})
    step_clock(store, step)
    assert describe_live_drivers(store, KEYS) == []


def test_dead_holder_on_this_machine_loses_its_lease_at_once(store: Store) -> None:
    program = "import sys; from penstock.storage.store import Store; from penstock.storage.leases import *"
    program += "; import os; Lease(Store(sys.argv[1]), sys.argv[2]).take(); os._exit(0)"
    subprocess.run([sys.executable, "-c", program, store.root, KEY], check=True, cwd=Path(__file__).parents[2])
    for step in (*STEPS, 0.0):
        step_clock(store, step)
        assert describe_live_drivers(store, KEYS) == [], step


@pytest.mark.parametrize(("step", "is_alive"), [(-86400.0, False), (-60.0, True), (TTL - 10, True), (TTL + 10, False)])
def test_holder_on_another_machine_is_judged_by_the_stores_clock(store: Store, step: float, is_alive: bool) -> None:
    """A live holder renews its lease soon after a backward step, so one far ahead is that of a dead process."""
    write_lease(store, lambda process: {**process, "boot": "other"})
    step_clock(store, step)
    assert bool(describe_live_drivers(store, KEYS)) == is_alive
    if is_alive:
        assert re.search(r"renewed \d+ s ago", str(describe_lease_holder(store, KEY, store_time(store))))


@pytest.mark.parametrize("content", [{"boot": "before", "renewed": 1e9}, None], ids=["earlier boot", "full disk"])
def test_lease_without_a_comparable_time_is_judged_by_the_stores_clock(store: Store, content: dict | None) -> None:
    write_lease(store, lambda process: {**process, **(content or {})})
    if content is None:  # it was written on a full disk
        store.replace(KEY, b"")
    assert describe_live_drivers(store, KEYS), "just renewed"
    step_clock(store, TTL + 1)
    assert describe_live_drivers(store, KEYS) == []


@pytest.mark.parametrize("step", STEPS)
def test_gc_keeps_the_attempt_of_a_live_writer(store: Store, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = store.new_attempt(KEYS.step_prefix(0))
    with store.writing(attempt) as out:
        (out.path / "data").write_bytes(b"data")
        later = time.time() + step
        monkeypatch.setattr(time, "time", lambda: later)
        for orphan in find_orphans(store, older_than=-1e9, now=time.time()):
            assert not remove_orphan(store, orphan, time.time())
        assert (out.path / "data").exists()
