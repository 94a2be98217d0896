"""SIGTERM: a request to stop, then an exception after the grace period."""

import os
import signal
import time

import pytest

from penstock.flows.runtime.signals import stop_on_sigterm
from penstock.storage.preemption import Preempted, StopRequest


def test_sigterm_requests_a_stop_and_raises_after_the_grace_period() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(stop, 0.2):
        stop.raise_if_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60) and stop.seconds_left <= 0.2
        with pytest.raises(Preempted, match="asked to stop"):
            stop.raise_if_requested()
        with pytest.raises(Preempted, match="grace period"):
            time.sleep(600)  # ended by the signal, or by the test's timeout
    assert signal.getsignal(signal.SIGTERM) is before


def test_work_that_ends_within_the_grace_period_is_not_interrupted() -> None:
    stop = StopRequest()
    with stop_on_sigterm(stop, 0.1):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert stop.requested


def test_second_request_does_not_extend_the_deadline() -> None:
    stop = StopRequest()
    stop.request(0.0)
    stop.request(1000.0)
    assert stop.seconds_left <= 0


def test_without_a_request_nothing_stops() -> None:
    stop = StopRequest()
    stop.raise_if_requested()
    assert not stop.wait(0) and stop.seconds_left == float("inf")
