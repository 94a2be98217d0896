"""The schema of samples: fields, their order and their Arrow types. One row is one trainable sequence.

The per-token fields `token_ids`, `loss_mask` and `rollout_logprobs` have equal length, so that an index refers to the
same token in each; `loss_mask` and `rollout_logprobs` are zero on the prompt. Advantages are not stored; the trainer
computes them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any

import pyarrow as pa

from penstock.storage.commit import escape_invalid_text
from penstock.storage.errors import PluginError, RunError, check_rules

SCHEMA_VERSION = 4
_VERSION_KEY = b"penstock_schema_version"
# Component of `rewards` that a user-defined function can set (--custom-reward-post-process-path). Advantage estimators
# use it in place of the reward, and do not normalize it within groups.
TRAIN_REWARD = "train_reward"
OVERLONG_PENALTY = "overlong_penalty"  # component of `rewards` that --overlong-buffer-len adds to the reward
# Keys in `metadata`: the name of the prompt's teacher (--opd-teacher-key), and a hint for it (--opd-hint-key).
TEACHER, HINT = "teacher", "hint"
# Key in `metadata` of the attributes that user-defined functions have set on a sample and that are not fields of it.
ATTRIBUTES = "sample_attributes"


class Status(StrEnum):
    """How the generation of a sample ended."""

    PENDING = "pending"  # the prompt was issued, nothing is generated yet
    COMPLETED = "completed"  # ended by an end token or a stop string
    TRUNCATED = "truncated"  # ended by the length limit
    ABORTED = "aborted"  # ended by an abort request; a later round may continue it
    FAILED = "failed"  # generation or grading raised an exception; metadata["error"] has its message


@dataclass(slots=True)
class Sample:
    """One prompt with one response. L is the number of tokens of prompt and response."""

    sample_id: str  # unique in the run
    group_id: str  # shared by the samples of one prompt
    trajectory_id: str  # shared by the sequences of one agent execution
    rollout_id: int  # the round
    prompt: str = ""  # text after the chat template, as sent to the engine
    response: str = ""
    label: str = ""
    token_ids: list[int] = field(default_factory=list)  # [L] prompt + response
    loss_mask: list[int] = field(default_factory=list)  # [L] 1 = trained on; 0 = prompt, tool or environment token
    rollout_logprobs: list[float] = field(default_factory=list)  # [L] of the engine; 0.0 where loss_mask is 0
    images: list[str] = field(default_factory=list)  # blobs (storage/blobs.py), in the order of their tokens
    teacher_logprobs: list[float] | None = None  # [L] of a teacher's engine; 0.0 where loss_mask is 0
    teacher_prompt_ids: list[int] | None = None  # tokens of the prompt that the teacher sees (--opd-hint-key)
    teacher_top_ids: Any = None  # [L * k] int32, the k most probable tokens of a teacher's engine (--opd-top-k), ...
    teacher_top_logprobs: Any = None  # [L * k] float32, ... and their log-probs; 0 where loss_mask is 0
    routed_experts: bytes | None = None  # encoded expert ids, if the engine returned them (routed_experts.py)
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # named components of the reward
    status: Status = Status.PENDING
    policy_versions: tuple[int, int] = (-1, -1)  # versions that generated the first and the last token; -1 for SFT
    metadata: dict[str, Any] = field(default_factory=dict)  # user-defined, stored as JSON

    @property
    def response_length(self) -> int:
        """Return the number of tokens from the first one with loss_mask 1 to the end."""
        return len(self.token_ids) - self.prompt_length

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first one with loss_mask 1, or of all tokens if there is none."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.token_ids)

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_trained: bool) -> None:
        """Append tokens to the sample, with one log-prob for each; the loss mask is 1 if `is_trained`, else 0."""
        self.token_ids += token_ids
        self.loss_mask += [int(is_trained)] * len(token_ids)
        self.rollout_logprobs += logprobs

    def fail(self, reason: str) -> None:
        """Set the status FAILED with a reason, and exclude all tokens from training."""
        self.status, self.metadata["error"] = Status.FAILED, reason
        self.loss_mask = [0] * len(self.loss_mask)

    def check(self) -> None:
        """Check that the per-token fields are consistent. Only a user-defined function can make them inconsistent."""
        lengths = [len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs)]
        num_scored = lengths[0] if self.teacher_logprobs is None else len(self.teacher_logprobs)
        name, mask_values = f"sample {self.sample_id}", set(self.loss_mask)
        rules = [
            (
                len(set(lengths)) != 1,
                f"{name}: token_ids, loss_mask and rollout_logprobs have lengths {', '.join(map(str, lengths))}; they "
                "must be equal: set a mask value and a log-prob for every token",
            ),
            (
                num_scored != lengths[0],
                f"{name}: teacher_logprobs has length {num_scored}, but there are {lengths[0]} tokens: a user-defined "
                "function must not change scored tokens",
            ),
            (
                mask_values - {0, 1},
                f"{name}: loss_mask contains {sorted(mask_values, key=repr)}: set every value to 0 or 1",
            ),
        ]
        check_rules(rules, PluginError)


SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("rollout_id", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("label", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("images", pa.list_(pa.string())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("routed_experts", pa.large_binary()),  # 64-bit offsets, since a shard may have more than 2 GB
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("status", pa.string()),
        ("policy_versions", pa.list_(pa.int64(), 2)),
        ("metadata", pa.string()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)

TEACHER_COLUMNS = pa.schema(  # a table has those of these columns that a sample has set
    [
        ("teacher_prompt_ids", pa.list_(pa.int32())),
        ("teacher_top_ids", pa.list_(pa.int32())),
        ("teacher_top_logprobs", pa.list_(pa.float32())),
    ]
)


def to_table(samples: Iterable[Sample]) -> pa.Table:
    """Return samples as an Arrow table with SCHEMA, and the TEACHER_COLUMNS that they have. Text that is not valid
    Unicode is escaped."""
    rows = list(samples)
    try:
        return _build_table(rows)
    except UnicodeEncodeError:
        texts = ("sample_id", "group_id", "trajectory_id", "prompt", "response", "label", "rewards", "metadata")
        return _build_table(
            [replace(row, **{name: escape_invalid_text(getattr(row, name)) for name in texts}) for row in rows]
        )


def _build_table(rows: list[Sample]) -> pa.Table:
    columns: dict[str, Any] = {f.name: [getattr(row, f.name) for row in rows] for f in fields(Sample)}
    schema = SCHEMA
    for column in TEACHER_COLUMNS:
        if any(value is not None for value in columns[column.name]):
            schema = schema.append(column)
        else:
            del columns[column.name]
    if token_columns := _build_token_columns(rows):
        columns |= token_columns
    else:  # the samples are inconsistent, so `check` or `pa.table` raises
        for row in rows:
            row.check()
    columns["rewards"] = [list(row.rewards.items()) for row in rows]
    columns["status"] = [row.status.value for row in rows]
    columns["policy_versions"] = [list(row.policy_versions) for row in rows]
    columns["metadata"] = [json.dumps(row.metadata, ensure_ascii=False, sort_keys=True) for row in rows]
    return pa.table(columns, schema=schema)


def _build_token_columns(rows: list[Sample]) -> dict[str, pa.ListArray] | None:
    """Return the per-token fields as Arrow columns, or None if they are inconsistent or not lists of numbers.
    `pa.array` gives the same columns, but holds the GIL twice as long."""
    token_ids, loss_mask, rollout_logprobs = array("i"), bytearray(), array("f")
    try:
        for row in rows:
            if not len(row.token_ids) == len(row.loss_mask) == len(row.rollout_logprobs):
                return None
            if row.teacher_logprobs is not None and len(row.teacher_logprobs) != len(row.token_ids):
                return None
            token_ids.fromlist(row.token_ids)
            loss_mask += bytes(row.loss_mask)  # faster than an array; the lengths are compared below
            rollout_logprobs.fromlist(row.rollout_logprobs)
    except (TypeError, ValueError, OverflowError):
        return None
    if loss_mask.strip(b"\0\1") or len(loss_mask) != len(token_ids):
        return None
    offsets = pa.array(accumulate((len(row.token_ids) for row in rows), initial=0), pa.int32())
    columns: dict[str, Any] = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    for name, values in columns.items():
        type = SCHEMA.field(name).type
        numbers = pa.Array.from_buffers(type.value_type, len(values), [None, pa.py_buffer(values)])
        columns[name] = pa.ListArray.from_arrays(offsets, numbers, type)
    return columns


def from_table(table: pa.Table) -> list[Sample]:
    """Return the samples of a table; the inverse of `to_table`."""
    check_schema(table.schema)
    rows = table.to_pylist()
    for row in rows:
        row["rewards"] = dict(row["rewards"])
        row["status"] = Status(row["status"])
        row["policy_versions"] = tuple(row["policy_versions"])
        row["metadata"] = json.loads(row["metadata"])
    return [Sample(**row) for row in rows]


def check_schema(schema: pa.Schema) -> None:
    """Check that this release can read a shard with the given Arrow schema."""
    version = int((schema.metadata or {}).get(_VERSION_KEY, b"0"))
    if version != SCHEMA_VERSION:
        raise RunError(
            f"sample shard has schema version {version or 'none'}; this release of Penstock reads {SCHEMA_VERSION}: "
            "install the release that wrote the shard"
        )
