"""Reads the files of offline W&B runs, which have no public reader."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _START = 32768, 7, 7  # bytes of a block, of a chunk's header, of the file's header
_LAST_CHUNKS = (1, 4)  # chunk types that end a record: "full" and "last"


def read_history(directory: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the history rows of a W&B run from the files of its offline runs, oldest first."""
    for path in sorted(directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for record in _read_messages(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def wait_for_end(directory: Path, run_id: str) -> None:
    """Wait until the newest file of a W&B run that ended has its last record: W&B's process writes in its own time."""
    deadline = time.monotonic() + 120
    newest = max(directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    while [record.WhichOneof("record_type") for record in _read_messages(newest)][-1:] != ["exit"]:
        assert time.monotonic() < deadline, "W&B has not written the end of the run"
        time.sleep(0.1)


def _read_messages(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its type stubs lack the classes
    return map(messages.Record.FromString, _read_records(path.read_bytes()))


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a .wandb file: a LevelDB log, whose records are split into chunks so that no chunk
    crosses the boundary of a block."""
    position, record = _START, b""
    while position + _HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:  # the end of a block is padded
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER + length
        if position > len(data) or kind == 0:
            return  # cut off by a kill
        record += data[position - length : position]
        if kind in _LAST_CHUNKS:
            yield record
            record = b""
