"""What crosses a task border: small frozen references, and the commit records they point to.

A commit record is the only proof that a stage is done. It names every file it stands for with size and hash, what it consumed,
and the numbers people look at. Readers open only what a commit names.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.errors import StoreError
from storage.keys import valid_key

TRAINED, BUFFER = "part", "buffer"  # shards of a rollout: what is trained on, and what was asked for and waits for a later round
Kind = Literal["model", "rollout", "step", "checkpoint", "eval", "export"]

Record = TypeVar("Record", bound=BaseModel)
Key = Annotated[str, AfterValidator(valid_key)]  # relative to the root of the store, and inside it


def parsed(model: type[Record], key: str, data: bytes) -> Record:
    """Return the record that was read at `key`.

    Raises:
        StoreError: it is damaged, or names something outside the store.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise StoreError(f"{key} is not a valid record ({reason[:150]}): restore it from a backup") from error


class Frozen(BaseModel):
    """Immutable, hashable, JSON-able."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(Frozen):
    """One committed file."""

    path: Key
    bytes: int
    xxh3: str  # xxh3-128 of the content, hex
    rows: int | None = None  # for Parquet


class ModelRef(Frozen):
    """A model outside any run: a Hugging Face directory, or a converted one under `models/` in the store."""

    uri: str  # a directory
    format: Literal["hf", "torch_dist"]
    fingerprint: str  # of config and weights; equal fingerprint = equal model


class RolloutRef(Frozen):
    """A committed rollout."""

    key: str  # of its commit record, relative to the store
    rollout_id: int
    num_samples: int
    policy_version: int  # that generated it; -1 for demonstrations


class StepRef(Frozen):
    """A committed round of training: rollout `rollout_id` was consumed, policy `policy_version` = rollout_id + 1 came out."""

    key: str
    rollout_id: int
    policy_version: int


class CheckpointRef(Frozen):
    """Committed weights of one policy version."""

    key: Key
    uri: str  # directory with the files
    format: Literal["torch_dist", "hf"]
    policy_version: int


class EvalRef(Frozen):
    """A committed evaluation of one policy version on one data set."""

    key: str
    task: str
    policy_version: int
    mean_reward: float


COMMIT_VERSION = 2  # of commit records; 2: digest. Older ones are read.


class Commit(BaseModel):
    """The record that a stage is done; written last, by one conditional create, never changed."""

    # "strings": a loss of NaN must not make its own commit unreadable (pydantic writes null otherwise).
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    kind: Kind
    run: str | None = None
    index: int = 0  # rollout_id of rollouts and steps; policy version of checkpoints, evals and exports
    policy_version: int = -1
    attempt: Key | None = None  # key of the private directory that holds the files
    files: list[FileRecord] = Field(default_factory=list)
    inputs: dict[str, str] = Field(default_factory=dict)  # what it consumed: role -> commit key or URI
    config_hash: str = ""
    code_version: str = ""
    created_at: float = Field(default_factory=time.time)  # seconds since the epoch
    seconds: dict[str, float] = Field(default_factory=dict)  # where the time went
    summary: dict[str, float] = Field(default_factory=dict)  # metrics, named as in docs (rollout/..., train/..., eval/...)
    state: dict[str, Any] = Field(
        default_factory=dict
    )  # what the next stage or a replay needs (data cursor, digest, fingerprint)

    record_version: int = Field(default=1, ge=1, le=COMMIT_VERSION)
    digest: str = ""  # of all the rest (`record_digest`), set by `encoded`; records of version 1 have none

    @model_validator(mode="after")
    def _check_keys(self) -> Commit:
        if self.attempt is not None and any(not file.path.startswith(f"{self.attempt}/") for file in self.files):
            raise ValueError(f"it names files outside its attempt {self.attempt!r}")
        for key in self.inputs.values():
            if key.endswith(commit_key("")):
                valid_key(key)
        return self

    def num_samples(self, name: str = TRAINED) -> int:
        """Rows of the committed shards of one kind."""
        return sum(file.rows or 0 for file in self.files if file.path.rpartition("/")[2].startswith(f"{name}-"))


def encoded(commit: Commit) -> bytes:
    """Return a commit as it is stored. Sets its version and its digest."""
    commit.record_version, commit.digest = COMMIT_VERSION, ""
    record = json.loads(commit.model_dump_json())
    record["digest"] = commit.digest = record_digest(record)
    return json.dumps(record, indent=1, ensure_ascii=False).encode()


def record_digest(record: dict[str, Any]) -> str:
    """Return the xxh3-128, hex, of a stored commit's canonical JSON without its own digest. It shows damage; it is not a signature."""
    content = {name: value for name, value in record.items() if name != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def is_unchanged(data: bytes) -> bool | None:
    """Whether a stored commit is as it was written; None if it carries no digest (record version 1)."""
    record = json.loads(data)
    if "digest" not in record and record.get("record_version", 1) == 1:
        return None
    return record.get("digest") == record_digest(record)


ORIGINS = ("base", "reference", "teacher")  # models that a run may have been given


class RunKeys:
    """Where things of one run lie, relative to the store. All commit keys end in `.commit.json`."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"runs/{run}"
        self.record = f"{self.prefix}/run.json"

    def origin(self, name: str) -> str:
        """What says which model the run was given in this place; see ORIGINS."""
        return f"{self.prefix}/{name}.json"

    def rollout(self, rollout_id: int) -> str:
        return f"{self.prefix}/rollouts/{rollout_id:06d}"

    def step(self, rollout_id: int) -> str:
        return f"{self.prefix}/steps/{rollout_id:06d}"

    def checkpoint(self, policy_version: int) -> str:
        return f"{self.prefix}/checkpoints/{policy_version:06d}"

    def eval(self, policy_version: int, task: str) -> str:
        return f"{self.prefix}/evals/{policy_version:06d}/{task}"

    def export(self, policy_version: int) -> str:
        return f"{self.prefix}/exports/{policy_version:06d}"


def commit_key(prefix: str) -> str:
    """The key of the record that commits what lies under `prefix`."""
    return f"{prefix}.commit.json"
