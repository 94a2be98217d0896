"""A durable queue in one file: lines are appended by a run and delivered later, by whoever holds the delivery lock.

    outbox.jsonl     every line ever offered, each under a key; a key is taken once
    delivered.json   the byte up to which lines have arrived
    refused.jsonl    lines the other side will never take, with its reason

The rule for the reader: deliver, then `mark_delivered`. A kill in between delivers a line twice, so delivery must be idempotent
(see storage/tracking/lineage.py). Nothing here knows what a line means.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Outbox:
    """The queue in `directory` (local: a queue on the far side of a network would wait for that network)."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lines = directory / "outbox.jsonl"
        self._delivered = directory / "delivered.json"
        self._refused = directory / "refused.jsonl"
        self._lock_path = directory / "delivery.lock"
        self._lock: int | None = None
        self._append_lock = threading.Lock()
        self._torn = False  # whether the last line is a part of one
        self._lines.touch(mode=0o600)
        self._lines.chmod(0o600)  # earlier releases let everybody read it, and wrote the options of the store into it
        self._end_torn_line()
        self._keys = {line["key"] for line, _ in self.lines(0)}

    def append(self, key: str, line: dict[str, Any]) -> bool:
        """Add a line unless its key is taken. True if it was added."""
        data = json.dumps({"key": key, **line}, ensure_ascii=False).encode() + b"\n"
        with self._append_lock:
            if key in self._keys:
                return False
            with self._lines.open("ab", buffering=0) as file:  # one write: a line of another process never lands inside it
                whole = b"\n" + data if self._torn else data
                written = file.write(whole)
                self._torn = written < len(whole) and (written > 0 or self._torn)
                if written < len(whole):  # a disk that fills takes a part, and says so only at the next write
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._lines))
            self._keys.add(key)
        return True

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def lines(self, start: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Lines from byte `start` on, each with the byte after it. A line that a kill has cut short is passed over."""
        with self._lines.open("rb") as file:
            file.seek(start)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written
                start += len(raw)
                try:
                    yield json.loads(raw), start
                except ValueError:
                    continue

    @property
    def delivered(self) -> int:
        """The byte up to which lines have arrived."""
        try:
            offset = int(json.loads(self._delivered.read_bytes())["offset"])
        except (FileNotFoundError, ValueError):
            return 0
        return min(offset, self._lines.stat().st_size)

    def mark_delivered(self, offset: int) -> None:
        """Remember that everything before byte `offset` has arrived."""
        temporary = self._delivered.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"offset": offset}))
        temporary.replace(self._delivered)

    def refuse(self, line: dict[str, Any], reason: str) -> None:
        """Put a line aside that will never be taken, so that it does not hold up those behind it."""
        with open(os.open(self._refused, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, "line": line}, ensure_ascii=False) + "\n")

    def num_waiting(self) -> int:
        """Lines that have not arrived."""
        return sum(1 for _ in self.lines(self.delivered))

    def lock(self) -> bool:
        """Become the one who delivers, if nobody else is; the lock ends with the process."""
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
        """Let another process deliver."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_torn_line(self) -> None:
        """A kill may leave half a line; the next one must not be glued to it."""
        with self._lines.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
