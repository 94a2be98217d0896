"""A request to stop soon: who asks (a signal, a scheduler), by when, and the exception that ends a stage because of it."""

from __future__ import annotations

import threading
import time


class Preempted(BaseException):
    """A stage gave up because it was asked to. What was committed or journalled stands; the same command goes on from there.

    Like KeyboardInterrupt no Exception: nothing went wrong, and nobody should try again.
    """


class StopRequest:
    """Asked at most once, seen by every thread. Not asked, it costs nothing."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deadline = float("inf")

    def ask(self, grace: float) -> None:
        """Ask to stop within `grace` seconds; a later call changes nothing. Safe in a signal handler."""
        if not self._event.is_set():
            self._deadline = time.monotonic() + grace
            self._event.set()

    @property
    def requested(self) -> bool:
        """Whether somebody has asked."""
        return self._event.is_set()

    @property
    def seconds_left(self) -> float:
        """Until the grace period ends; infinite if nobody has asked."""
        return self._deadline - time.monotonic()

    def wait(self, timeout: float) -> bool:
        """Wait until somebody asks, at most `timeout` seconds. Whether somebody has."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise Preempted if somebody has asked. Called between stages."""
        if self.requested:
            raise Preempted("asked to stop")
