"""SIGTERM as a request to stop within a grace period, for as long as a session lasts.

A machine that is taken away, `kill`, Kubernetes and Prefect's own cancellation all send SIGTERM. The stage that is running may finish
or give up in time (`storage/preemption.py`); when the time is over, it is ended where it stands.
"""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack

from storage.preemption import Preempted, StopRequest


def listen(stop: StopRequest, grace: float) -> ExitStack:
    """Turn SIGTERM into `stop`, and raise Preempted in the main thread `grace` seconds later. Closing what is returned ends that.

    Outside the main thread nothing is changed: Prefect's own handling, which ends the run at once, stays.
    """
    handlers = ExitStack()
    if threading.current_thread() is not threading.main_thread():
        return handlers

    def asked(number: int, frame: object) -> None:
        if not stop.requested:
            stop.ask(grace)
            signal.setitimer(signal.ITIMER_REAL, max(grace, 1e-3))

    def time_is_up(number: int, frame: object) -> None:
        raise Preempted(f"the grace period of {grace:g} s is over")

    for number, handler in ((signal.SIGTERM, asked), (signal.SIGALRM, time_is_up)):
        handlers.callback(signal.signal, number, signal.signal(number, handler))
    handlers.callback(signal.setitimer, signal.ITIMER_REAL, 0)
    return handlers
