"""Handle SIGTERM during a session, and Ctrl-C during a command.

SIGTERM (from preemption, `kill`, Kubernetes or Prefect's cancellation) is a request to stop within a grace period: the
running stage may finish or cancel itself (`storage/preemption.py`), and is interrupted when the period is over. The
first Ctrl-C shuts the command down and the second kills it. Both signals end all child processes and print one line
instead of a traceback. SIGTERM outside a session is handled in runner.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack
from types import FrameType

from penstock.storage.preemption import Preempted, StopRequest

INTERRUPTED = 130  # exit code after Ctrl-C


def stop_on_sigterm(stop: StopRequest, grace_seconds: float) -> ExitStack:
    """Set `stop` on SIGTERM, and raise Preempted in the main thread `grace_seconds` later. Closing the returned stack
    restores the previous signal handlers.

    Outside the main thread no handler is installed: Prefect then ends the flow run at once.
    """
    handlers = ExitStack()
    if threading.current_thread() is not threading.main_thread():
        return handlers

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if not stop.requested:
            stop.request(grace_seconds)
            signal.setitimer(signal.ITIMER_REAL, max(grace_seconds, 1e-3))

    def on_deadline(number: int, frame: FrameType | None) -> None:
        raise Preempted(f"the grace period of {grace_seconds:g} s is over")

    for number, handler in ((signal.SIGTERM, on_sigterm), (signal.SIGALRM, on_deadline)):
        handlers.callback(signal.signal, number, signal.signal(number, handler))
    handlers.callback(signal.setitimer, signal.ITIMER_REAL, 0)
    return handlers


def raise_on_ctrl_c() -> None:
    """Raise KeyboardInterrupt at the first SIGINT and kill the command at the second. Call it in the main thread."""

    def on_first(number: int, frame: FrameType | None) -> None:
        kill_on_ctrl_c()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_first)


def kill_on_ctrl_c() -> None:
    """Make the next SIGINT kill the command, also during its shutdown and the interpreter's exit."""
    signal.signal(signal.SIGINT, kill_command)


def kill_command(number: int, frame: FrameType | None) -> None:
    """Kill all child processes and this process (a signal handler)."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(INTERRUPTED)


def report_interrupt(*, resumable: bool) -> int:
    """Print that the command was interrupted. Return the exit code."""
    rest = "; the same command resumes after the last committed stage" if resumable else ""
    print(f"penstock: interrupted{rest}", file=sys.stderr)
    return INTERRUPTED
