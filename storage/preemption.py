"""Cooperative preemption: a stop request with a grace period, and the exception with which a stage then ends."""

from __future__ import annotations

import threading
import time


class Preempted(BaseException):
    """A stage was stopped on request. Committed rounds and journalled groups are kept; the same command resumes the
    run.

    A BaseException, like KeyboardInterrupt, so that retry loops do not catch it.
    """


class StopRequest:
    """A stop request that threads can poll or wait for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deadline = float("inf")

    def request(self, grace_seconds: float) -> None:
        """Request a stop within `grace_seconds` seconds. Later calls can only shorten the time. Safe in a signal
        handler."""
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
