"""One row = one trainable sequence. This file owns its fields, their order and their Arrow types.

Streams (`loss_mask`, `rollout_logprobs`) have the length of `token_ids` and are zero on the prompt, so one index means the same
token everywhere. There are no advantages here (the trainer computes them), no engine JSON and no pickles.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from typing import Any

import pyarrow as pa

from storage.errors import PluginError, RunError

SCHEMA_VERSION = 2  # 2: routed_experts
_VERSION_KEY = b"penstock_schema_version"


class Status(StrEnum):
    """How the generation of a sample ended."""

    PENDING = "pending"  # issued, nothing generated yet
    COMPLETED = "completed"  # ended by itself (end token or stop string)
    TRUNCATED = "truncated"  # ran into the length limit
    ABORTED = "aborted"  # stopped from outside; may be continued
    FAILED = "failed"  # generation or grading raised; the reason is in metadata["error"]


@dataclass(slots=True)
class Sample:
    """One prompt with one response. L = prompt tokens + response tokens."""

    sample_id: str  # unique in the run
    group_id: str  # samples of one prompt
    trajectory_id: str  # siblings split out of one agent execution share it
    rollout_id: int  # the round it belongs to
    prompt: str = ""  # rendered text, as the engine saw it
    response: str = ""
    label: str = ""
    token_ids: list[int] = field(default_factory=list)  # [L] prompt + response
    loss_mask: list[int] = field(default_factory=list)  # [L] 1 = trained, 0 = prompt, tool or environment token
    rollout_logprobs: list[float] = field(default_factory=list)  # [L] engine's, at sampling; 0.0 where loss_mask is 0
    routed_experts: bytes | None = None  # of the first tokens, if the engine returned them (storage/routed_experts.py)
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # named parts of the reward, if it has any
    status: Status = Status.PENDING
    policy_versions: tuple[int, int] = (-1, -1)  # of the first and the last generated token; -1 = no policy (demonstration)
    metadata: dict[str, Any] = field(default_factory=dict)  # free, stored as JSON

    @property
    def response_length(self) -> int:
        """Number of tokens from the first trained one to the end."""
        return len(self.token_ids) - self.prompt_length

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one (all of them if none is trained)."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.token_ids)

    def check(self) -> None:
        """Check that the streams fit together.

        Raises:
            PluginError: they do not; only a user-defined function can have made such a sample.
        """
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs)}
        if len(lengths) != 1:
            raise PluginError(
                f"sample {self.sample_id}: token_ids, loss_mask and rollout_logprobs have lengths {len(self.token_ids)}, "
                f"{len(self.loss_mask)}, {len(self.rollout_logprobs)}; they must be equal: give every token a mask and a log-prob"
            )
        if not set(self.loss_mask) <= {0, 1}:
            raise PluginError(f"sample {self.sample_id}: loss_mask holds {sorted(set(self.loss_mask))}; only 0 and 1 are allowed")


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
        ("routed_experts", pa.large_binary()),  # 64-bit offsets: a shard of a large mixture holds more than 2 GB
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("status", pa.string()),
        ("policy_versions", pa.list_(pa.int64(), 2)),
        ("metadata", pa.string()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


def to_table(samples: Iterable[Sample]) -> pa.Table:
    """Samples as an Arrow table in SCHEMA. Raises PluginError for a sample whose streams do not fit together."""
    rows = list(samples)
    columns: dict[str, Any] = {f.name: [getattr(row, f.name) for row in rows] for f in fields(Sample)}
    if streams := _streams(rows):
        columns |= streams
    else:  # the checks, or else Arrow, say what is wrong
        for row in rows:
            row.check()
    columns["rewards"] = [list(row.rewards.items()) for row in rows]
    columns["status"] = [row.status.value for row in rows]
    columns["policy_versions"] = [list(row.policy_versions) for row in rows]
    columns["metadata"] = [json.dumps(row.metadata, ensure_ascii=False, sort_keys=True) for row in rows]
    return pa.table(columns, schema=SCHEMA)


def _streams(rows: list[Sample]) -> dict[str, pa.ListArray] | None:
    """The streams as `pa.array` would make them, in half the time (in which no other thread runs). None if they do not fit together,
    or are anything but lists of numbers."""
    token_ids, loss_mask, rollout_logprobs = array("i"), bytearray(), array("f")
    try:
        for row in rows:
            if not len(row.token_ids) == len(row.loss_mask) == len(row.rollout_logprobs):
                return None
            token_ids.fromlist(row.token_ids)
            loss_mask += bytes(row.loss_mask)  # faster than an array; of what is no list it makes another number of bytes
            rollout_logprobs.fromlist(row.rollout_logprobs)
    except (TypeError, ValueError, OverflowError):
        return None
    if loss_mask.strip(b"\0\1") or len(loss_mask) != len(token_ids):
        return None
    offsets = pa.array(accumulate((len(row.token_ids) for row in rows), initial=0), pa.int32())
    streams: dict[str, Sequence[float]] = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    columns = {}
    for name, values in streams.items():
        type = SCHEMA.field(name).type
        numbers = pa.Array.from_buffers(type.value_type, len(values), [None, pa.py_buffer(values)])
        columns[name] = pa.ListArray.from_arrays(offsets, numbers, type)
    return columns


def from_table(table: pa.Table) -> list[Sample]:
    """The inverse of `to_table`. Raises RunError for a table written by a newer Penstock."""
    rows = current(table).to_pylist()
    for row in rows:
        row["rewards"] = dict(row["rewards"])
        row["status"] = Status(row["status"])
        row["policy_versions"] = tuple(row["policy_versions"])
        row["metadata"] = json.loads(row["metadata"])
    return [Sample(**row) for row in rows]


def current(table: pa.Table) -> pa.Table:
    """The same with SCHEMA's columns: those that an older Penstock did not write are empty. Raises RunError if a newer one wrote it."""
    check_schema(table.schema)
    for index, column in enumerate(SCHEMA):
        if column.name not in table.schema.names:
            table = table.add_column(index, column, pa.nulls(len(table), column.type))
    return table.replace_schema_metadata(SCHEMA.metadata)


def check_schema(schema: pa.Schema) -> None:
    """Check that this release can read a shard.

    Raises:
        RunError: a newer release has written it.
    """
    found = int((schema.metadata or {}).get(_VERSION_KEY, b"0"))
    if not 1 <= found <= SCHEMA_VERSION:
        raise RunError(
            f"sample shard has schema version {found or 'none'}; this Penstock reads 1 to {SCHEMA_VERSION}: "
            "install the release that wrote it"
        )
