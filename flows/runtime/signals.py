"""Handle SIGTERM, SIGHUP and SIGINT (Ctrl-C) from the first second of a command to the last.

The first signal starts the grace period (--grace-period), at whose end the process and all its children are killed.
During a session, SIGTERM (from preemption, `kill`, Kubernetes or Prefect's cancellation) and SIGHUP are a request to
stop: the running stage may finish or cancel itself (`storage/preemption.py`), and is interrupted CLEANUP seconds before
the end. SIGINT interrupts it at once, as do all signals outside a session, and a second SIGINT kills the process.

An exception that a handler raises is lost if a library swallows it, for instance in an import, so it is raised again
every TICK seconds until the session's cleanup begins. A thread ends the grace period. Handlers and threads do not run
while native code blocks the main thread or holds the interpreter's lock, so another process (services/watchdog.py) also
learns of each signal, and kills this one.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from penstock.storage.preemption import Preempted, StopRequest

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CLEANUP = 10.0  # seconds of the grace period after the stage: stop trainer and engines, tell Prefect and the trackers
GRACE_SECONDS = 30.0  # grace period until the run's --grace-period is known
WATCHDOG = Path(__file__).parents[1] / "services" / "watchdog.py"
TICK = 0.5  # seconds between checks of the deadlines; also between attempts to interrupt a stage by an exception


class StopSignals:
    """The stop signals that this process has received, and the handling of the next one."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.exits = False  # whether the command has ended; a signal then kills the process and its children
        self._grace_seconds = GRACE_SECONDS
        self._stop: StopRequest | None = None  # of the current session
        self._interrupts = False  # whether signals interrupt the session: not during its cleanup
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def exit_code(self) -> int:
        """Return the exit code after the first signal: 143 after SIGTERM, 129 after SIGHUP, 130 after SIGINT."""
        return 128 + self.received[0]

    def install(self) -> None:
        """Install the handlers, also in place of a library's. A SIGHUP that `nohup` ignores stays ignored."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._interrupt_session)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # the interpreter's end restores the default handler

    def start_watchdog(self) -> None:
        """Start the process that ends this one after the grace period (watchdog.py)."""
        reader, writer = os.pipe()
        command = [sys.executable, "-P", str(WATCHDOG), str(os.getpid())]
        seconds = max(self._grace_seconds, CLEANUP) + 4 * TICK  # `_kill_after` comes first
        # In a session of its own, which Ctrl-C and signals to the process group do not reach
        self._watchdog = subprocess.Popen([*command, str(seconds)], stdin=reader, start_new_session=True)
        os.close(reader)
        os.set_blocking(writer, False)
        earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if earlier >= 0:
            os.close(earlier)  # ends the previous watchdog

    def set_grace_period(self, seconds: float) -> None:
        """Set the seconds between the first signal and the end of this process, at least CLEANUP."""
        restart = self._watchdog is not None and not self.received and seconds != self._grace_seconds
        self._grace_seconds = seconds
        if restart:
            self.start_watchdog()

    @contextmanager
    def session(self, stop: StopRequest, grace_seconds: float) -> Iterator[None]:
        """Let the signals stop a session during the block: they set `stop`, and interrupt the main thread when the
        grace period is almost over.

        Outside the main thread no handler is installed: Prefect then ends the flow run at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGALRM)}
        self.install()
        self._stop, self._interrupts = stop, True
        self.set_grace_period(grace_seconds)
        try:
            if self.received:  # an exception before the session was lost; the next alarm raises another one
                stop.request(max(0.0, self._grace_seconds - CLEANUP))
            yield
        finally:
            self._stop = None
            if before[signal.SIGALRM] != self._interrupt_session:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin_cleanup(self) -> None:
        """Do not interrupt the session any more: its cleanup has time limits of its own, and the grace period."""
        self._interrupts = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second_interrupt = number == signal.SIGINT and number in self.received
        self.received.append(number)
        if self.exits or is_second_interrupt:
            kill_command(self.exit_code)
        if len(self.received) == 1:
            # Not a `threading.Thread`, whose locks the interrupted code may hold
            _thread.start_new_thread(self._kill_after, (max(self._grace_seconds, CLEANUP),))
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        if self._stop is None:
            raise self._exception()
        self._stop.request(max(0.0, self._grace_seconds - CLEANUP))
        self._interrupt_session()

    def _kill_after(self, seconds: float) -> None:
        """Kill this process at the end of the grace period, from a thread: the main thread may be in native code. A
        process that is not a `penstock` command is not killed once its session has ended."""
        time.sleep(seconds)
        if self._watchdog is not None or self._stop is not None:
            kill_command(self.exit_code)

    def _interrupt_session(self, number: int = signal.SIGALRM, frame: FrameType | None = None) -> None:
        """Raise an exception if a stage is running and its time is over. Also the handler of SIGALRM."""
        stop = self._stop
        if stop is not None and self._interrupts and (signal.SIGINT in self.received or stop.seconds_left <= 0):
            raise self._exception()

    def _exception(self) -> BaseException:
        if signal.SIGINT in self.received:
            return KeyboardInterrupt()
        return Preempted(f"stopped by {signal.Signals(self.received[0]).name}")


def kill_command(exit_code: int) -> None:
    """Kill all child processes and this process."""
    import psutil  # here, because `penstock setup` runs before any package is installed

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(exit_code)


def patience_after(kind: type[BaseException] | None) -> float | None:
    """Return how many seconds a session that ends by an exception of class `kind` waits for each service at most; None:
    no shorter limit than usual."""
    return CLEANUP / 4 if kind is not None and issubclass(kind, (Preempted, KeyboardInterrupt)) else None


def describe_cleanup(kind: type[BaseException] | None, *, is_requested: bool, writes_report: bool) -> str:
    """Return what a session does when it ends, and why it ends. `kind` is the exception that ends it, if any;
    `is_requested`: a stop was requested, so that other exceptions are its consequences."""
    actions = "stopping trainer and engines" + (", writing the report" if writes_report else "")
    if kind is None:
        return actions
    if issubclass(kind, KeyboardInterrupt):
        return f"interrupted: {actions} (Ctrl-C again kills them)"
    return f"stopped on request: {actions}" if is_requested or issubclass(kind, Preempted) else f"failed: {actions}"


def report_stop(*, resumable: bool) -> int:
    """Print the name of the signal that stopped the command. Return the exit code."""
    first = stop_signals.received[0] if stop_signals.received else signal.SIGINT
    text = "interrupted" if first == signal.SIGINT else f"stopped by {signal.Signals(first).name}"
    rest = "; the same command resumes after the last committed stage" if resumable else ""
    print(f"penstock: {text}{rest}", file=sys.stderr)
    return 128 + first


stop_signals = StopSignals()
