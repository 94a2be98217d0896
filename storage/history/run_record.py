"""The records of a run besides its commits: run.json, its changed schedules, an unfinished fork, and its starts.

A driver writes `starts/<number>.json` when it starts and `starts/<number>.end.json` when it ends. The second file is
missing if the driver was killed; its end is then the time of the last commit before the next start. A start that has
completed the run, and has delivered all records to the trackers, also writes `starts/<number>.complete`.
"""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.storage.commit import MAX_RUN_NAME, RUN_NAME, Commit, Frozen, RunKeys
from penstock.storage.store import Store

RecordedConfig = dict[str, dict[str, Any]]  # section -> option -> JSON value
Time = Annotated[float, Field(ge=0, lt=253402300800, allow_inf_nan=False)]  # seconds since the epoch, before year 10000

_NUMBERED = re.compile(r"(\d{6})\.json")


class ParentRecord(Frozen):
    """The origin of a fork, as `penstock fork` describes it."""

    run: Annotated[str, Field(pattern=rf"^{RUN_NAME}$", max_length=MAX_RUN_NAME)]
    at: int = Field(ge=0)  # the first round that is not shared
    restart_data: bool  # whether the data restarts at round `at` (first epoch, first row); prompt numbers continue
    restarts: list[int]  # all rounds at which the data restarted, including those of the parent
    # Whether the groups that round `at` - 1 left in the buffer are generated again, with the fork's group size.
    discard_responses: bool
    num_reused: int = Field(0, ge=0)  # rounds from `at` on that are trained on the parent's rollouts (--reuse-rollouts)
    config: RecordedConfig  # of the parent, with which the rounds before `at` were trained
    parent: ParentRecord | None  # the parent's own origin, if it is a fork itself

    @property
    def reused_rounds(self) -> range:
        """Return the rounds that the fork trains on the parent's rollouts."""
        return range(self.at, self.at + self.num_reused)


class ForkRecord(Frozen):
    """fork.json, which reserves the name of a fork until its run.json is written."""

    flow: str
    config: RecordedConfig
    parent: ParentRecord


class RunRecord(Frozen):
    """run.json, which is written once, when a run is created."""

    record_version: Literal[1] = 1
    flow: Literal["train", "sft", "evaluate"]
    config: RecordedConfig  # all options, with the values that Penstock chose where none was given
    given: RecordedConfig  # the options that were given
    config_hash: str
    directory: str  # working directory of the first start; paths below it still match after the project is moved
    code_version: str
    created_at: Time
    id: str  # unique: two concurrent starts cannot write equal records, and trackers find the run by it
    parent: ParentRecord | None = None

    def config_of_round(self, rollout_id: int) -> RecordedConfig:
        """Return the options that a round was trained with: the run's own or, before its fork point, those of an
        ancestor."""
        config, parent = self.config, self.parent
        while parent is not None and rollout_id < parent.at:
            config, parent = parent.config, parent.parent
        return config


class ScheduleChange(Frozen):
    """A file of changes/: the schedule options (`section.name` -> value) of a start that changed them, and all options
    that it was given."""

    at: Time
    id: str
    schedule: dict[Annotated[str, Field(pattern=r"^\w+\.\w+$")], Any]
    given: RecordedConfig


def read_run_record(store: Store, keys: RunKeys) -> RunRecord | None:
    """Return the record of a run, or None if it has none. Raises StoreError if it is damaged."""
    return store.read_record(RunRecord, keys.record)


def is_inherited(keys: RunKeys, record: RunRecord | None, commit: Commit) -> bool:
    """Return whether a fork shares this commit with its parent. The copied record names the fork as its run, but its
    files remain in the parent's directory; a step may have no files."""
    if record is None or record.parent is None:
        return False
    return commit.writer != keys.run if commit.attempt else commit.index < record.parent.at


def schedule_change_keys(store: Store, keys: RunKeys) -> list[str]:
    """Return the keys of the recorded changes of a run's schedule options, oldest first."""
    directory = f"{keys.prefix}/changes"
    return [f"{directory}/{name}" for name in store.list(directory) if _NUMBERED.fullmatch(name)]


def read_schedule_changes(store: Store, keys: RunKeys) -> list[ScheduleChange]:
    """Return the recorded changes of a run's schedule options, oldest first. Raises StoreError if one is damaged."""
    changes = (store.read_record(ScheduleChange, key) for key in schedule_change_keys(store, keys))
    return [change for change in changes if change is not None]


# ---- starts ----------------------------------------------------------------------------------------------------------


class Start(Frozen):
    """One start of a run."""

    at: float = Field(default_factory=time.time)  # seconds since the epoch
    host: str = ""
    user: str = ""  # login name of the user who runs the driver process
    flow_run: str = ""  # URL of the Prefect flow run, or its id if there is no UI
    code_version: str = ""
    functions: dict[str, str] = Field(default_factory=dict)  # option of a user-defined function -> hash of its file
    trainer_devices: int = 0  # GPUs of the trainer; on a machine without GPUs, its processes
    engine_devices: int = 0  # GPUs of all engines; on a machine without GPUs, the engines
    colocated: bool = False  # whether trainer and engines use the same GPUs, if the machine has GPUs


class StartEnd(Frozen):
    """The end of a start that was not killed."""

    at: float = Field(default_factory=time.time)
    outcome: str  # FINISHED, FAILED or STOPPED
    joules: float | None = None  # energy of trainer and engine GPUs during the start; None: not measured
    error: str = ""  # class and message of the exception, if it has failed


class Completion(Frozen):
    """The state in which a start completed its run: a later start with equal values has nothing to do."""

    options: str  # hash of the options that determine the results
    outputs: dict[str, Any]  # options that write or remove other files, if not defaults: name -> JSON value


def login_name() -> str:
    """Return the login name of the user that runs this process, or "" if the user has no name (some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def record_start(store: Store, keys: RunKeys, start: Start) -> int:
    """Record a start under the next free number, and return the number."""
    number = max((number for number, _ in list_starts(store, keys)), default=-1) + 1
    while not store.create(f"{keys.prefix}/starts/{number:06d}.json", start.model_dump_json(indent=1).encode()):
        number += 1
    return number


def record_end(
    store: Store, keys: RunKeys, number: int, outcome: str, joules: float | None = None, error: str = ""
) -> None:
    """Record that start `number` has ended, why it failed, and the energy that its GPUs have used."""
    end = StartEnd(outcome=outcome, joules=joules, error=error)
    store.create(f"{keys.prefix}/starts/{number:06d}.end.json", end.model_dump_json(indent=1).encode())


def record_completion(store: Store, keys: RunKeys, number: int, completion: Completion) -> None:
    """Record that start `number` has completed the run."""
    store.create(f"{keys.prefix}/starts/{number:06d}.complete", completion.model_dump_json().encode())


def read_completion(store: Store, keys: RunKeys) -> Completion | None:
    """Return the completion that the run's last start recorded; None if it has not completed the run."""
    last = max((number for number, _ in list_starts(store, keys)), default=-1)
    return store.read_record(Completion, f"{keys.prefix}/starts/{last:06d}.complete")


def read_starts(
    store: Store, keys: RunKeys, *, known: Sequence[tuple[Start, StartEnd | None]] = ()
) -> list[tuple[Start, StartEnd | None]]:
    """Return all starts of a run, in order, each with its end, or None if it has not ended or was killed. `known`: the
    result of an earlier call, of which only the last start may have ended since."""
    return [
        *known[:-1],
        *(
            (start, store.read_record(StartEnd, f"{keys.prefix}/starts/{number:06d}.end.json"))
            for number, key in list_starts(store, keys)[max(len(known) - 1, 0) :]
            if (start := store.read_record(Start, key))
        ),
    ]


def list_starts(store: Store, keys: RunKeys) -> list[tuple[int, str]]:
    """Return number and key of every recorded start, ascending."""
    names = [match for name in store.list(f"{keys.prefix}/starts") if (match := _NUMBERED.fullmatch(name))]
    return [(int(match[1]), f"{keys.prefix}/starts/{match[0]}") for match in names]
