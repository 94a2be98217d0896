"""Records of the starts of a run: when a driver ran, on which devices, and in which Prefect flow run.

A driver writes `starts/<number>.json` when it starts and `starts/<number>.end.json` when it ends. The second file is
missing if the driver was killed; its end is then the time of the last commit before the next start. A start that has
completed the run, and has delivered all records to the trackers, also writes `starts/<number>.complete`.
"""

from __future__ import annotations

import getpass
import re
import time
from typing import Any

from pydantic import Field

from penstock.storage.refs import Frozen, RunKeys
from penstock.storage.store import Store

_NAME = re.compile(r"(\d{6})\.json")


class Start(Frozen):
    """One start of a run."""

    at: float = Field(default_factory=time.time)  # seconds since the epoch
    host: str = ""
    user: str = ""  # login name of the process that drives the run
    flow_run: str = ""  # URL of the Prefect flow run, or its id if there is no UI
    code_version: str = ""
    trainer_devices: int = 0  # GPUs of the trainer; on a machine without GPUs, its processes
    engine_devices: int = 0  # GPUs of all engines; on a machine without GPUs, the engines
    colocated: bool = False  # whether trainer and engines use the same GPUs, if the machine has GPUs


class StartEnd(Frozen):
    """The end of a start that was not killed."""

    at: float = Field(default_factory=time.time)
    outcome: str  # FINISHED, FAILED or STOPPED
    joules: float | None = None  # energy of trainer and engine GPUs during the start; None: not measured


class Completion(Frozen):
    """What a start that left nothing to do has completed."""

    options: str  # hash of the options that determine the results
    outputs: dict[str, Any]  # options, not those of the default, for files and removals besides: name -> JSON value


def login_name() -> str:
    """Return the login name of the user that runs this process, or "" if the user has no name (some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def record_start(store: Store, keys: RunKeys, start: Start) -> int:
    """Record a start under the next free number, and return the number."""
    number = max((number for number, _ in list_starts(store, keys)), default=-1) + 1
    while not store.create(_key(keys, number), start.model_dump_json(indent=1).encode()):
        number += 1
    return number


def record_end(store: Store, keys: RunKeys, number: int, outcome: str, joules: float | None = None) -> None:
    """Record that start `number` has ended, and the energy that its GPUs have used."""
    end = StartEnd(outcome=outcome, joules=joules)
    store.create(_end_key(keys, number), end.model_dump_json(indent=1).encode())


def record_completion(store: Store, keys: RunKeys, number: int, completion: Completion) -> None:
    """Record that start `number` has completed the run."""
    store.create(_completion_key(keys, number), completion.model_dump_json().encode())


def read_completion(store: Store, keys: RunKeys) -> Completion | None:
    """Return what the run's last start has completed; None if it has not, or if the run has no starts."""
    key = _completion_key(keys, max((number for number, _ in list_starts(store, keys)), default=-1))
    return store.read_record(Completion, key)


def read_starts(store: Store, keys: RunKeys) -> list[tuple[Start, StartEnd | None]]:
    """Return all starts of a run, in order, each with its end, or None if it has not ended or was killed.

    Raises:
        StoreError: a record is damaged.
    """
    starts = []
    for number, key in list_starts(store, keys):
        if start := store.read_record(Start, key):
            starts.append((start, store.read_record(StartEnd, _end_key(keys, number))))
    return starts


def list_starts(store: Store, keys: RunKeys) -> list[tuple[int, str]]:
    """Return number and key of every recorded start, ascending."""
    names = [match for name in store.list(f"{keys.prefix}/starts") if (match := _NAME.fullmatch(name))]
    return [(int(match[1]), _key(keys, int(match[1]))) for match in names]


def _key(keys: RunKeys, number: int) -> str:
    return f"{keys.prefix}/starts/{number:06d}.json"


def _completion_key(keys: RunKeys, number: int) -> str:
    return f"{keys.prefix}/starts/{number:06d}.complete"


def _end_key(keys: RunKeys, number: int) -> str:
    return f"{keys.prefix}/starts/{number:06d}.end.json"
