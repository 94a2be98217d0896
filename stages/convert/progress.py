"""Progress of a process, told to another on the same machine through a small file: a conversion runs beside the terminal that shows it."""

from __future__ import annotations

import time
from pathlib import Path

EVERY = 0.2  # seconds between two tellings


class ProgressFile:
    """Call it with (bytes done, bytes in all) on one side, read it on the other.

    Args:
        path: of the file; nothing is there at first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._told = Path(path), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= EVERY or done == total:
            self._told = now
            self.path.with_suffix(".new").write_text(f"{done} {total}")
            self.path.with_suffix(".new").rename(self.path)

    def read(self) -> tuple[int, int] | None:
        """(bytes done, bytes in all) as last told."""
        if not self.path.is_file():
            return None
        done, total = self.path.read_text().split()
        return int(done), int(total)
