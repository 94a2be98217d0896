"""SIGTERM asks; after the grace period it insists."""

import os
import signal
import time

import pytest

from flows.stopping import listen
from storage.preemption import Preempted, StopRequest


def test_it_asks_first_and_ends_the_work_when_the_grace_period_is_over() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with listen(stop, 0.2):
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60) and stop.seconds_left <= 0.2
        with pytest.raises(Preempted, match="asked to stop"):
            stop.check()
        start = time.monotonic()
        with pytest.raises(Preempted, match=r"grace period of 0.2 s is over"):
            time.sleep(10)
        assert time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_ends_in_time_is_not_disturbed() -> None:
    stop = StopRequest()
    with listen(stop, 0.1):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert stop.requested


def test_a_second_request_does_not_prolong_the_first() -> None:
    stop = StopRequest()
    stop.ask(0.0)
    stop.ask(1000.0)
    assert stop.seconds_left <= 0


def test_nobody_has_asked() -> None:
    stop = StopRequest()
    stop.check()
    assert not stop.wait(0) and stop.seconds_left == float("inf")
