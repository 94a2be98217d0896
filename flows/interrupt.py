"""Ctrl-C: the first one ends the command in order and the second one ends it at once. Either way one line, no traceback, no child left.

SIGTERM is `registry.py`'s and `stopping.py`'s.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def listen() -> None:
    """Raise KeyboardInterrupt at the first SIGINT; later ones are `_again`'s. Called once, in the main thread."""
    signal.signal(signal.SIGINT, _first)


def ending() -> None:
    """Let a Ctrl-C while the interpreter exits end it at once: nothing of ours is left to do."""
    signal.signal(signal.SIGINT, _again)


def report(*, resumable: bool) -> int:
    """Say that the command was interrupted. Returns the exit code."""
    rest = "; the same command resumes after the last committed stage" if resumable else ""
    print(f"penstock: interrupted{rest}", file=sys.stderr)
    return INTERRUPTED


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _again)
    raise KeyboardInterrupt


def _again(number: int, frame: FrameType | None) -> None:
    """While the command is ending: kill what it has started, and end at once."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(INTERRUPTED)
