"""The record of a run, run.json, and the records of its changed schedules and of an unfinished fork."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from penstock.storage.keys import is_run_name
from penstock.storage.refs import Frozen, RunKeys
from penstock.storage.store import Store

RecordedConfig = dict[str, dict[str, Any]]  # section -> option -> JSON value
Time = Annotated[float, Field(ge=0, lt=253402300800, allow_inf_nan=False)]  # seconds since the epoch, before year 10000

_CHANGE = re.compile(r"\d{6}\.json")


def _validate_run_name(name: str) -> str:
    if not is_run_name(name):
        raise ValueError("this is not a run name")
    return name


class ParentRecord(Frozen):
    """The origin of a fork, as `penstock fork` describes it."""

    run: Annotated[str, AfterValidator(_validate_run_name)]
    at: int = Field(ge=0)  # the first round that is not shared
    restart_data: bool  # whether the data restarts at round `at` (first epoch, first row); prompt numbers continue
    restarts: list[int]  # all rounds at which the data restarted, including those of the parent
    # Whether groups that round `at` - 1 left in the buffer lose their responses and get the fork's size.
    discard_responses: bool
    config: RecordedConfig  # of the parent, with which the rounds before `at` were trained
    parent: ParentRecord | None  # the parent's own origin, if it is a fork itself


class ForkRecord(Frozen):
    """fork.json, which reserves the name of a fork until its run.json is written."""

    flow: str
    config: RecordedConfig
    parent: ParentRecord


class RunRecord(Frozen):
    """run.json, which is written once, when a run is created."""

    record_version: Literal[1] = 1
    flow: Literal["post_train", "sft", "evaluate"]
    config: RecordedConfig  # with everything decided that the options leave open
    given: RecordedConfig  # the options that were given
    config_hash: str
    directory: str  # working directory of the first start; paths below it still match after the project is moved
    code_version: str
    created_at: Time
    id: str  # unique: two concurrent starts cannot write equal records, and trackers find the run by it
    parent: ParentRecord | None = None


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


def schedule_change_keys(store: Store, keys: RunKeys) -> list[str]:
    """Return the keys of the recorded changes of a run's schedule options, oldest first."""
    directory = f"{keys.prefix}/changes"
    return [f"{directory}/{name}" for name in store.list(directory) if _CHANGE.fullmatch(name)]


def read_schedule_changes(store: Store, keys: RunKeys) -> list[ScheduleChange]:
    """Return the recorded changes of a run's schedule options, oldest first. Raises StoreError if one is damaged."""
    changes = (store.read_record(ScheduleChange, key) for key in schedule_change_keys(store, keys))
    return [change for change in changes if change is not None]
