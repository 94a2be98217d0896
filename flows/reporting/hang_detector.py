"""Detect that no stage has moved for a while, and print the Python stacks of the run's processes. Nothing is killed.

Trainer ranks and engine processes print their stacks when they get SIGUSR2 (`engines/scratch.py`,
an engine's launch script). A process without that handler is named only, since the signal would kill it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.engines.scratch import STACK_SIGNAL, own_temp_directory, stack_directory
from penstock.flows.reporting.observer import Observer

ANSWER_SECONDS = 2.0  # how long a process may take to print its stacks
HANDLED = "SigCgt:"  # line of /proc/PID/status: bit mask of the signals that the process handles


class HangDetector(Observer):
    """Watches in a thread whether stages move.

    Args:
        timeout: seconds without progress that count as a hang; 0 turns the detector off.
        warn: prints a message for the user.
        directory: for the files with the stacks, one for each hang.
    """

    def __init__(self, timeout: float, warn: Callable[[str], object], directory: Path) -> None:
        self.timeout = timeout
        self.warn = warn
        self.directory = directory
        self._moved_at = time.monotonic()
        self._reported_at: float | None = None  # the value of _moved_at that was reported as a hang
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-detector", daemon=True)

    def on_progress(self) -> None:
        self._moved_at = time.monotonic()

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        self.on_progress()

    def __enter__(self) -> HangDetector:
        self.on_progress()
        if self.timeout:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self.timeout:
            self._thread.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        wait = self.timeout
        while not self._stop.wait(wait):
            moved_at = self._moved_at
            left = moved_at + self.timeout - time.monotonic()
            if left <= 0 and moved_at != self._reported_at:
                self._reported_at = moved_at
                self._report()
            wait = left if left > 0 else min(self.timeout, 10.0)

    def _report(self) -> None:
        """Print the stacks of all processes and write them to a file. A failure is printed only."""
        try:
            stacks = stacks_of_run()
            path = self.directory / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(stacks)
            self.warn(f"no stage has moved for {self.timeout:g} s; waiting on. Stacks, also in {path}:\n{stacks}")
        except (OSError, psutil.Error) as error:  # a full disk, a process that is not ours
            self.warn(f"no stage has moved for {self.timeout:g} s; waiting on. Its stacks are not known ({error})")


def stacks_of_run() -> str:
    """Return the Python stacks of this process and of all its descendants."""
    parts = [f"== driver (pid {os.getpid()})\n{own_stacks()}"]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()[:3])[:100] or process.name()
            parts.append(f"== {title} (pid {process.pid})\n{stacks_of_process(process)}")
    return "\n".join(parts)


def own_stacks() -> str:
    """Return the Python stacks of this process, thread by thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in sys._current_frames().items()
    )


def stacks_of_process(process: psutil.Process, seconds: float = ANSWER_SECONDS) -> str:
    """Return the Python stacks of another process, or a line that says why they are not known.

    Args:
        process: a descendant of this process.
        seconds: how long to wait for its answer.
    """
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"stopped (T): cannot print its stacks before `kill -CONT {process.pid}`\n"
    if status == psutil.STATUS_ZOMBIE:
        return "ended (Z)\n"
    if not _handles_signal(process.pid, STACK_SIGNAL):
        return (
            f"{status}: this process cannot print its stacks; `py-spy dump --pid {process.pid}` shows those of Python\n"
        )
    directory = stack_directory(own_temp_directory())
    before = {path: path.stat().st_size for path in directory.glob("*.txt")}
    process.send_signal(STACK_SIGNAL)
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        new = "".join(path.read_text()[before.get(path, 0) :] for path in sorted(directory.glob("*.txt")))
        if new and new == text:  # complete: it did not grow any more
            return new
        text = new
    return text or f"{status}: no answer within {seconds:g} s; the process may be inside a system call\n"


def _handles_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal. Without one SIGUSR2 would kill the process."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(HANDLED):
                return bool(int(line.removeprefix(HANDLED), 16) >> (number - 1) & 1)
    return False
