"""Start a flow from the command line: check the request, run the flow, report a failure in one message."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from penstock.engines.cluster import check_ray_answers, translate_ray_errors
from penstock.engines.scratch import temp_base_directory
from penstock.flows.config import Plan, PostTrainConfig
from penstock.flows.options.argv import to_one_line
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.preflight import plan_of, preflight
from penstock.flows.runtime.processes import ray_starting
from penstock.flows.runtime.resolve import is_complete
from penstock.flows.runtime.runs import check_not_driven, logs_of_run, open_store
from penstock.flows.runtime.signals import stop_signals
from penstock.flows.terminal.panel import end_wait, show_wait
from penstock.storage.commit import RunKeys
from penstock.storage.errors import InputError, PenstockError
from penstock.storage.preemption import Preempted
from penstock.storage.secrets import redact


def run_flow(name: str, config: PostTrainConfig) -> int:
    """Run the flow `name` here. Return the exit code: 0 done, 1 failed (the reason was printed), 128 + the number of
    the signal that stopped it. Raises InputError or StoreError if nothing was started."""
    wait = functools.partial(show_wait, run=config.run.run, as_json=config.run.log_format == "json")
    try:
        wait("checking options, model and data", only_on_terminal=True)
        plan = plan_of(name, config)
        if plan.flow.has_run:
            store, run = open_store(plan.run, probe=False), config.run.run
            if is_complete(store, plan):
                end_wait()
                print(f"run {run} is complete, nothing is left to do; `penstock show {run}` prints it")
                return 0
            check_not_driven(store, RunKeys(run))
        preflight(plan)  # before the import of Prefect, which takes seconds
        if config.run.ray_address is not None:
            with translate_ray_errors(config.run.ray_address):
                check_ray_answers(config.run.ray_address)
        if not plan.flow.has_run:  # starts Ray only if the result does not exist
            return _run_in_prefect(name, plan, wait)
        with ray_starting(plan):
            return _run_in_prefect(name, plan, wait)
    finally:
        end_wait()


def _run_in_prefect(name: str, config: PostTrainConfig, wait: Callable[[str], None]) -> int:
    """Connect to Prefect, run a checked flow, and report its failure. Return the exit code."""
    wait("loading Prefect")
    from prefect.exceptions import TerminationSignal

    from penstock.flows.runtime.prefect_api import ensure_prefect_api, restore_client_settings

    stop_signals.install()
    stop_signals.set_grace_period(config.run.grace_period)
    wait("starting Prefect's server, or connecting to it")
    ensure_prefect_api()
    wait("opening the run")
    observed = ObservedFlow(getattr(importlib.import_module(f"penstock.flows.{name}"), name))
    if isinstance(config, Plan):  # Prefect's page then shows the options that were given, not all
        observed.flow.serialize_parameters = lambda parameters: {"config": config.given}
    try:
        observed.flow(config)
    except (TerminationSignal, Preempted):
        _print_error(f"{name} stopped on request; the same command resumes after the last committed stage")
        return stop_signals.exit_code
    except Exception as error:  # all retries failed
        if stop_signals.received and not observed.finished:  # a library has turned Preempted into its own exception
            raise
        reason = observed.error or error  # `error` may be Prefect's, if it could not report the flow's own error
        if observed.finished:
            _print_error(
                f"{name} is complete, but its end could not be reported to Prefect ({type(error).__name__}: {error}); "
                "the Prefect page shows it as running until it is marked crashed"
            )
            return 0
        if isinstance(reason, InputError | BrokenPipeError):  # an invalid request that preflight could not detect
            raise reason from None
        _print_error(to_one_line(f"{name} failed: {type(reason).__name__}: {reason}"))
        print(save_traceback(config.run, reason), file=sys.stderr)
        print("The same command resumes after the last committed stage.", file=sys.stderr)
        return 1
    finally:
        restore_client_settings()
    return 0


class ObservedFlow:
    """A copy of a flow that records whether its function returned or which error it raised.

    An exception of Prefect does not prove that the flow failed: Prefect also raises if it cannot report success.
    """

    def __init__(self, flow: Any) -> None:
        self.finished = False
        self.error: Exception | None = None
        self.flow = copy.copy(flow)

        @functools.wraps(flow.fn)
        def call(config: PostTrainConfig) -> Any:
            stop_signals.install()  # in place of Prefect's handler of SIGTERM
            try:
                result = flow.fn(config)
            except Exception as error:
                self.error = error
                raise
            self.finished = True
            return result

        self.flow.fn = call


def save_traceback(run: RunConfig, error: Exception) -> str:
    """Write the traceback of an error to the logs of a run, or to the temporary directory if its store is not local.
    Return a sentence that says where it is; if it cannot be written, the traceback itself."""
    text = redact("".join(traceback.format_exception(error)))
    try:
        logs = logs_of_run(open_store(run, probe=False), RunKeys(run.run)) or temp_base_directory()
        path = logs / f"traceback-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        logs.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except (OSError, PenstockError):  # a full disk, a store that cannot be reached
        return text
    return f"{path} has the traceback."


def _print_error(message: str) -> None:
    print(f"\npenstock: {redact(message)}", file=sys.stderr)
