"""Starts of a run: of several at the same time one drives it, and the retries of `penstock deploy` are limited.

An automation on the Prefect server runs a deployment again when a flow run of it crashes or fails (services/deploy.py).
It works when the flow run's process, its worker or its machine is dead, but it knows nothing about the run. So the new
start itself decides whether it may continue, from Prefect's flow runs (how many retries in a row) and the run's record
(whether the same failure came twice without a new commit). If not, the message of its final state has the words
NO_RETRY, which the automation excludes.
"""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from uuid import UUID

from prefect import State, flow_engine, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Failed

from penstock.flows.config import PostTrainConfig
from penstock.flows.options.argv import check_run_name
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.runs import driver_lease, open_store
from penstock.storage.commit import RunKeys
from penstock.storage.errors import InputError, RunError, check_rules
from penstock.storage.history.run_record import read_starts
from penstock.storage.leases import Lease
from penstock.storage.store import Store, read_commits

RETRIES = "PENSTOCK_RETRIES"  # variable of flow runs that the automation has started: how many may follow each other
TAG = "retry:"  # begins the tag of such a flow run
NO_RETRY = "(no retry)"  # in the message of a failed state: the automation does not run the deployment again
POLL = 2.0  # seconds

# Prefect (3.8) kills a flow run that cannot renew the concurrency slot of its deployment, for instance after an outage
# of the server, or a pause of the machine, of a few minutes. The slot only delays the next start: the run's lease
# decides who drives the run. So a failed renewal is only logged.
flow_engine.maintain_concurrency_lease = lambda lease, seconds, **_: maintain_concurrency_lease(lease, seconds)


class AlreadyDone(Exception):
    """Another process has completed the start that a retry repeats."""


def retried(function: Callable[[PostTrainConfig], State[None]]) -> Callable[[PostTrainConfig], State[None]]:
    """Decorate the function of a flow that drives a run. Only starts of a deployment behave differently."""

    @functools.wraps(function)
    def call(config: PostTrainConfig) -> State[None]:
        try:
            return function(config)
        except AlreadyDone as reason:
            return Completed(message=str(reason))
        except InputError as error:
            if deployment.id is None:
                raise
            return Failed(message=f"{error} {NO_RETRY}", data=error)

    return call


@contextmanager
def driving(run: RunConfig) -> Iterator[Lease]:
    """Hold the lease of the run's driver during the block.

    A command is refused while another process of this machine drives the run. A start of a deployment waits: a driver
    whose flow run is marked as crashed may be alive, after a pause of its laptop, and then continues; the lease of one
    that was lost with its machine expires. A retry that may not continue ends here, with RunError or AlreadyDone.
    """
    store, keys, waited = open_store(run, probe=False), RunKeys(check_run_name(run.run)), set[str]()

    def wait(driver: str) -> None:
        process = driver.partition(" (")[0]
        if process not in waited:
            get_run_logger().warning("run %s is driven by %s; waiting until that process ends", run.run, process)
        waited.add(process)
        time.sleep(POLL * random.uniform(0.5, 1.5))  # of two that wait for each other, one looks first

    with driver_lease(store, keys, None if deployment.id is None else wait) as lease:
        if allowed := os.environ.get(RETRIES) if deployment.id else None:
            number, began = count_retries(int(allowed))
            check_retry(store, keys, number, int(allowed), began=began, has_waited=bool(waited))
            get_run_logger().info("retry %d of %s; the run resumes after its last committed stage", number, allowed)
        yield lease


def count_retries(allowed: int) -> tuple[int, float]:
    """Return how many starts of this deployment in a row the automation has made, this one included, at most
    `allowed` + 1, and when the start before them began, in seconds since the epoch. Tag this flow run with the
    number."""
    with get_client(sync_client=True) as client:
        newest: list[FlowRun] = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[UUID(deployment.id)])),
            flow_run_filter=FlowRunFilter(start_time=FlowRunFilterStartTime(is_null_=False)),
            sort=FlowRunSort.START_TIME_DESC,
            limit=allowed + 2,
        )
        number = sum(1 for _ in takewhile(lambda run: RETRIES in (run.job_variables or {}).get("env", {}), newest))
        existing = client.read_flow_run(UUID(flow_run.id)).tags
        client.update_flow_run(UUID(flow_run.id), tags=[*existing, f"{TAG}{min(number, allowed)}/{allowed}"])
    first = newest[: number + 1][-1].start_time
    assert first is not None, "the filter selects flow runs with a start time"
    return min(number, allowed + 1), first.timestamp()


def check_retry(store: Store, keys: RunKeys, number: int, allowed: int, *, began: float, has_waited: bool) -> None:
    """Check that retry `number` of a run may continue: raises RunError, or AlreadyDone if the run's last start has
    completed since the time `began`, at which the start that is retried began. `has_waited`: for another driver."""
    starts = read_starts(store, keys)[-2:]
    end = starts[-1][1] if starts else None
    if end is not None and end.outcome == "FINISHED" and starts[-1][0].at >= began:
        raise AlreadyDone("the start that crashed was completed by another process, or continued after a pause")
    failures = ["killed" if end is None else end.error for _, end in starts]
    comparable = {re.sub(r"\d+", "#", failure) for failure in failures}  # without process ids, ports and times
    is_same = len(starts) == 2 and len(comparable) == 1 and "" not in comparable
    same = "".join(failures[-1:])
    rules: list[tuple[object, str]] = [
        (
            number > allowed,
            f"the run is not complete after {allowed} retries (--retries {allowed}); the next start resumes it",
        ),
        (
            has_waited and end is not None and end.outcome == "STOPPED",
            "the run was resumed by another process and stopped on request; the next start resumes it",
        ),
        (
            is_same and all(commit.created_at < starts[1][0].at for commit in read_commits(store, keys)),
            f"the last two starts ended in the same way ({same}) without a new commit: repair the cause first",
        ),
    ]
    check_rules(rules, RunError)
