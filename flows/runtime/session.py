"""The state of one flow run: store, trackers, terminal output, and processes (processes.py)."""

from __future__ import annotations

import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from httpx import HTTPError
from prefect import State, get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run, task_run

from penstock.engines import scratch
from penstock.engines.local_ray import ClusterLost
from penstock.engines.placement import NodeLost
from penstock.engines.training import GIB, MemorySwitch
from penstock.engines.weights.fp8_blocks import fp8_weights
from penstock.flows.config import PostTrainConfig, config_hash
from penstock.flows.debug_options import gpu_flow
from penstock.flows.options.paths import with_absolute_paths
from penstock.flows.options.resolve import resolve_config
from penstock.flows.reporting.final_report import write_final_report
from penstock.flows.reporting.hang_detector import HangDetector
from penstock.flows.reporting.prefect_page import (
    RunArtifact,
    crash_runs_of_killed_drivers,
    keep_finished_lines_out_of_logs,
    model_title,
    tag_flow_run,
)
from penstock.flows.reporting.progress import (
    describe_progress,
    evaluation_rewards,
    reward_curve_svg,
    run_page,
    training_rewards,
)
from penstock.flows.reporting.prometheus import PrometheusEndpoint
from penstock.flows.reporting.system_metrics import SystemMetrics, sample_system
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.engine_options import device_counts
from penstock.flows.runtime.learning_signal import GROUP_RELATIVE, logprob_gap_warning, zero_gradient_warning
from penstock.flows.runtime.prefect_api import server_ends_with_process, wait_for_api
from penstock.flows.runtime.preflight import config_warnings, preflight
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.runs import (
    code_version,
    completion_of,
    keys_of_run,
    logs_of_run,
    open_run,
    open_store,
    read_existing_record,
)
from penstock.flows.runtime.schedule import with_target_rounds
from penstock.flows.runtime.signals import CLEANUP, describe_cleanup, stop_signals
from penstock.flows.terminal.lines import describe_commit
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.errors import RunError, StoreError
from penstock.storage.history.run_record import Start, login_name, record_completion, record_end, record_start
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.preemption import Preempted, StopRequest
from penstock.storage.secrets import redact
from penstock.storage.store import committed_prefixes, read_commits
from penstock.storage.tracking import tracking_directory
from penstock.storage.tracking.delivery import RunTracking, read_committed, read_cost_metrics
from penstock.storage.tracking.tracker import Committed
from penstock.storage.tracking.trackers import tracked_run, tracking_uris
from penstock.storage.web.login import page_link

if TYPE_CHECKING:
    from penstock.stages.rewards.grading import Grader
    from penstock.stages.rollout.prompts.source import PromptSource
    from penstock.stages.rollout.text.tokenizer import PromptTokenizer


_NO_PAGE = "`make up` shows this run, also after its end"
EVALUATION_END_TIMEOUT = 60.0  # seconds for an evaluation in another thread to end after a failure


def page_of_flow_run() -> tuple[str, str]:
    """Return the URL of this flow run's page and a link to it that logs a browser in; "" if the page's server ends with
    this process."""
    page = "" if server_ends_with_process() else flow_run.ui_url or ""
    return page, page_link(page)


class Session:
    """One execution of a flow for a run: a context manager that stops every process it started when the block ends."""

    def __init__(self, flow: str, config: PostTrainConfig) -> None:
        config = resolve_config(flow, config)
        preflight(flow, config)
        self.store = open_store(config.run)
        self.config = config = with_absolute_paths(with_target_rounds(self.store, config))
        self._entered = ExitStack()
        self._flow = flow
        self.keys = self._open_run(flow)
        self.stop = StopRequest()
        self.provenance: dict[str, Any] = {"config_hash": config_hash(config), "code_version": code_version()}
        self._stack = ExitStack()
        self._saving: PrefectFuture[Any] | None = None  # task of the checkpoint that is being saved
        self.started_stages: dict[str, State[Any]] = {}  # name of a task run of this flow run -> state with its id
        self._prometheus: PrometheusEndpoint | None = None
        self.stage_results: list[Any] = []  # kept: Prefect recognizes results and their strings by their addresses
        self.stage_messages: dict[uuid.UUID, str] = {}  # id of an active task run -> message of its final state
        uris = tracking_uris(self.store, config.run)
        page, self._flow_run_link = page_of_flow_run()  # here, because other threads do not know the flow run
        self.display = Display(
            self.keys.run, flow, config, self.store.uri, uris[0], prefect_page=self._flow_run_link or _NO_PAGE
        )
        record = read_existing_record(self.store, self.keys)
        self._age_at_start = max(0.0, time.time() - record.created_at)
        self._monotonic_start = time.monotonic()
        self.tracker = RunTracking(
            tracked_run(self.store, self.keys, record, config.run.mlflow_trace_samples),
            tracking_directory(self.store, self.keys.run),
            uris,
            config.model_dump(mode="json"),
        )
        self.tracker.record_missing_commits(self.store, self.keys)
        self._started_at = time.time()
        self._artifact = RunArtifact(self.keys.run, self.display.note)
        self._final_commits: list[Commit] | None = None
        self._open_prefect_page()
        trainer_devices, engine_devices, colocated = device_counts(flow, config)
        self._start = record_start(
            self.store,
            self.keys,
            Start(
                at=self._started_at,
                host=socket.gethostname(),
                user=login_name(),
                flow_run=page or str(flow_run.id or ""),
                code_version=code_version(),
                trainer_devices=trainer_devices,
                engine_devices=engine_devices,
                colocated=colocated,
            ),
        )
        self.processes = Processes(
            config,
            self.store,
            self.keys,
            self.provenance,
            self.display.note,
            self._record_publish,
            has_trainer=gpu_flow(flow, config) != "evaluate",
        )
        self.display.panel.links, self.display.panel.engines = self._links, self.processes.describe_engines
        for warning in config_warnings(flow, config):
            self.display.note(warning)

    def _open_run(self, flow: str) -> RunKeys:
        """Hold the lease that marks this process as the run's driver, until the session ends; create or check the run's
        record (`open_run`)."""
        lease = Lease(self.store, new_driver_lease_key(keys_of_run(self.config.run.run)))
        try:
            keys = open_run(self.store, flow, self.config, lease=lease)
        except BaseException:
            lease.release()
            raise
        self._entered.callback(lease.release)
        self._lease_key = lease.key
        return keys

    def _open_prefect_page(self) -> None:
        """Tag the flow run, publish the run's artifact, and end the flow runs that killed drivers have left as running.
        A failure is printed only."""
        config = self.config
        tags = [f"run:{self.keys.run}", f"model:{model_title(config.convert.hf_checkpoint)}"]
        if config.run.generates_ahead:
            tags.append(f"async:{config.run.async_mode}")
        if config.train.loss_type == "policy_loss":
            tags.append(f"algorithm:{config.train.advantage_estimator}")
        keep_finished_lines_out_of_logs()
        earlier = read_commits(self.store, self.keys)
        self.display.add_earlier(earlier)
        self._artifact.publish(self._describe_for_prefect("running", earlier))
        try:
            tag_flow_run(uuid.UUID(flow_run.id), tags)
            crash_runs_of_killed_drivers(self.store, self.keys, uuid.UUID(flow_run.id), own_lease=self._lease_key)
        except HTTPError as error:
            self.display.note(f"the flow run's tags or earlier flow runs are not updated ({type(error).__name__})")

    def _describe_for_prefect(self, progress: str, commits: list[Commit], *, has_report: bool = False) -> str:
        """Return the Markdown of the run's artifact."""
        page = self.tracker.deliveries[0].page
        links = {"MLflow": page or redact(self.display.tracking_uri), "store": self.store.uri}
        if has_report:
            links["report"] = self.store.path(self.keys.report)
            if page:
                links["report in MLflow"] = page.replace("?", "/artifacts/report.html?")
        rows = self.display.summary(commits)
        svg = reward_curve_svg(training_rewards(commits), evaluation_rewards(commits))
        return run_page(self.keys.run, progress, rows, links, svg)

    def _links(self) -> dict[str, str]:
        """Return title -> URL of the pages of this flow run in Prefect and of this run in the trackers."""
        pages = {d.name: page_link(d.page or "") for d in self.tracker.deliveries if d.problem is None}
        return {title: url for title, url in {"Prefect": self._flow_run_link, **pages}.items() if url}

    def __enter__(self) -> Session:
        self._entered.enter_context(stop_signals.session(self.stop, self.config.run.grace_period))
        self._entered.enter_context(
            self.display.forward_logs("penstock.engines", "penstock.stages", "penstock.storage")
        )
        self.display.on_progress = self._entered.enter_context(self._hang_detector()).moved
        if self.config.run.prometheus_port is not None:
            self._serve_metrics(self.config.run.prometheus_port)
        self._stack.enter_context(SystemMetrics(self._log_system_metrics, self.display.note, self._sample_system))
        return self

    def _serve_metrics(self, port: int) -> None:
        """Serve the metrics of the run to Prometheus until the run ends."""
        endpoint = self._stack.enter_context(PrometheusEndpoint(self.keys.run, port))
        for record in read_committed(self.store, self.keys):
            endpoint.update_from_record(record)
        self.tracker.on_metrics = endpoint.update
        self._prometheus = endpoint
        self.display.note(f"metrics for Prometheus: http://127.0.0.1:{endpoint.port}/metrics")

    def _hang_detector(self) -> HangDetector:
        """Return the hang detector of the run, whose files are in the run's logs, or in the temporary directory if the
        store is not local."""
        logs = logs_of_run(self.store, self.keys) or scratch.temp_base_directory()
        return HangDetector(self.config.run.hang_timeout, self.display.warn, logs)

    def _sample_system(self) -> dict[str, float]:
        """Return metrics of the driver's node, after showing them in the panel."""
        metrics = sample_system()
        self.display.panel.machine = metrics
        return metrics

    def _log_system_metrics(self, metrics: dict[str, float]) -> None:
        """Log metrics of the driver's node. Their step is the time since the run was created, in seconds, so that it
        increases over all starts."""
        seconds = int(self._age_at_start + time.monotonic() - self._monotonic_start)
        self.tracker.enqueue_metrics(f"system-{self._start}-{seconds}", metrics, step=seconds)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        stop_signals.begin_cleanup()
        if kind is not None and not issubclass(kind, Preempted):
            scratch.keep_temp_directory_at_exit()  # it has the logs of Ray and the engines
        was_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        was_stopped = kind is not None and issubclass(kind, Preempted)
        writes_report = self.config.run.report and not was_stopped
        self.display.show_phase(describe_cleanup(kind, is_requested=self.stop.requested, writes_report=writes_report))
        patience = CLEANUP / 4 if was_stopped or was_interrupted else None  # for each service
        self.wait_for_checkpoint_until_deadline()
        if kind is not None:  # end an evaluation in another thread
            self.stop.request(grace_seconds=0.0)
            self.processes.turns.wait_for_evaluation(patience or EVALUATION_END_TIMEOUT)
        self._stack.close()
        joules = self.processes.used_joules()
        self.processes.stop_all()
        self.display.close()
        self._record_end(kind, joules)
        self._track_costs()
        has_report = writes_report and self._write_report()
        self.tracker.close("FAILED" if kind else "FINISHED", timeout=patience or 30)
        for delivery in self.tracker.deliveries:
            if waiting := delivery.num_waiting():
                self.display.note(
                    f"{waiting} records are not delivered to {delivery.name} yet ({delivery.problem}); "
                    "the next start delivers them"
                )
        if kind is None:
            self._record_completion()
        if wait_for_api(self.display.note, patience_seconds=patience):
            commits = self._final_commits or read_commits(self.store, self.keys)
            progress = describe_progress(commits, self._started_at)
            self._artifact.publish(self._describe_for_prefect(progress, commits, has_report=has_report))
        self._entered.close()
        if kind is not None and issubclass(kind, Preempted):
            raise TerminationSignal(signal.SIGTERM)  # Prefect marks the flow run as crashed or cancelled

    def _record_end(self, kind: type[BaseException] | None, joules: float | None) -> None:
        """Record the end of this start. A failure, for instance on a full disk, is printed only."""
        outcome = (
            "FINISHED" if kind is None else "STOPPED" if issubclass(kind, (Preempted, KeyboardInterrupt)) else "FAILED"
        )
        try:
            record_end(self.store, self.keys, self._start, outcome, joules)
        except (StoreError, OSError) as error:
            self.display.note(f"the end of this start is not recorded ({error}); its costs end with its last commit")

    def _record_completion(self) -> None:
        """Record that nothing is left to do, unless a tracker lacks records. A failure is printed only."""
        if any(delivery.num_waiting() for delivery in self.tracker.deliveries):
            return
        try:
            completion = completion_of(self._flow, self.store, self.config)
            record_completion(self.store, self.keys, self._start, completion)
        except (StoreError, OSError) as error:
            self.display.note(f"the completion of the run is not recorded ({error}); the next start checks its stages")

    def _write_report(self) -> bool:
        """Write the report of a run that has commits, and give it to the trackers. Return whether that worked."""
        if not committed_prefixes(self.store, self.keys):
            return False
        content = write_final_report(self.store, self.keys, self.display.note)
        if content is not None:
            self.tracker.record_report(self.keys.report, content)
            self.display.note(f"report: {self.store.path(self.keys.report)}")
        return content is not None

    def _track_costs(self) -> None:
        """Log what the run has used so far to the trackers (costs.py). A failure is printed only."""
        try:
            price = self.config.run.price_per_device_hour
            for record in read_cost_metrics(self.store, self.keys, price, self._start):
                self.tracker.enqueue_metrics(record.key, record.metrics, record.step, record.at)
        except (StoreError, OSError) as error:
            self.display.note(
                f"the costs of the run are not logged ({error}); `penstock cost {self.keys.run}` shows them"
            )

    # ---- progress of the run -----------------------------------------------------------------------------------------

    def remaining_rounds(self) -> Iterator[int]:
        """Yield the rounds to run. The first is the last trained round, because its checkpoint or evaluation may be
        missing."""
        done, total = self.num_trained_rounds(), self.num_rounds
        if done:
            rest = "resuming" if done < total else "nothing is left to train"
            self.display.note(f"{done} of {total} rounds are committed; {rest}")
        yield from range(max(0, done - 1), total)

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds at which this start ends: --num-rollout; with --debug-train-only, unless
        rollouts are loaded from files, at most the number of committed rollouts."""
        run = self.config.run
        if not run.debug_train_only or self.config.debug.load_debug_rollout_data:
            return run.num_rollout
        return min(run.num_rollout, len(self.store.committed_indices(f"{self.keys.prefix}/rollouts")))

    def num_trained_rounds(self) -> int:
        """Return the number of rounds whose training is committed."""
        return len(self.store.committed_indices(f"{self.keys.prefix}/steps"))

    def needs_rollout(self, version: int) -> bool:
        """Return whether the rollout of policy `version` is still to be generated."""
        run = self.config.run
        missing = version < run.num_rollout and self.store.committed(self.keys.rollout_prefix(version)) is None
        return missing and not run.debug_train_only

    def start_trainer(self) -> None:
        """Start the trainer's processes if rounds are left to train; they start while the model is converted."""
        if self.num_trained_rounds() < self.num_rounds:
            try:
                self.processes.start_trainer()
            except (ClusterLost, NodeLost, TimeoutError) as error:  # the stage `restore` starts it, with retries
                self.display.note(f"the trainer was not started early ({error}); it will start after the conversion")

    def print_and_track(self, prefix: str, commit: Commit) -> Commit:
        """Print a commit and log it to the trackers, unless this commit was logged before. Return the commit."""
        is_new = self.tracker.record_commit(commit_key(prefix), commit)
        if self._prometheus is not None:
            self._prometheus.update_from_record(Committed(commit_key(prefix), commit.created_at, commit))
        line = self.display.print_commit(commit) if is_new else ""
        if line:
            get_run_logger().info(line.strip())  # for the Prefect page
            if commit.kind == "step":
                self._warn_about_step(commit.index)
        text = line or ("" if is_new else "committed before: ") + describe_commit(commit, self.num_rounds)
        self.set_stage_message(text)
        return commit

    @contextmanager
    def running_stage(self, name: str, rollout_id: int | None) -> Iterator[None]:
        """Show a stage during the block, and record that it begins for the hang detector and for Prometheus."""
        self.display.on_progress()
        if self._prometheus is not None:
            self._prometheus.set_stage(name)
        with self.display.stage(name, rollout_id):
            yield

    def set_stage_message(self, text: str) -> None:
        """Set the message of the current stage's final state, which says what the stage has done."""
        self.stage_messages[uuid.UUID(task_run.id)] = " ".join(text.split())

    def _warn_about_step(self, rollout_id: int) -> None:
        """Print a warning if round `rollout_id` and the rounds just before it had zero gradients and, once per run, if
        the log-probs of engine and trainer differ and no option corrects it."""
        train = self.config.train
        custom_advantages = train.custom_advantage_function_path or train.disable_rewards_normalization or train.use_opd
        custom_advantages = custom_advantages or self.config.rollout.sets_train_rewards
        group_relative = (
            train.loss_type == "policy_loss" and train.advantage_estimator in GROUP_RELATIVE and not custom_advantages
        )
        warnings = [zero_gradient_warning(self.store, self.keys, rollout_id, group_relative=group_relative)]
        if not (train.use_tis or train.use_rollout_logprobs):
            fp8 = bool(fp8_weights(self.config.convert.hf_checkpoint))
            warnings.append(logprob_gap_warning(self.store, self.keys, rollout_id, fp8=fp8))
        for warning in filter(None, warnings):
            self.display.warn(warning)
            get_run_logger().warning(warning)

    def pin_base_model(self, path: str, base: CheckpointRef) -> CheckpointRef:
        """Set the model that the run starts from, converted from the files at `path`. Raises RunError if the run has
        recorded another one."""
        self.pin_model("base", path, base)
        self.processes.base_checkpoint = base
        return base

    def pin_model(self, role: str, path: str, model: CheckpointRef) -> None:
        """Record which converted model the run uses as `role` (base, reference or teacher).

        Raises:
            RunError: the run has recorded another model as `role`, because the files at `path` have changed since.
        """
        key = self.keys.origin_key(role)
        self.store.create(key, model.model_dump_json().encode())
        pinned = self.store.read_record(CheckpointRef, key)
        assert pinned is not None, "it was created"
        if pinned.key != model.key:
            raise RunError(
                f"run {self.keys.run!r} uses {pinned.key} as its {role} model, but {path} now contains {model.key}: "
                f"restore the original files in {path} (the start weights of an old run may be those of --load or "
                "--hf-checkpoint), or start a new run with another --run"
            )

    def read_existing_commit(self, prefix: str) -> Commit:
        """Return the commit at `prefix`, which must exist."""
        commit = self.store.committed(prefix)
        assert commit is not None, f"{prefix} is not committed"
        return commit

    def print_results(self) -> str:
        """Print the results of the whole run, including rounds before a resume. Return what this start has done."""
        self._final_commits = commits = read_commits(self.store, self.keys)
        self.display.print_summary(commits)
        return describe_progress(commits, self._started_at)

    @property
    def local_directories(self) -> list[str]:
        """Return the local directories that a stage writes to, except the temporary directory."""
        return [self.store.root] if self.store.is_local else []

    def report_failure(self, stage: str, error: BaseException) -> None:
        """Print that a stage failed. The next attempt restores the trainer and the engines if necessary."""
        if isinstance(error, (Preempted, KeyboardInterrupt)):
            self.display.note(f"{stage} cancelled on request; it will rerun on resume")
        else:
            first_line = str(error).partition("\n")[0][:300]
            self.display.note(
                f"{stage} failed ({type(error).__name__}: {first_line}); "
                "its inputs will be restored from the store before retrying"
            )

    def _record_publish(self, version: int, metrics: dict[str, float], switches: list[MemorySwitch]) -> None:
        self.display.record_publish(metrics["perf/update_weights_time"])
        for switch in switches:
            self.display.note(f"moved GPU memory: {switch}")
        if switches:
            metrics["perf/memory_switch_time"] = sum(switch.seconds for switch in switches)
            metrics["perf/device_memory_peak_gib"] = max(switch.device_bytes_before for switch in switches) / GIB
            metrics["perf/host_memory_gib"] = max(switch.host_bytes_after for switch in switches) / GIB
        if version > 0:  # one point per step, also if a version is published again after a fault or a resume
            self.tracker.enqueue_metrics(f"publish-{version}", metrics, step=version - 1)

    def record_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Show and track how generation and training overlapped before round `rollout_id` was trained."""
        self.display.record_overlap(rollout_id, metrics)
        self.tracker.enqueue_metrics(f"overlap-{rollout_id}", metrics, step=rollout_id)

    # ---- a checkpoint that is saved during the next rollout ----------------------------------------------------------

    def set_pending_checkpoint(self, saving: PrefectFuture[Any]) -> None:
        """Wait until the previous checkpoint is saved, then keep `saving`, the task that saves the next one."""
        self.wait_for_checkpoint()
        self._saving = saving

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being saved is committed. Raises the exception of the saving task.

        A stage that changes the trainer's weights must call this first.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def wait_for_checkpoint_until_deadline(self) -> None:
        """Wait for the checkpoint that is being saved, but not beyond the grace period or --train-timeout."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(timeout=max(0.0, min(self.stop.seconds_left, self.config.train.train_timeout)))

    # ---- inputs of rollouts ------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> PromptSource:
        """Return the prompts of --prompt-data."""
        from penstock.stages.rollout.prompts.source import PromptSource

        return PromptSource.open(self.config.rollout)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """Return the model's tokenizer."""
        from penstock.stages.rollout.text.tokenizer import PromptTokenizer

        rollout = self.config.rollout
        return PromptTokenizer(
            self.config.convert.hf_checkpoint,
            apply_chat_template=rollout.apply_chat_template,
            template_options=rollout.apply_chat_template_kwargs,
        )

    @cached_property
    def grader(self) -> Grader:
        """Return the grader, which runs the reward function; its processes are kept between rounds."""
        from penstock.stages.rollout.group import make_grader

        return self._stack.enter_context(make_grader(self.config.rollout_with_args))
