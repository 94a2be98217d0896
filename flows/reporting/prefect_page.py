"""Publish the results of a run: its HTML report in the store, and its Prefect pages (tags, messages of final states,
one artifact with the reward curve and links).

This module also ensures that no flow run or task run stays "Running" on the Prefect server after its process has ended.
`report_end` gives them a final state, in the process itself or in the worker that started it. If neither can, the next
start of the run does (`crash_runs_of_killed_drivers`).
"""

from __future__ import annotations

import base64
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from penstock.flows.inspect.report import make_report
from penstock.flows.reporting.observer import Observer, ThreadObserver
from penstock.flows.runtime.child_process import http_answers
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.prefect_api import wait_for_api
from penstock.flows.runtime.retries import TAG
from penstock.flows.runtime.runs import ActiveRun, open_store
from penstock.flows.runtime.signals import patience_after
from penstock.storage.commit import Commit, RunKeys, evaluation_rewards, model_title, training_rewards
from penstock.storage.history.run_record import list_starts, read_starts
from penstock.storage.leases import describe_live_drivers
from penstock.storage.secrets import redact
from penstock.storage.store import Store, committed_prefixes, read_commits
from penstock.storage.tracking.delivery import RunTracking, read_committed

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas import FlowRun, TaskRun

# ---- the report ------------------------------------------------------------------------------------------------------

MAX_SAMPLES = 2000  # fewer than `penstock report` shows: the end of a run waits for the report
TIMEOUT = 30.0  # seconds


class FinalReport(Observer):
    """Writes the report of the run when a flow of the run ends, unless it was stopped on request, and sends the report
    to the trackers."""

    def __init__(self, run: ActiveRun, display: Display, tracking: RunTracking) -> None:
        self.run = run
        self.display = display
        self.tracking = tracking
        self.written = False

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        run = self.run
        if not run.writes_report(kind) or not committed_prefixes(run.store, run.keys):
            return
        content = write_final_report(run.store, run.keys, self.display.note)
        if content is not None:
            self.written = True
            self.tracking.record_report(run.keys.report, content)
            self.display.note(f"report: {run.store.path(run.keys.report)}")


def write_final_report(store: Store, keys: RunKeys, note: Callable[[str], object]) -> bytes | None:
    """Write the report of a run to the store, over an earlier report, and return its content. If writing fails or takes
    longer than TIMEOUT, print the reason with `note` and return None; the run is not affected."""
    pages: list[bytes] = []
    problems: list[str] = []

    def write() -> None:
        try:
            page = make_report(store, keys.run, MAX_SAMPLES).encode()
            store.replace(keys.report, page)
            pages.append(page)
        except Exception as error:  # whatever is wrong with the report, it must not fail the run
            problems.append(redact(f"{type(error).__name__}: {str(error)[:200]}"))

    thread = threading.Thread(target=write, name="report", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if pages:
        return pages[0]
    reason = problems[0] if problems else f"not written within {TIMEOUT:.0f} s"
    note(f"the report of the run is missing ({reason}); `penstock report {keys.run}` writes it")
    return None


# ---- the page --------------------------------------------------------------------------------------------------------

REWRITE_SECONDS = 10.0  # minimum time between two rewrites of the artifact during a run
REPORT_TIMEOUT = 3.0  # seconds to wait for the last task states of this process, which Prefect sends asynchronously
_ACTIVE = [StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]


class PrefectPage(ThreadObserver):
    """Names and tags the flow run on the Prefect server, and keeps an artifact about the run there, which a thread
    rewrites after commits. Flow runs of the same run write to the same artifact key. A failure is printed and does not
    fail the run."""

    def __init__(self, run: ActiveRun, display: Display, tracking: RunTracking, report: FinalReport) -> None:
        super().__init__("prefect-page", REPORT_TIMEOUT)
        self.run = run
        self.display = display
        self.tracking = tracking
        self.report = report
        self._commits: dict[str, Commit] = {}
        self._changed = threading.Event()
        self._flow_run = UUID(flow_run.id)  # the thread has no flow-run context
        self._name = run.keys.run  # of the flow run, without the result
        self._id: UUID | None = None  # id of the artifact; None before it is created
        # "retry 1 of 3, " if Prefect started this flow run after a crash (penstock deploy --retries)
        self._retry = ""

    def on_commit(self, key: str, commit: Commit, is_new: bool) -> None:
        self._commits[key] = commit.model_copy(update={"state": {}})  # without the samples
        self._changed.set()

    def __enter__(self) -> Self:
        """Name and tag the flow run, create the artifact, and mark earlier flow runs whose driver was killed as
        crashed."""
        run, config = self.run, self.run.config
        tags = [f"run:{run.keys.run}", f"model:{model_title(config.convert.hf_checkpoint)}"]
        if config.run.generates_ahead:
            tags.append(f"async:{config.run.async_mode}")
        if config.train.loss_type == "policy_loss":
            tags.append(f"algorithm:{config.train.advantage_estimator}")
        # all log records but the line at the end of a successful task
        logging.getLogger("prefect.task_runs").addFilter(
            lambda record: record.levelno > logging.INFO or record.funcName != "log_finished_message"
        )
        committed = read_committed(run.store, run.keys)
        self.display.add_earlier([record.commit for record in committed])
        self._commits = {record.key: record.commit.model_copy(update={"state": {}}) for record in committed}
        try:
            with get_client(sync_client=True) as client:
                # Task runs are not tagged, because Prefect would call the server for each of their tags.
                existing = client.read_flow_run(self._flow_run).tags
                self._name = f"{run.keys.run} #{len(list_starts(run.store, run.keys)) + 1}"
                client.update_flow_run(self._flow_run, name=self._name, tags=sorted({*existing, *tags}))
                retry = next((tag.removeprefix(TAG) for tag in existing if tag.startswith(TAG)), "")
                self._retry = f"retry {retry.replace('/', ' of ')}, " if retry else ""
            crash_runs_of_killed_drivers(run.store, run.keys, self._flow_run, own_lease=run.lease_key)
        except HTTPError as error:
            self.display.note(
                f"a request to Prefect failed ({type(error).__name__}): this flow run may lack its tags, and killed "
                "flow runs may still be shown as running"
            )
        self._publish(f"{self._retry}running")
        return super().__enter__()

    def run_thread(self) -> None:
        """Rewrite the artifact after commits, until the flow ends."""
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while not self.ended.wait(REWRITE_SECONDS):
                if self._changed.is_set() and http_answers(f"{PREFECT_API_URL.value()}/health"):
                    self._changed.clear()
                    progress = describe_progress(list(self._commits.values()), self.run.started_at)
                    self._publish(f"{self._retry}running: {progress}")

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        super().__exit__(kind)  # first, because the thread's last rewrite might replace the results
        if wait_for_api(self.display.note, patience_seconds=patience_after(kind)):
            self._publish(self._retry + describe_progress(list(self._commits.values()), self.run.started_at))

    def _publish(self, progress: str) -> None:
        """Create the artifact with the description `progress`, or replace its content and description. Add the newest
        result of this start to the flow run's name."""
        run, page, commits = self.run, self.tracking.deliveries[0].page, list(self._commits.values())
        links = {"MLflow": page or redact(self.display.tracking_uri), "store": run.store.uri}
        if self.report.written:
            links["report"] = run.store.path(run.keys.report)
            if page:
                links["report in MLflow"] = page.replace("/model-metrics?", "/artifacts/report.html?")
        svg = reward_curve_svg(training_rewards(commits), evaluation_rewards(commits))
        markdown = run_page(run.keys.run, self.display.summary(commits), links, svg)
        try:
            if self._id is None:
                key = f"run-{re.sub('[^a-z0-9]+', '-', run.keys.run.lower()).strip('-')}"
                self._id = create_markdown_artifact(markdown, key=key, description=progress)  # type: ignore[assignment]
                return
            new = [commit for commit in commits if commit.created_at >= run.started_at]
            new.sort(key=lambda commit: (commit.kind == "step", commit.kind == "rollout", commit.created_at))
            result = next(filter(None, map(self.display.result, reversed(new))), "")
            with get_client(sync_client=True) as client:
                client.update_flow_run(self._flow_run, name=f"{self._name}, {result}" if result else self._name)
                client.update_artifact(self._id, ArtifactUpdate(data=markdown, description=progress))
        except HTTPError as error:
            self.display.note(f"the results could not be written to the Prefect page ({type(error).__name__}: {error})")


# ---- what the artifact shows -----------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN = 720, 240, 44  # of the curve, in pixels
_COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444")


def describe_progress(commits: Sequence[Commit], since: float = 0.0) -> str:
    """Describe the commits that were made at or after `since` (seconds since the epoch), for instance "rounds 6 to 8,
    reward 0.650 -> 0.770, checkpoint 8". `commits` are those of the run in the order of their creation."""
    new = [commit for commit in commits if commit.created_at >= since]
    steps = [commit for commit in new if commit.kind == "step"]
    parts = []
    if steps:
        first, last = steps[0].index, steps[-1].index
        parts.append(f"round {first}" if first == last else f"rounds {first} to {last}")
        name, values = "reward", training_rewards(commits)
        if not values:  # supervised fine-tuning
            name, values = "loss", {c.index: c.summary["train/loss"] for c in steps if "train/loss" in c.summary}
        if first in values and last in values:
            parts.append(f"{name} {_change(values[first], values[last])}")
    for task, scores in evaluation_rewards(new).items():
        parts.append(f"eval {task} {_change(scores[min(scores)], scores[max(scores)])}")
    newest = {commit.kind: commit.index for commit in new}
    parts += [f"{kind} {newest[kind]}" for kind in ("checkpoint", "export") if kind in newest]
    return ", ".join(parts) or "no new stage was committed"


def run_page(title: str, rows: Mapping[str, str], links: Mapping[str, str], svg: str | None) -> str:
    """Return the Markdown of a run's artifact: the reward curve (`svg`), the results (`rows`: title -> text) and links
    (title -> URL, path or command)."""
    lines = [f"# {title}", ""]
    if svg is not None:  # Prefect's pages show images with data URIs
        lines += [f"![reward by round](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})", ""]
    marked = {name: f"[{to}]({to})" if to.startswith("http") else f"`{to}`" for name, to in links.items() if to}
    for table in (rows, marked):
        if table:
            cells = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in table.items()]
            lines += ["| | |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def reward_curve_svg(training: Mapping[int, float], evaluations: Mapping[str, Mapping[int, float]]) -> str | None:
    """Return training rewards (round -> reward) and evaluation rewards (data set -> policy version -> reward) as an SVG
    image; None if there are no rewards."""
    series = {"training": training} if training else {}
    series |= {f"eval {task}": scores for task, scores in evaluations.items()}
    if not series:
        return None
    rounds = [r for values in series.values() for r in values]
    rewards = [reward for values in series.values() for reward in values.values()]
    left, right, low, high = min(rounds), max(rounds), min(rewards), max(rewards)

    def place(r: int, reward: float) -> tuple[str, str]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * (r - left) / ((right - left) or 1)
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (reward - low) / ((high - low) or 1)
        return f"{x:.1f}", f"{y:.1f}"

    def text(x: float, y: float, content: str, more: str = "") -> str:
        escaped = content.replace("&", "&amp;").replace("<", "&lt;")
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escaped}</text>'

    bottom = _HEIGHT - _MARGIN
    shapes = [f'<path d="M{_MARGIN},{_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>']
    shapes += [text(4, _MARGIN + 4, f"{high:.3g}"), text(4, bottom, f"{low:.3g}")]
    shapes += [text(_MARGIN, bottom + 18, f"round {left}"), text(_WIDTH - _MARGIN, bottom + 18, str(right))]
    for number, (name, values) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(r, reward) for r, reward in sorted(values.items())]
        line = " ".join(f"{x},{y}" for x, y in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if name != "training" or len(points) < 3:
            shapes += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        shapes.append(text(_MARGIN + 130 * number, 20, name, f'style="fill:{colour}"'))
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#666"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(shapes)}</svg>'


def _change(first: float, last: float) -> str:
    return f"{first:.3f}" if first == last else f"{first:.3f} -> {last:.3f}"


# ---- final states ----------------------------------------------------------------------------------------------------


def crash_runs_of_killed_drivers(store: Store, keys: RunKeys, flow_run_id: UUID, *, own_lease: str) -> int:
    """Mark as crashed the flow runs and task runs that killed drivers of the run left in the state "Running", including
    task runs of earlier attempts (`prefect flow-run retry`) of the caller's own flow run. Return their number.

    Does nothing while another driver of the run than the caller, which has the lease `own_lease`, is alive. Flow runs
    that the Prefect server does not have are skipped.
    """
    if describe_live_drivers(store, keys, own_lease=own_lease):
        return 0
    ids = {parse_flow_run_id(start.flow_run) for start, end in read_starts(store, keys) if end is None}
    rounds = len(store.committed_indices(f"{keys.prefix}/steps"))
    message = f"the driver was killed after {rounds} rounds; flow run {flow_run_id} resumes from there"
    return sum(crash_flow_run(id, message, also_flow_run=id != flow_run_id) for id in ids | {flow_run_id} if id)


def crash_flow_run(flow_run_id: UUID, message: str, *, also_flow_run: bool = True) -> int:
    """Mark as crashed all task runs of a flow run that have no final state and, with `also_flow_run`, the flow run
    itself. Return how many runs were marked: 0 if the Prefect server does not have the flow run."""
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
    """Return the task runs of a flow run that have no final state, at most 200, the server's limit for one request."""
    states = TaskRunFilterState(type=TaskRunFilterStateType(any_=_ACTIVE))
    flow_runs = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    active: list[TaskRun] = client.read_task_runs(
        flow_run_filter=flow_runs, task_run_filter=TaskRunFilter(state=states), limit=200
    )
    return active


def parse_flow_run_id(text: str) -> UUID | None:
    """Return the id at the end of a flow run's URL, or the id that `text` is; None if it contains no id."""
    try:
        return UUID(text.rpartition("/")[2])
    except ValueError:
        return None


def report_end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Add to the message of a failed or crashed flow run what it has committed and where the next start resumes, and
    mark its unfinished task runs as crashed. All flows have this hook: Prefect calls it in the process of the flow run
    or, if that process was killed, in the worker that started it."""
    if not http_answers(f"{PREFECT_API_URL.value()}/health"):
        return
    config = validate_config(flow_run.parameters["config"])
    store, keys = open_store(config.run, probe=False), RunKeys(config.run.run)
    since = [start.at for start, _ in read_starts(store, keys) if parse_flow_run_id(start.flow_run) == flow_run.id]
    if not since:  # the flow run failed before the run was opened
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
