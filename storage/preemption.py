"""Cooperative preemption: a stop request with a grace period, and the exception that ends a stage after the request.
Also a time limit for user-defined code and regular expressions."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 45.0  # seconds for an import of user-defined code, or for a search with a user-defined regular expression


class Preempted(BaseException):
    """A stage was stopped on request. Committed rounds and journalled groups are kept; the same command resumes the
    run. A BaseException, like KeyboardInterrupt, so that retry loops do not catch it."""


class StopRequest:
    """A stop request that threads can poll or wait for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deadline = float("inf")

    def request(self, grace_seconds: float) -> None:
        """Request a stop within `grace_seconds` seconds; later calls only shorten this. Safe in a signal handler."""
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
        self._event.set()

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested."""
        return self._event.is_set()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the grace period ends (negative afterwards); infinite without a request."""
        return self._deadline - time.monotonic()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for a request. Return whether a stop was requested."""
        return self._event.wait(timeout)

    def raise_if_requested(self) -> None:
        """Raise Preempted if a stop was requested. The driver calls it between stages."""
        if self.requested:
            raise Preempted("the run was asked to stop")


@contextmanager
def time_limit(action: str) -> Iterator[None]:
    """Raise TimeoutError in the block if it takes more than PATIENCE seconds; `action` names the block in the message.
    Outside of the main thread there is no limit, since Python delivers signals to the main thread only.

    The timer thread ends code that sleeps; the CPU timer ends code that does not let other threads run, such as a
    search with a regular expression.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_timeout(number: int, frame: object) -> None:
        raise TimeoutError(f"{action} takes more than {PATIENCE:g} s")

    before = signal.signal(signal.SIGVTALRM, on_timeout)
    timer = threading.Timer(PATIENCE, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
