"""Commit records, and the references to them that tasks pass to each other.

A stage is done if and only if its commit record exists. The record lists the stage's files with size and hash, its
inputs and its metrics. Readers open only files that a commit record lists.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from penstock.storage.errors import StoreError

MAX_PART_BYTES, MAX_KEY_BYTES = 255, 1024  # limit of a file name on common file systems; limit of a key on S3

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
MAX_RUN_NAME = 200  # characters; leaves room for suffixes within the 255 bytes of a file name


def describe_key_problem(key: str) -> str | None:
    """Return why a store key is invalid, e.g. "is absolute", or None if it is valid. "", the root, is valid."""
    if not key:
        return None
    parts = key.split("/")
    sizes = [len(part.encode(errors="surrogatepass")) for part in parts]
    longest, size = max(sizes), sum(sizes) + len(parts) - 1
    problems = (
        ("\0" in key, "has a NUL character"),
        (key.startswith("/"), "is absolute"),
        ("" in parts, "has an empty part"),
        ("." in parts or ".." in parts, "has the part '.' or '..'"),
        (longest > MAX_PART_BYTES, f"has a part of {longest} bytes; {MAX_PART_BYTES} are allowed"),
        (size > MAX_KEY_BYTES, f"has {size} bytes; {MAX_KEY_BYTES} are allowed"),
    )
    return next((text for is_wrong, text in problems if is_wrong), None)


def validate_key(key: str) -> str:
    """Return a store key unchanged if it is valid (a validator for pydantic fields)."""
    if problem := describe_key_problem(key):
        raise ValueError(f"the key {key[:100]!r} {problem}: keys are relative paths inside the store")
    return key


def is_run_name(name: str) -> bool:
    """Return whether `name` is a valid run name: at most 200 letters, digits, dots, dashes and underscores, beginning
    with a letter or digit."""
    return re.fullmatch(RUN_NAME, name) is not None and len(name) <= MAX_RUN_NAME


TRAINED, BUFFER = "part", "buffer"  # names of a rollout's shards: samples to train on, and groups for a later round
DEBUG_DATA = "debug_rollout_data"  # role, in a rollout's `inputs`, of the file given to --load-debug-rollout-data
Kind = Literal["model", "rollout", "step", "checkpoint", "eval", "export", "regrade"]
STAGE_KINDS = ("rollout", "step", "checkpoint", "eval", "export", "regrade")  # of a run itself; models are shared

Record = TypeVar("Record", bound=BaseModel)
Key = Annotated[str, AfterValidator(validate_key)]  # path relative to the root of the store, validated
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # SHA-256, hex


def decode_record(model: type[Record], key: str, data: bytes) -> Record:
    """Decode the JSON record `data` that was read from the store at `key`."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise StoreError(
            f"{key} is not a valid record ({reason[:150]}): restore it from a backup, or use the release that wrote it"
        ) from error


class Frozen(BaseModel):
    """Base of immutable, hashable records."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(Frozen):
    """One file of a commit, with its size and hash."""

    path: Key
    bytes: int
    xxh3: str  # xxh3-128 of the content, hex
    rows: int | None = None  # for Parquet


class RolloutRef(Frozen):
    """Reference to a committed rollout, which tasks pass to each other instead of the samples."""

    key: str  # of the rollout's commit record, relative to the store
    rollout_id: int
    num_samples: int
    policy_version: int  # of the policy that generated the samples; -1 for demonstrations (SFT)


class StepRef(Frozen):
    """Reference to a committed training round: rollout `rollout_id` gave policy version `rollout_id + 1`."""

    key: str
    rollout_id: int
    policy_version: int


class CheckpointRef(Frozen):
    """Reference to the committed checkpoint of one policy version, or to a model that the run starts from."""

    key: Key
    uri: str  # directory of the files
    format: Literal["torch_dist", "hf"]
    policy_version: int


class EvalRef(Frozen):
    """Reference to a committed evaluation of one policy version on one data set."""

    key: str
    task: str  # name of the data set
    policy_version: int
    mean_reward: float


class Commit(BaseModel):
    """The commit record of a stage. It is written after all files, by one conditional create, and never changed."""

    # "strings" writes a NaN loss as "NaN"; pydantic's default, null, could not be read back.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    kind: Kind
    run: str | None = None
    index: int = 0  # rollout_id of rollouts, steps and regrades; policy version of checkpoints, evals and exports
    policy_version: int = -1
    attempt: Key | None = None  # key of the private directory that holds the files
    files: list[FileRecord] = Field(default_factory=list)
    blobs: dict[Digest, int] = Field(default_factory=dict)  # blob that samples refer to (blobs.py) -> bytes
    inputs: dict[str, str] = Field(default_factory=dict)  # role, for instance "rollout" -> commit key or URI
    config_hash: str = ""
    code_version: str = ""
    created_at: float = Field(default_factory=time.time)  # seconds since the epoch
    seconds: dict[str, float] = Field(default_factory=dict)  # part of the stage -> duration
    summary: dict[str, float] = Field(default_factory=dict)  # metrics: rollout/..., train/..., eval/...
    state: dict[str, Any] = Field(default_factory=dict)  # for the next stage or a replay: data cursor, digests, ...
    record_version: Literal[3] = 3
    digest: str = ""  # hash of all other fields (`record_digest`), set by `encode_commit`

    @model_validator(mode="after")
    def _check_keys(self) -> Commit:
        if self.attempt is not None and any(not file.path.startswith(f"{self.attempt}/") for file in self.files):
            raise ValueError(f"the record lists files outside its attempt {self.attempt!r}")
        for key in self.inputs.values():
            if key.endswith(commit_key("")):
                validate_key(key)
        return self

    @property
    def listed_kind(self) -> str:
        """Return the kind under which the commit is listed and counted: `regrade` if `penstock regrade` graded the
        samples of an evaluation or a rollout again, outside of the run's own time; else `kind`."""
        return "regrade" if "samples" in self.inputs else self.kind

    @property
    def started_at(self) -> float:
        """Return when the stage began, in seconds since the epoch."""
        return self.created_at - sum(self.seconds.values())

    @property
    def writer(self) -> str:
        """Return the name of the run that wrote the files: for a commit that a fork copied, the original run; "" for
        converted models, which runs share, and for commits without files."""
        parts = (self.attempt or "").split("/")
        return parts[1] if parts[0] == "runs" else ""

    def shards(self, name: str = TRAINED) -> list[FileRecord]:
        """Return the shards with the name TRAINED or BUFFER, in order: `<name>-00000.parquet`, ..."""
        pattern = re.compile(rf"{name}-\d+\.parquet")
        files = [file for file in self.files if pattern.fullmatch(file.path.rpartition("/")[2])]
        return sorted(files, key=lambda file: file.path)

    def num_samples(self, name: str = TRAINED) -> int:
        """Return the number of samples in the shards with the name TRAINED or BUFFER."""
        return sum(file.rows or 0 for file in self.shards(name))


def eval_rewards(commit: Commit) -> dict[str, float]:
    """Return the mean reward of each data set that `commit` evaluated: its metrics `eval/<task>`, but not
    `eval/<task>-pass@4` and similar."""
    names = [name for name in commit.summary if name.startswith("eval/") and name.count("/") == 1]
    tasks = [name for name in names if not any(name.startswith(f"{other}-") for other in names)]
    return {name.removeprefix("eval/"): commit.summary[name] for name in tasks}


def training_rewards(commits: Sequence[Commit]) -> dict[int, float]:
    """Return the training curve: round -> mean reward of the round's samples."""
    rollouts = sorted((c for c in commits if c.kind == "rollout"), key=lambda c: c.index)
    return {c.index: c.summary["rollout/raw_reward"] for c in rollouts if "rollout/raw_reward" in c.summary}


def evaluation_rewards(commits: Sequence[Commit]) -> dict[str, dict[int, float]]:
    """Return the evaluation curves: data set -> policy version -> mean reward."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for commit in sorted((c for c in commits if c.listed_kind == "eval"), key=lambda c: c.index):
        for task, reward in eval_rewards(commit).items():
            scores[task][commit.index] = reward
    return dict(scores)


def encode_commit(commit: Commit) -> bytes:
    """Escape text in `commit` that is not valid Unicode, set its `digest`, both in place, and return it as JSON."""
    commit.digest = ""
    for name in ("inputs", "seconds", "summary", "state"):
        setattr(commit, name, escape_invalid_text(getattr(commit, name)))
    record = json.loads(commit.model_dump_json())
    record["digest"] = commit.digest = record_digest(record)
    return json.dumps(record, indent=1, ensure_ascii=False).encode()


def escape_invalid_text(value: Any) -> Any:
    """Return `value` with the lone surrogates in its strings, at any depth, escaped, since files and services refuse
    them: "\\ud800" becomes "\\\\ud800"."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {escape_invalid_text(name): escape_invalid_text(item) for name, item in value.items()}
    return [escape_invalid_text(item) for item in value] if isinstance(value, list | tuple) else value


def record_digest(record: dict[str, Any]) -> str:
    """Return the digest of a stored commit: the xxh3-128, in hex, of its JSON with sorted keys and without `digest`. A
    digest detects damage; it is not a signature."""
    content = {name: value for name, value in record.items() if name != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def has_matching_digest(commit_json: bytes) -> bool:
    """Return whether the digest in a stored commit matches its content."""
    record = json.loads(commit_json)
    return bool(record.get("digest") == record_digest(record))


JOURNAL = ".journal"  # suffix of the store prefix of a round's journal
ADAPTERS = "lora"  # key of the adapters' options in the `state` of a checkpoint that contains only LoRA adapters
ORIGINS = ("base", "reference", "teacher", "adapter")  # roles of models that a run starts with (see `origin_roles`)


class RunKeys:
    """The store keys of one run. A stage writes its files under the prefix that `rollout_prefix`, `step_prefix`, ...
    return; its commit record is at `commit_key(prefix)`."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"runs/{run}"
        self.record = f"{self.prefix}/run.json"
        self.fork = f"{self.prefix}/fork.json"  # of an unfinished fork; a finished one has the record instead
        self.removed = f"{self.prefix}/removed.json"  # marks a run as removed; some of its files may remain
        self.report = f"{self.prefix}/report.html"  # written at the end of each start
        self.status = f"{self.prefix}/status.json"  # what the driver does now (storage/history/run_status.py)

    def origin_key(self, role: str) -> str:
        """Return the key of the record that names a model that the run starts with (`role`, see ORIGINS)."""
        return f"{self.prefix}/{role}.json"

    def rollout_prefix(self, rollout_id: int) -> str:
        """Return the prefix of the rollout of round `rollout_id`."""
        return f"{self.prefix}/rollouts/{rollout_id:06d}"

    def step_prefix(self, rollout_id: int) -> str:
        """Return the prefix of the training step on rollout `rollout_id`."""
        return f"{self.prefix}/steps/{rollout_id:06d}"

    def checkpoint_prefix(self, policy_version: int) -> str:
        """Return the prefix of the checkpoint of policy `policy_version`."""
        return f"{self.prefix}/checkpoints/{policy_version:06d}"

    def eval_prefix(self, policy_version: int, task: str) -> str:
        """Return the prefix of the evaluation of policy `policy_version` on the data set `task`."""
        return f"{self.prefix}/evals/{policy_version:06d}/{task}"

    def regrade_prefix(self, rollout_id: int, grading: str) -> str:
        """Return the prefix of the rewards that round `rollout_id` gets from another grading, named by its hash."""
        return f"{self.prefix}/regrades/{rollout_id:06d}/{grading}"

    def export_prefix(self, policy_version: int) -> str:
        """Return the prefix of the Hugging Face export of policy `policy_version`."""
        return f"{self.prefix}/exports/{policy_version:06d}"


def commit_key(prefix: str) -> str:
    """Return the key of the commit record of the stage that writes under `prefix`."""
    return f"{prefix}.commit.json"


def split_stage_key(key: str) -> tuple[str, list[str]]:
    """Split a store key into the prefix of its stage (see RunKeys) and the parts below it.

    The names of runs, data sets and models are arbitrary, so parts are recognized by their position only. The attempts
    of a converted model have the prefix `models`, and entries of a round's journal the prefix `<round>.journal`. Other
    keys have the prefix "".
    """
    parts = key.split("/")
    match parts:
        case ["runs", _, "rollouts" | "steps" | "checkpoints" | "exports", _, *_]:
            length = 4
        case ["runs", _, "evals" | "regrades", _, _, *_]:
            length = 5
        case ["models", name, *_]:
            length = 1 if name.startswith("attempt-") else 2
        case _:
            length = 0
    return "/".join(parts[:length]), parts[length:]


_ATTEMPT = re.compile(r"(?:runs/[^/]+/(?:checkpoints|exports)/\d+|models)/attempt-[^/]+")


def attempt_in_path(path: str) -> str | None:
    """Return the store key of the directory of a checkpoint, an export or a converted model from its path in any store:
    "/data/runs/runs/r/exports/000005/attempt-0a" -> "runs/r/exports/000005/attempt-0a". None for other paths."""
    match = _ATTEMPT.search(path)
    return match[0] if match else None


def model_title(path: str) -> str:
    """Return a short name of a model: RUN/VERSION for the export or checkpoint of a run, else the directory's name."""
    parts = (attempt_in_path(path) or "").split("/")
    return f"{parts[1]}/{int(parts[3])}" if parts[0] == "runs" else PurePath(path).name
