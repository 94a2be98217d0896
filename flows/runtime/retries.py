"""Starts of a deployment: they wait for other drivers of the run, and limit the retries of `penstock deploy`.

An automation on the Prefect server runs a deployment again when a flow run of it crashes or fails (services/deploy.py).
It works when the flow run's process, its worker or its machine is dead, but it knows nothing about the run. So the new
start itself decides whether it may continue, from Prefect's flow runs (how many retries in a row) and the run's record
(whether the same failure came twice without a new commit). It ends in a failed state of another name, which the
automation does not expect.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from itertools import takewhile
from uuid import UUID

from prefect import State, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import deployment, flow_run
from prefect.states import Failed

from penstock.flows.config import PostTrainConfig
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import RunKeys
from penstock.storage.errors import InputError, RunError
from penstock.storage.history.run_record import read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.store import Store, read_commits

RETRIES = "PENSTOCK_RETRIES"  # variable of flow runs that the automation has started: how many may follow each other
TAG = "retry:"  # begins the tag of such a flow run
INVALID, NOT_RETRIED = "Invalid", "NotRetried"  # names of failed states that end a run's retries
POLL = 2.0  # seconds


def retried(function: Callable[[PostTrainConfig], State[None]]) -> Callable[[PostTrainConfig], State[None]]:
    """Decorate the function of a flow that drives a run. Only starts of a deployment behave differently."""

    @functools.wraps(function)
    def call(config: PostTrainConfig) -> State[None]:
        if deployment.id is None:
            return function(config)
        try:
            store, keys = open_store(config.run, probe=False), RunKeys(config.run.run)
            has_waited = wait_for_other_drivers(store, keys)
            if allowed := os.environ.get(RETRIES):
                number = count_retries(int(allowed))
                if reason := refuse_retry(store, keys, number, int(allowed), has_waited=has_waited):
                    return Failed(name=NOT_RETRIED, message=reason, data=RunError(reason))
                get_run_logger().info("retry %d of %s; the run resumes after its last committed stage", number, allowed)
            return function(config)
        except InputError as error:
            return Failed(name=INVALID, message=str(error), data=error)

    return call


def wait_for_other_drivers(store: Store, keys: RunKeys) -> bool:
    """Wait until no process drives the run. Return whether one did.

    A driver whose flow run is marked as crashed may be alive, after a pause of its laptop, and then continues; the
    lease of one that was lost with its machine expires.
    """
    logged = ""
    while drivers := describe_live_drivers(store, keys):
        process = drivers[0].partition(" (")[0]
        if process != logged:
            get_run_logger().warning("run %s is driven by %s; waiting until that process ends", keys.run, process)
            logged = process
        time.sleep(POLL)
    return bool(logged)


def count_retries(allowed: int) -> int:
    """Return how many starts of this deployment in a row the automation has made, this one included, at most
    `allowed` + 1. Tag this flow run with the number."""
    with get_client(sync_client=True) as client:
        newest: list[FlowRun] = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[UUID(deployment.id)])),
            flow_run_filter=FlowRunFilter(start_time=FlowRunFilterStartTime(is_null_=False)),
            sort=FlowRunSort.START_TIME_DESC,
            limit=allowed + 1,
        )
        number = sum(1 for _ in takewhile(lambda run: RETRIES in (run.job_variables or {}).get("env", {}), newest))
        existing = client.read_flow_run(UUID(flow_run.id)).tags
        client.update_flow_run(UUID(flow_run.id), tags=[*existing, f"{TAG}{min(number, allowed)}/{allowed}"])
    return number


def refuse_retry(store: Store, keys: RunKeys, number: int, allowed: int, *, has_waited: bool) -> str:
    """Return why retry `number` of a run does not start, or "" if it does. `has_waited`: for another driver."""
    if number > allowed:
        return f"the run is not complete after {allowed} retries (--retries {allowed}); the next start resumes it"
    starts = read_starts(store, keys)[-2:]
    if has_waited and starts and (end := starts[-1][1]) is not None and end.outcome == "STOPPED":
        return "the run was resumed by another process and stopped on request; the next start resumes it"
    failures = ["killed" if end is None else end.error for _, end in starts]
    comparable = {re.sub(r"\d+", "#", failure) for failure in failures}  # without process ids, ports and times
    is_same = len(starts) == 2 and len(comparable) == 1 and "" not in comparable
    if is_same and all(commit.created_at < starts[1][0].at for commit in read_commits(store, keys)):
        return f"the last two starts ended in the same way ({failures[1]}) without a new commit: repair the cause first"
    return ""
