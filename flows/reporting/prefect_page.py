"""What Prefect's pages show of a run: tags, the messages of final states, one artifact with the curve and links.

Also: no flow run and no task run remains "Running" after its process has ended. A process that can still do so reports
its own end (`report_end`, also called by a worker whose flow run was killed); otherwise the next start of the run does.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from httpx import HTTPError
from prefect import State
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed, StateType

from penstock.flows.config import validate_config
from penstock.flows.reporting.final_report import FinalReport
from penstock.flows.reporting.observer import Observer
from penstock.flows.reporting.progress import (
    describe_progress,
    evaluation_rewards,
    reward_curve_svg,
    run_page,
    training_rewards,
)
from penstock.flows.runtime.child_process import http_answers
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.prefect_api import wait_for_api
from penstock.flows.runtime.runs import ActiveRun, open_store
from penstock.flows.runtime.signals import patience_after
from penstock.storage.commit import Commit, RunKeys, attempt_in_path
from penstock.storage.history.run_record import read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.secrets import redact
from penstock.storage.store import Store, read_commits
from penstock.storage.tracking.delivery import RunTracking

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas import FlowRun, TaskRun

REPORT_TIMEOUT = 3.0  # seconds to wait for the last task states of this process, which Prefect sends asynchronously
_ACTIVE = [StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for Prefect's line at the end of a successful task."""
    return record.levelno > logging.INFO or record.funcName != "log_finished_message"


def model_title(path: str) -> str:
    """Return a short name of a model: RUN/VERSION for the export or checkpoint of a run, else the directory's name."""
    parts = (attempt_in_path(path) or "").split("/")
    return f"{parts[1]}/{int(parts[3])}" if parts[0] == "runs" else PurePath(path).name


class PrefectPage(Observer):
    """The pages of this flow run: tags, and the artifact of the run, whose key all starts of the run share. A failure
    is printed and does not fail the run.

    Args:
        run: the run.
        display: the terminal, which prints the same results.
        tracking: the trackers, to whose pages the artifact has links.
        report: the report that is written at the end.
    """

    def __init__(self, run: ActiveRun, display: Display, tracking: RunTracking, report: FinalReport) -> None:
        self.run = run
        self.display = display
        self.tracking = tracking
        self.report = report
        self._commits: list[Commit] | None = None
        self._id: UUID | None = None  # of the artifact

    def on_results(self, commits: list[Commit]) -> None:
        self._commits = commits

    def __enter__(self) -> Self:
        """Tag the flow run, publish the artifact, and end the flow runs that killed drivers have left as running."""
        run, config = self.run, self.run.config
        tags = [f"run:{run.keys.run}", f"model:{model_title(config.convert.hf_checkpoint)}"]
        if config.run.generates_ahead:
            tags.append(f"async:{config.run.async_mode}")
        if config.train.loss_type == "policy_loss":
            tags.append(f"algorithm:{config.train.advantage_estimator}")
        logging.getLogger("prefect.task_runs").addFilter(is_worth_a_line)
        commits, flow_run_id = read_commits(run.store, run.keys), UUID(flow_run.id)
        self.display.add_earlier(commits)
        self._publish("running", commits)
        try:
            with get_client(sync_client=True) as client:
                # Not tags of the task runs: for each tag of a task run Prefect calls the server.
                existing = client.read_flow_run(flow_run_id).tags
                client.update_flow_run(flow_run_id, tags=sorted({*existing, *tags}))
            crash_runs_of_killed_drivers(run.store, run.keys, flow_run_id, own_lease=run.lease_key)
        except HTTPError as error:
            self.display.note(f"the flow run's tags or earlier flow runs are not updated ({type(error).__name__})")
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if wait_for_api(self.display.note, patience_seconds=patience_after(kind)):
            commits = self._commits or read_commits(self.run.store, self.run.keys)
            self._publish(describe_progress(commits, self.run.started_at), commits)

    def _publish(self, progress: str, commits: list[Commit]) -> None:
        """Create the artifact, or replace its content."""
        run, page = self.run, self.tracking.deliveries[0].page
        links = {"MLflow": page or redact(self.display.tracking_uri), "store": run.store.uri}
        if self.report.written:
            links["report"] = run.store.path(run.keys.report)
            if page:
                links["report in MLflow"] = page.replace("?", "/artifacts/report.html?")
        svg = reward_curve_svg(training_rewards(commits), evaluation_rewards(commits))
        markdown = run_page(run.keys.run, progress, self.display.summary(commits), links, svg)
        try:
            if self._id is None:
                key = f"run-{re.sub('[^a-z0-9]+', '-', run.keys.run.lower()).strip('-')}"
                self._id = create_markdown_artifact(markdown, key=key, description=f"Run {run.keys.run}")  # type: ignore[assignment]
                return
            with get_client(sync_client=True) as client:
                client.update_artifact(self._id, ArtifactUpdate(data=markdown))
        except HTTPError as error:
            self.display.note(f"the results could not be written to the Prefect page ({type(error).__name__}: {error})")


def crash_runs_of_killed_drivers(store: Store, keys: RunKeys, flow_run_id: UUID, *, own_lease: str) -> int:
    """Mark what killed drivers of the run have left as running as crashed: their flow runs and all task runs of them.

    Does nothing while another driver of the run is alive. Flow runs of other Prefect servers are skipped.

    Args:
        store: the run's store.
        keys: the run's keys.
        flow_run_id: the caller's flow run, whose earlier attempts (`prefect flow-run retry`) are included.
        own_lease: key of the caller's driver lease.

    Returns:
        the number of flow runs and task runs that were marked.
    """
    if describe_live_drivers(store, keys, own_lease=own_lease):
        return 0
    ids = {parse_flow_run_id(start.flow_run) for start, end in read_starts(store, keys) if end is None}
    rounds = len(store.committed_indices(f"{keys.prefix}/steps"))
    message = f"the driver was killed after {rounds} rounds; flow run {flow_run_id} resumes from there"
    return sum(crash_flow_run(id, message, also_flow_run=id != flow_run_id) for id in ids | {flow_run_id} if id)


def crash_flow_run(flow_run_id: UUID, message: str, *, also_flow_run: bool = True) -> int:
    """Mark the task runs of a flow run that have no final state as crashed and, with `also_flow_run`, itself.

    Returns:
        the number of runs that were marked; 0 if the Prefect server does not have the flow run.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return 0
        active = read_active_task_runs(client, flow_run_id)
        for task_run in active:
            client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
        is_active = also_flow_run and (found.state is None or not found.state.is_final())
        if is_active:
            client.set_flow_run_state(flow_run_id, Crashed(message=message), force=True)
        return len(active) + is_active


def read_active_task_runs(client: Any, flow_run_id: UUID) -> list[TaskRun]:
    """Return the task runs of a flow run that have no final state, at most 200 (the server's limit)."""
    states = TaskRunFilterState(type=TaskRunFilterStateType(any_=_ACTIVE))
    flow_runs = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    active: list[TaskRun] = client.read_task_runs(
        flow_run_filter=flow_runs, task_run_filter=TaskRunFilter(state=states), limit=200
    )
    return active


def parse_flow_run_id(text: str) -> UUID | None:
    """Return the id in the URL or id of a flow run (`Start.flow_run`), or None if it has none."""
    try:
        return UUID(text.rpartition("/")[2])
    except ValueError:
        return None


def report_end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Add to the message of a failed or crashed flow run what it has committed and where the next start resumes, and
    give its remaining task runs a final state. A hook of the flows, which Prefect calls in the process of the flow run
    or, if that was killed, in that of the worker."""
    if not http_answers(f"{PREFECT_API_URL.value()}/health"):
        return
    config = validate_config(flow_run.parameters["config"])
    store, keys = open_store(config.run, probe=False), RunKeys(config.run.run)
    since = [start.at for start, _ in read_starts(store, keys) if parse_flow_run_id(start.flow_run) == flow_run.id]
    if not since:  # it failed before the run was opened
        return
    commits = read_commits(store, keys)
    rounds = sum(commit.kind == "step" for commit in commits)
    reason = (state.message or state.name or "").removeprefix("Flow run encountered an exception: ").rstrip(".")
    progress = describe_progress(commits, since[-1])
    message = f"{progress}; {reason}; the next start resumes after {rounds} rounds"
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, State(type=state.type, name=state.name, message=message), force=True)
        deadline = time.monotonic() + REPORT_TIMEOUT
        while read_active_task_runs(client, flow_run.id) and time.monotonic() < deadline:
            time.sleep(0.2)
        crash_flow_run(flow_run.id, "its flow run ended before this stage", also_flow_run=False)
