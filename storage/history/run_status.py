"""status.json of a run: what its driver does now, which commits do not say.

The driver overwrites the record every few seconds, so that another process can show the run while it runs. It is not
part of any commit, and nothing depends on it. A driver that is killed leaves its last record, so a reader must compare
its time with the clock and with the lease of the driver (`run_state`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from penstock.storage.commit import Frozen, RunKeys
from penstock.storage.errors import StoreError
from penstock.storage.history.run_record import Start, StartEnd, Time
from penstock.storage.leases import describe_live_drivers
from penstock.storage.store import Store

STATUS_SECONDS = 5.0  # between two writes
SILENT_SECONDS = 15.0  # without a new record, after which a reader looks for the lease of the driver

Text = Annotated[str, Field(max_length=400)]
Group = Literal["engines", "evaluation", "trainer"]


class StatusLane(Frozen):
    """A lane of the page: an engine, or the trainer, whose ranks do everything together."""

    name: Text  # "engine 0"
    group: Group  # "engines" generate rollouts; those of the group "evaluation" only evaluate
    devices: Text = ""  # in words; equal devices of two lanes are shared
    starting_since: Time | None = None  # of an engine that is starting


class StatusActivity(Frozen):
    """Something that runs now: a stage, or a part of one with a known number of steps."""

    title: Text
    stage: Text
    since: Time
    done: int = 0
    total: int | None = None


class StatusPhase(Frozen):
    """Something that has ended and that no commit records, for instance a weight update."""

    lanes: list[Text]  # names of lanes or of groups, or "driver"
    phase: Text
    index: int | None = None  # policy version
    start: Time
    end: Time


class StatusMessage(Frozen):
    """A line that the driver has printed."""

    at: Time
    level: Literal["warning", "info"]
    text: Text


class RunStatus(Frozen):
    """The record. Lists have the oldest entry first, and a limited length."""

    record_version: Literal[1] = 1
    at: Time  # when it was written
    start: int = Field(ge=0)  # number of the start of the run
    host: Text
    pid: int
    phase: Text = ""  # what happens outside the stages, for instance the shutdown
    activities: list[StatusActivity] = Field(default_factory=list)
    lanes: list[StatusLane] = Field(default_factory=list)  # of all processes since the start
    phases: list[StatusPhase] = Field(default_factory=list)
    engines: Text = ""  # how many have started, and the policy version that they serve
    queue: dict[str, float] = Field(default_factory=dict)  # newest metrics of the queue between engines and trainer
    # Newest values of `system/...` and of `requests/running/engine 0` and `requests/waiting/...`, their times as `at`.
    series: dict[str, list[float | None]] = Field(default_factory=dict)
    messages: list[StatusMessage] = Field(default_factory=list)


def read_run_status(store: Store, keys: RunKeys) -> RunStatus | None:
    """Return the newest status of a run, or None if it has none, or one that is damaged or of another release: commits
    can be shown without it."""
    with suppress(StoreError):
        return store.read_record(RunStatus, keys.status)
    return None


@dataclass(frozen=True)
class RunState:
    """Whether a run is running, and since when."""

    kind: Literal["running", "silent", "killed", "ended", "waiting"]
    since: float | None = None  # seconds since the epoch
    outcome: str = ""  # of a start that has ended: FINISHED, FAILED or STOPPED
    driver: str = ""  # of a running or silent start


def run_state(
    store: Store,
    keys: RunKeys,
    starts: Sequence[tuple[Start, StartEnd | None]],
    status: RunStatus | None,
    *,
    is_fresh: bool = False,
) -> RunState:
    """Return the state of a run by the end of its last start, the time of its status, and the lease of its driver.
    `is_fresh`: whether the reader has seen the status change within the last SILENT_SECONDS. The time in the record is
    compared with this machine's clock, which may differ from that of the driver."""
    if not starts:
        return RunState("waiting")
    start, end = starts[-1]
    if end is not None:
        return RunState("ended", end.at, end.outcome)
    of_start = status is not None and status.start == len(starts) - 1 and status.at >= start.at
    if of_start and status is not None and (is_fresh or abs(time.time() - status.at) < SILENT_SECONDS):
        return RunState("running", start.at, driver=f"process {status.pid} on {status.host}")
    newest = status.at if status is not None and of_start else start.at
    if not (drivers := describe_live_drivers(store, keys)):
        return RunState("killed", newest)
    if not of_start:  # it has not written yet
        return RunState("running", start.at, driver=drivers[0])
    return RunState("silent", newest, driver=drivers[0])
