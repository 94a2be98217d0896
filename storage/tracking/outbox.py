"""A durable queue of JSON lines: a run appends lines; the process that holds the delivery lock delivers them.

    outbox.jsonl     all lines, delivered or not, each with a unique key
    delivered.json   the byte offset in outbox.jsonl up to which lines were delivered
    refused.jsonl    lines that the tracker refused for good, with the reason
    delivery.lock    the delivery lock (flock)

A run has one outbox.jsonl. These three files exist once per tracker: those of MLflow have the names above, those of
others a suffix, for instance delivered-wandb.json. So one tracker's outage does not delay the delivery to another.

A line is marked as delivered after its delivery, so a kill between the two causes a second delivery. The queue
interprets no field of a line except `key`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any


class Outbox:
    """The queue in `directory`, as seen by one tracker.

    Args:
        directory: must be on a local disk, since appending must not wait for a network.
        suffix: of the tracker's files (`tracker_suffix`).
    """

    def __init__(self, directory: Path, suffix: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lines = directory / "outbox.jsonl"
        self._delivered = directory / f"delivered{suffix}.json"
        self._refused = directory / f"refused{suffix}.jsonl"
        self._lock_path = directory / f"delivery{suffix}.lock"
        self._lock: int | None = None
        self._append_lock = threading.Lock()
        self._torn = False  # whether outbox.jsonl ends with a partial line
        self._lines.touch(mode=0o600)
        with self._lines.open("rb+") as file:  # terminate a partial line that a killed process has left
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")

    @cached_property
    def _keys(self) -> set[str]:
        return {line["key"] for line, _ in self.lines_from(0)}

    def append(self, key: str, line: dict[str, Any]) -> bool:
        """Append a line with the given key. If the key exists, append nothing and return False."""
        data = json.dumps({"key": key, **line}, ensure_ascii=False).encode() + b"\n"
        with self._append_lock:
            if key in self._keys:
                return False
            # A single unbuffered write, so that lines of two processes are not interleaved.
            with self._lines.open("ab", buffering=0) as file:
                whole = b"\n" + data if self._torn else data
                written = file.write(whole)
                self._torn = written < len(whole) and (written > 0 or self._torn)
                if written < len(whole):  # a disk that fills up writes a part; only the next write would fail
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._lines))
            self._keys.add(key)
        return True

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def lines_from(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the lines from the byte `offset` on, each with the offset of its end. Partial lines are skipped."""
        with self._lines.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # an incomplete last line, which may still be being written
                offset += len(raw)
                try:
                    yield json.loads(raw), offset
                except ValueError:
                    continue

    @property
    def delivered_offset(self) -> int:
        """Return the byte offset up to which lines were delivered."""
        try:
            offset = int(json.loads(self._delivered.read_bytes())["offset"])
        except (FileNotFoundError, ValueError):
            return 0
        return min(offset, self._lines.stat().st_size)

    def mark_delivered(self, offset: int) -> None:
        """Record that all lines before byte `offset` were delivered."""
        temporary = self._delivered.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"offset": offset}))
        temporary.replace(self._delivered)

    def record_refused_line(self, line: dict[str, Any], reason: str) -> None:
        """Append a line that the tracker refused, and the reason, to refused.jsonl. The caller then marks the
        line as delivered, so that it is not sent again."""
        with open(os.open(self._refused, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, "line": line}, ensure_ascii=False) + "\n")

    def try_lock(self) -> bool:
        """Acquire the delivery lock, which is released when the process ends. Return False if another process holds
        it."""
        if self._lock is None:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._lock = descriptor
        return True

    def unlock(self) -> None:
        """Release the delivery lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
