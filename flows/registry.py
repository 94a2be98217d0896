"""The flows by name, and how the command line starts one: check first, run, turn a failure into one sentence."""

from __future__ import annotations

import copy
import functools
import importlib
import signal
import sys
from typing import Any

from flows.config import PostTrainConfig
from flows.words import one_line
from storage.errors import InputError
from storage.secrets import redact

FLOWS = ("post_train", "sft", "convert", "evaluate")  # module flows/<name>.py holds the flow of that name
STOPPED = 143  # the exit code of a run that ended because it was asked to (SIGTERM); the same command goes on


def start(name: str, config: PostTrainConfig) -> int:
    """Run a flow in this process. Returns the exit code: 0 done, 1 failed (the reason was printed), 143 asked to stop.

    Raises:
        InputError: the request is wrong; nothing was started.
        StoreError: the store cannot hold the run; nothing was started.
        BrokenPipeError: nothing reads standard output any more.
    """
    from flows.preflight import preflight

    assert name in FLOWS
    preflight(name, config)  # before Prefect is imported, which takes seconds
    from prefect.exceptions import TerminationSignal

    from flows.prefect_api import ensure_prefect_api, leave

    signal.signal(signal.SIGTERM, _end)
    ensure_prefect_api()
    body = _Body(getattr(importlib.import_module(f"flows.{name}"), name))
    try:
        body.flow(config)
    except (TerminationSignal, SystemExit):
        _say(f"{name} stopped as asked; the same command goes on after the last committed stage")
        return STOPPED
    except Exception as error:  # the flow has failed for good, its tasks were retried; Prefect keeps the traceback
        reason = body.error or error  # Prefect's own failure to report hides what it should have reported
        if body.finished:
            _say(f"{name} is complete, but its end could not be reported to Prefect ({type(error).__name__}: {error}); "
                 "its page goes on showing it as running until it is marked crashed")  # fmt: skip
            return 0
        if isinstance(reason, InputError | BrokenPipeError):  # a wrong request that only showed on the way
            raise reason from None
        _say(one_line(f"{name} failed: {type(reason).__name__}: {reason}"))
        print(
            "The Prefect page has the traceback (`make up`). The same command goes on after the last committed stage.",
            file=sys.stderr,
        )
        return 1
    finally:
        leave()
    return 0


class _Body:
    """A flow, and how the function in it ended: Prefect also raises when it cannot report an end."""

    def __init__(self, flow: Any) -> None:
        self.finished = False
        self.error: Exception | None = None
        self.flow = copy.copy(flow)
        self.flow.fn = self._watched(flow.fn)

    def _watched(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(config: PostTrainConfig) -> Any:
            try:
                result = function(config)
            except Exception as error:
                self.error = error
                raise
            self.finished = True
            return result

        return call


def _end(number: int, frame: object) -> None:
    """On SIGTERM outside a flow. Prefect comes by here too: when it has marked a terminated run, it sends the signal once more."""
    raise SystemExit(STOPPED)


def _say(sentence: str) -> None:
    print(f"\npenstock: {redact(sentence)}", file=sys.stderr)
