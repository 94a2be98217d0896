"""Follow a run: its commits as they appear, and status.json, what its driver does now, which commits do not say.

The driver overwrites status.json every few seconds, so that another process can show the run while it runs. It is not
part of any commit, and nothing depends on it. A driver that is killed leaves its last record, so a reader must compare
its time with the clock and with the lease of the driver (`run_state`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from penstock.storage.commit import Commit, Frozen, RunKeys
from penstock.storage.errors import StoreError
from penstock.storage.file_store import NUM_REQUESTS
from penstock.storage.history.run_record import Start, StartEnd, Time
from penstock.storage.leases import describe_live_drivers
from penstock.storage.store import Store

STATUS_SECONDS = 5.0  # between two writes
LISTING_SECONDS = 10.0  # between two listings of checkpoints, exports and evaluations
ROUNDS = ("rollouts", "steps")
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


class CommitFeed:
    """The commits of a run, each of which is returned once, rounds in their order. The first call lists all
    directories. Later ones request the next rollout and the next step by name, because rounds are consecutive, and list
    the other directories, which are short, every LISTING_SECONDS."""

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self.store = store
        self.keys = keys
        self.num_read = 0
        self._waiting: list[str] | None = None  # prefixes that were listed and are not read yet, in reverse order
        self._next = dict.fromkeys(ROUNDS, 0)  # kind -> number of the first round that is not known
        self._known: set[str] = set()  # prefixes of other commits
        self._evaluated: dict[str, int] = defaultdict(int)  # directory of a version -> number of evaluations
        self._listed_at = float("-inf")

    @property
    def num_waiting(self) -> int:
        """The number of commits that are known to exist and that `read` has not returned yet."""
        return len(self._waiting or ())

    def read(self, seconds: float) -> Iterator[Commit]:
        """Yield commits that no call has yielded before, for at most about `seconds`; the next call yields the rest."""
        deadline = time.monotonic() + seconds
        if self._waiting is None:
            self._waiting = list(reversed([*self._list_rounds(), *self._list_others()]))
        elif not self._waiting:
            self._waiting = list(reversed(self._list_others()))
        size = 1 if self.store.is_local else NUM_REQUESTS
        while self._waiting and time.monotonic() < deadline:
            batch = [self._waiting.pop() for _ in range(min(size, len(self._waiting)))]
            for commit in self.store.map_requests(self.store.committed, batch):
                if commit is not None:  # a checkpoint may have expired since the listing
                    yield self._count(commit)
        for kind in ROUNDS if not self._waiting else ():
            while time.monotonic() < deadline:
                commit = self.store.committed(f"{self.keys.prefix}/{kind}/{self._next[kind]:06d}")
                if commit is None:
                    break
                self._next[kind] += 1
                yield self._count(commit)

    def _list_rounds(self) -> list[str]:
        """Return the prefixes of all rollouts and steps, by round. A listing may be stale, so the next round after it
        is requested by name."""
        prefixes = []
        for kind in ROUNDS:
            directory = f"{self.keys.prefix}/{kind}"
            numbers = sorted(int(name) for name in self.store.committed_names(directory) if name.isdigit())
            consecutive = [number for position, number in enumerate(numbers) if number == position]
            self._next[kind] = len(consecutive)
            prefixes += [(number, f"{directory}/{number:06d}") for number in consecutive]
        return [prefix for _, prefix in sorted(prefixes)]

    def _list_others(self) -> list[str]:
        """Return the prefixes of new checkpoints, exports and evaluations, if it is time for a listing."""
        if time.monotonic() - self._listed_at < LISTING_SECONDS:
            return []
        self._listed_at = time.monotonic()
        directories = [f"{self.keys.prefix}/{kind}" for kind in ("checkpoints", "exports")]
        versions = [f"{self.keys.prefix}/evals/{name}" for name in self.store.list(f"{self.keys.prefix}/evals")]
        num_data_sets = max(self._evaluated.values(), default=0)
        # An old version is evaluated again only if it has fewer evaluations than others (it was postponed).
        directories += [
            each
            for each in versions
            if not num_data_sets or self._evaluated[each] < num_data_sets or each in versions[-2:]
        ]
        names = self.store.map_requests(self.store.committed_names, directories)
        new = [f"{directory}/{name}" for directory, of in zip(directories, names, strict=True) for name in of]
        new = [prefix for prefix in dict.fromkeys(new) if prefix not in self._known]
        self._known.update(new)
        return new

    def _count(self, commit: Commit) -> Commit:
        self.num_read += 1
        if commit.listed_kind == "eval":
            self._evaluated[f"{self.keys.prefix}/evals/{commit.index:06d}"] += 1
        return commit
