"""The state that the stages of one flow run share: the run, its processes, its observers, the terminal."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from prefect import State, get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run, task_run

from penstock.engines import scratch
from penstock.engines.local_ray import ClusterLost
from penstock.engines.placement import NodeLost
from penstock.flows.config import PostTrainConfig
from penstock.flows.debug_options import gpu_flow
from penstock.flows.inspect.watch import serving_run
from penstock.flows.options.argv import flag_of_field
from penstock.flows.reporting.observer import Observer, Observers
from penstock.flows.reporting.observers import add_observers
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.prefect_api import OWN_SERVER
from penstock.flows.runtime.preflight import config_warnings, plan_of, preflight
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.publishing import PolicyEngines
from penstock.flows.runtime.retries import driving
from penstock.flows.runtime.runs import ActiveRun, completion_of, missing_fork_checkpoint, open_active_run
from penstock.flows.runtime.signals import describe_cleanup, patience_after, stop_signals
from penstock.flows.terminal.lines import describe_commit
from penstock.stages.rewards.grading import Grader
from penstock.stages.rollout.group import make_grader
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.history.run_record import record_completion
from penstock.storage.preemption import Preempted, StopRequest
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.tracker import tracking_directory
from penstock.storage.tracking.trackers import tracked_run, tracking_uris
from penstock.storage.web.login import page_link

_NO_PAGE = "`penstock up` shows this run, also after its end"
EVALUATION_END_TIMEOUT = 60.0  # seconds for an evaluation in another thread to end after a failure


class Session:
    """One execution of a flow for a run. `open_session` makes one.

    Attributes:
        started_stages: name of a task run of this flow run -> a state with the id of the task run. Later stages pass it
            to Prefect, which draws an arrow between the two stages.
        stage_results: results of stages. Prefect identifies a result, and the strings in it, by `id()`, so no result is
            freed: a later object could get the same id.
        stage_messages: id of an active task run -> name and message of the state that it will end with.
    """

    def __init__(
        self,
        run: ActiveRun,
        display: Display,
        tracking: RunTracking,
        observers: Observers,
        processes: Processes,
        stop: StopRequest,
    ) -> None:
        self.run = run
        self.config = run.config
        self.display = display
        self.tracking = tracking
        self.observers = observers
        self.processes = processes
        self.stop = stop
        self.engines = PolicyEngines(processes, lambda *published: observers.tell(Observer.on_publish, *published))
        self.started_stages: dict[str, State[Any]] = {}
        self.stage_results: list[Any] = []
        self.stage_messages: dict[uuid.UUID, tuple[str, str]] = {}
        self.saving: PrefectFuture[Any] | None = None  # the task that is saving a checkpoint in another thread

    # ---- progress of the run -----------------------------------------------------------------------------------------

    def remaining_rounds(self) -> Iterator[int]:
        """Yield the numbers of the rounds to run. A resumed run begins with its last trained round, because the
        checkpoint or the evaluation after that round may be missing."""
        done, total = self.run.num_trained_rounds(), self.run.num_rounds
        if done:
            rest = "resuming" if done < total else "nothing is left to train"
            text = f"{rest}: {done} of {total} rounds are committed{self.run.describe_earlier_end()}"
            self.display.note(text)
            get_run_logger().info(text)
        yield from range(max(0, done - 1), total)

    def start_trainer(self) -> None:
        """Start the trainer's processes, so that they import torch and Megatron (5-15 s) while the model is converted;
        they load no model yet. Start none if all rounds are trained, or if the run is a fork that must first replay
        rounds of its parent with another trainer."""
        record = self.run.record
        if self.run.num_trained_rounds() < self.run.num_rounds and record:
            try:
                if missing_fork_checkpoint(self.run.store, record) is None:
                    self.processes.trainer.start_processes()
            except (ClusterLost, NodeLost, TimeoutError) as error:
                # The stage `restore` starts the trainer, with retries.
                self.display.note(f"the trainer was not started early ({error}); it will start after the conversion")

    def report_commit(self, prefix: str, commit: Commit) -> Commit:
        """Send a stage's commit to the trackers, print it, tell the observers about it, and return it."""
        key = commit_key(prefix)
        is_new = self.tracking.record_commit(key, commit)
        if line := self.display.print_commit(commit) if is_new else "":
            get_run_logger().info(line.strip())  # for the Prefect page
        self.observers.tell(Observer.on_commit, key, commit, is_new)
        text = describe_commit(commit, self.run.num_rounds)
        self.set_stage_message(line or (text if is_new else f"committed before: {text}"), self.display.result(commit))
        return commit

    @contextmanager
    def running_stage(self, name: str, rollout_id: int | None) -> Iterator[None]:
        """Show a stage in the terminal during the block, and print a failure of the block."""
        self.observers.tell(Observer.on_stage, name, rollout_id)
        with self.display.stage(name, rollout_id):
            try:
                yield
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                outcome = f"failed ({reason}); its inputs will be restored from the store before retrying"
                if isinstance(error, Preempted | KeyboardInterrupt):
                    outcome = "cancelled on request; it will rerun on resume"
                self.display.note(f"{name} {outcome}")
                raise

    def set_stage_message(self, text: str, name: str = "") -> None:
        """Set what Prefect shows when the current stage has completed: a message that says what the stage has done, and
        the name of its final state, by default "Completed"."""
        self.stage_messages[uuid.UUID(task_run.id)] = (name or "Completed", " ".join(text.split()))

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being saved, if any, is committed. Raises the exception of the saving task.

        A stage that changes the trainer's weights must call this first.
        """
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def wait_for_checkpoint_until_deadline(self) -> None:
        """Wait for the checkpoint that is being saved, but not beyond the grace period or --train-timeout."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait(timeout=max(0.0, min(self.stop.seconds_left, self.config.train.train_timeout)))

    # ---- inputs of rollouts ------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> PromptSource:
        """Return the prompts of --prompt-data."""
        return PromptSource.open(self.config.rollout)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """Return the model's tokenizer."""
        rollout = self.config.rollout
        return PromptTokenizer(
            self.config.convert.hf_checkpoint,
            apply_chat_template=rollout.apply_chat_template,
            template_options=rollout.apply_chat_template_kwargs,
        )

    @cached_property
    def grader(self) -> Grader:
        """Return the grader, which runs the reward function in processes that are kept until the end of the session."""
        return self.observers.enter_context(make_grader(self.config.rollout_with_args))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Stop the processes, and record how this execution of the run ended.

        Args:
            error: the exception that ended the flow; None if it ended normally.
        """
        kind = None if error is None else type(error)
        stop_signals.begin_cleanup()
        if kind is not None and not issubclass(kind, Preempted):
            scratch.keep_temp_directory_at_exit()  # the directory contains the logs of Ray and the engines
        self.display.panel.phase = describe_cleanup(
            kind, is_requested=self.stop.requested, writes_report=self.run.writes_report(kind)
        )
        self.display.note_wait(self.display.panel.phase)
        self.wait_for_checkpoint_until_deadline()
        if kind is not None:  # cancel an evaluation in another thread, and wait for its end
            self.stop.request(grace_seconds=0.0)
            self.engines.turns.wait_until(
                lambda schedule: schedule.evaluated is None, patience_after(kind) or EVALUATION_END_TIMEOUT
            )
        joules = self.processes.used_joules()
        self.processes.stop()
        self.display.close()
        try:
            self.run.record_end(error, joules)
        except (StoreError, OSError) as problem:  # for instance a full disk
            self.display.note(
                f"the store has no record of how this start of the run ended ({problem}); its costs are counted up to "
                "its last commit"
            )


@contextmanager
def open_session(flow: str, config: PostTrainConfig) -> Iterator[Session]:
    """Check a config, and yield the session that executes its run. The processes that the session has started are
    stopped at the end of the block."""
    stop = StopRequest()
    try:
        with driving(config.run) as lease:
            plan = plan_of(flow, config)
            if plan is not config:  # otherwise the command has made this plan and checked it
                preflight(plan, own_lease=lease.key)
            run = open_active_run(plan, lease)
            with stop_signals.session(stop, run.config.run.grace_period):
                with Observers() as observers:
                    session = _open(run, observers, stop)
                    try:
                        yield session
                    except BaseException as error:
                        session.end(error)
                        raise
                    session.end(None)
                if any(delivery.num_waiting() for delivery in session.tracking.deliveries):
                    return  # records for trackers are not delivered yet: the next start must run to deliver them
                try:
                    record_completion(run.store, run.keys, run.start, completion_of(run.store, run.config))
                except (StoreError, OSError) as error:
                    session.display.note(
                        f"the store has no record that the run is complete ({error}); the next start checks its stages"
                    )
    except Preempted as error:
        raise TerminationSignal(signal.SIGTERM) from error  # Prefect marks the flow run as crashed or cancelled


def _open(run: ActiveRun, observers: Observers, stop: StopRequest) -> Session:
    """Create the session of a run, record that an execution of the run starts, and add the run's observers to
    `observers`."""
    flow, config, uris = run.flow, run.config, tracking_uris(run.store, run.config.run)
    # The link is read here, because other threads have no flow-run context. A Prefect server that this process started
    # ends with it, so the link would not work afterwards.
    page = "" if OWN_SERVER.is_set() else flow_run.ui_url or ""
    flow_run_link = page_link(page)  # this link also logs the browser in
    watch = observers.enter_context(serving_run(run.store, run.keys.run))
    pages = {"watch": watch, "prefect": flow_run_link or _NO_PAGE}
    display = Display(run.keys.run, flow, config, run.store.uri, uris[0], pages)
    observers.callback(display.close)
    display.start()
    display.on_progress = lambda: observers.tell(Observer.on_progress)
    observers.enter_context(display.forward_logs("penstock.engines", "penstock.stages", "penstock.storage"))
    assert run.record is not None, "`open_run` has created it"
    tracking = RunTracking(
        tracked_run(run.store, run.keys, run.record, config.run.mlflow_trace_samples),
        tracking_directory(run.store, run.keys.run),
        uris,
        config.model_dump(mode="json"),
    ).start()
    tracking.record_missing_commits(run.store, run.keys)
    processes = Processes(run, display.note, has_trainer=gpu_flow(config.flow, config).trains)
    add_observers(observers, run, display, tracking, processes)
    run.record_start(page or str(flow_run.id or ""))
    session = Session(run, display, tracking, observers, processes, stop)

    def links() -> dict[str, str]:  # "Prefect" or name of a tracker -> URL of its page about this run

        pages = {d.name: page_link(d.page or "") for d in tracking.deliveries if d.problem is None}
        return {title: url for title, url in {"Prefect": flow_run_link, **pages}.items() if url}

    display.panel.links = links
    display.panel.engines = lambda: processes.describe_engines(session.engines.turns.schedule.in_engines)
    for warning in config_warnings(config):
        display.note(warning)
    for name in run.changed_functions():
        since = f"rounds from {run.num_trained_rounds()} on use it"
        display.warn(f"the file of {flag_of_field(name)} has changed since the last start: {since}")
    return session
