"""What a flow run holds while it lasts: the store, the tracker, the terminal, and its processes (processes.py)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from engines import scratch
from flows.config import PostTrainConfig, config_hash
from flows.continual import resolved
from flows.display import Display
from flows.learning_signal import GROUP_RELATIVE, zero_gradient_warning
from flows.paths import absolute
from flows.prefect_api import wait_for_api, with_password_hint
from flows.preflight import preflight, warnings
from flows.processes import Processes
from flows.runs import code_version, open_run, open_store, run_commits, run_keys
from flows.stopping import listen
from storage.errors import RunError
from storage.leases import Lease, driver_key
from storage.preemption import Preempted, StopRequest
from storage.refs import CheckpointRef, Commit, RunKeys, commit_key
from storage.tracking import Tracker, tracking_directory, tracking_uri

if TYPE_CHECKING:
    from stages.rewards.grading import Grader
    from stages.rollout.prompts.source import PromptSource
    from stages.rollout.tokenizer import PromptTokenizer


class Session:
    """One flow run's grip on one run. A context manager: leaving it ends every process it started."""

    def __init__(self, flow: str, config: PostTrainConfig) -> None:
        preflight(flow, config)
        self.store = open_store(config.run)
        self.config = config = absolute(resolved(self.store, config))
        self._entered = ExitStack()
        self.keys = self._open_run(flow)
        self.stop = StopRequest()
        self.stamp: dict[str, Any] = {"config_hash": config_hash(config), "code_version": code_version()}
        self._stack = ExitStack()
        self._saving: PrefectFuture[Any] | None = None  # a checkpoint that is being written
        uri = tracking_uri(self.store, config.run.mlflow_tracking_uri)
        self.display = Display(
            self.keys.run, flow, config, self.store.uri, uri, prefect_page=with_password_hint(flow_run.ui_url or "")
        )
        self.tracker = Tracker(
            self.keys.run,
            tracking_directory(self.store, self.keys.run),
            uri,
            config.model_dump(mode="json"),
            store_uri=self.store.uri,
        )
        self.tracker.catch_up(self.store, self.keys)
        self.processes = Processes(config, self.store, self.keys, self.stamp, self.display.note, self._published)
        for warning in warnings(flow, config):
            self.display.note(warning)

    def _open_run(self, flow: str) -> RunKeys:
        """Show that this driver is alive, as long as the session lasts, and take the run's name or find that the run may continue."""
        lease = Lease(self.store, driver_key(run_keys(self.config.run.run)))
        try:
            keys = open_run(self.store, flow, self.config, lease=lease)
        except BaseException:
            lease.release()
            raise
        self._entered.callback(lease.release)
        return keys

    def __enter__(self) -> Session:
        self._entered.enter_context(listen(self.stop, self.config.run.grace_period))
        self._entered.enter_context(self.display.hears("engines", "stages", "storage"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None and not issubclass(kind, Preempted):
            scratch.keep()  # Ray's and the engines' logs are there
        signal.setitimer(signal.ITIMER_REAL, 0)  # what is left to do has limits of its own, and must not be cut short
        for end in (self._abandon_checkpoint, self._stack.close, self.processes.end):
            end()
        self.display.close()
        waiting = self.tracker.close("FAILED" if kind else "FINISHED", timeout=5 if self.stop.requested else 30)
        if waiting:
            self.display.note(
                f"{waiting} lines wait for MLflow ({self.tracker.problem}); they are delivered when the run is started again"
            )
        wait_for_api(self.display.note, patience=max(0.0, min(5.0, self.stop.seconds_left)) if self.stop.requested else None)
        self._entered.close()
        if kind is not None and issubclass(kind, Preempted):
            raise TerminationSignal(signal.SIGTERM)  # so Prefect marks the run as crashed, or as cancelled if it was that

    # ---- where the run stands -------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[int]:
        """The rounds still to do, the last finished one included: its checkpoint or evaluation may be missing."""
        done = self.num_trained()
        total = self.config.run.num_rollout
        if done:
            rest = "going on from there" if done < total else "nothing is left to train"
            self.display.note(f"{done} of {total} rounds are committed: {rest}")
        yield from range(max(0, done - 1), total)

    def num_trained(self) -> int:
        """Rounds whose training is committed."""
        return len(self.store.committed_indices(f"{self.keys.prefix}/steps"))

    def generates_with(self, version: int) -> bool:
        """Whether a rollout by policy `version` is still to be made."""
        return version < self.config.run.num_rollout and self.store.committed(self.keys.rollout(version)) is None

    def record(self, prefix: str, commit: Commit) -> Commit:
        """Show a commit on the terminal and hand it to the tracker (which passes over those it knows)."""
        if self.tracker.record(commit_key(prefix), commit) and (line := self.display.commit(commit)):
            get_run_logger().info(line.strip())  # the same on the Prefect page
            if commit.kind == "step":
                self._warn_of_zero_gradients(commit.index)
        return commit

    def _warn_of_zero_gradients(self, rollout_id: int) -> None:
        train = self.config.train
        own = train.custom_advantage_function_path or train.disable_rewards_normalization or train.use_opd
        group_relative = train.loss_type == "policy_loss" and train.advantage_estimator in GROUP_RELATIVE and not own
        if warning := zero_gradient_warning(self.store, self.keys, rollout_id, group_relative=group_relative):
            self.display.warn(warning)
            get_run_logger().warning(warning)

    def begin_at(self, base: CheckpointRef) -> CheckpointRef:
        """Tie the run to its starting weights. Raises RunError if it began from others."""
        self.pin("base", self.config.convert.hf_checkpoint, base)
        self.processes.base = base
        return base

    def pin(self, name: str, path: str, model: CheckpointRef) -> None:
        """Tie the run to a model by content: its base, a reference, a teacher. Raises RunError if it had another one before."""
        key = self.keys.origin(name)
        self.store.create(key, model.model_dump_json().encode())
        pinned = CheckpointRef.model_validate(self.store.read_json(key))
        if pinned.key != model.key:
            raise RunError(
                f"the {name} of run {self.keys.run!r} is {pinned.key}, but {path} now holds {model.key}: restore the directory, or start "
                "a new run with another --run"
            )

    def committed(self, prefix: str) -> Commit:
        """A commit that must be there by now."""
        commit = self.store.committed(prefix)
        assert commit is not None, f"{prefix} is not committed"
        return commit

    def finish(self) -> dict[str, str]:
        """Show and return what came of the whole run, rounds before a resume included: title -> text."""
        commits = run_commits(self.store, self.keys)
        self.display.finish(commits)
        return self.display.results(commits)

    @property
    def places(self) -> list[str]:
        """Directories of this machine that a stage writes to, besides the temporary one."""
        return [self.store.root] if self.store.is_local else []

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage has failed: say so. What the next attempt finds is judged by `trainer_at` and `engines_at`."""
        if isinstance(error, Preempted):
            self.display.note(f"{stage} is given up, as asked; the next start does it again")
        else:
            first_line = str(error).partition("\n")[0][:300]
            self.display.note(f"{stage} failed ({type(error).__name__}: {first_line}); what it needs is restored from the store")

    def _published(self, version: int, seconds: float) -> None:
        self.display.published(seconds)
        if version > 0:  # one point a step: publishing again, after a fault or a resume, adds none
            self.tracker.log(f"publish-{version}", {"perf/update_weights_time": seconds}, step=version - 1)

    # ---- a checkpoint beside the next rollout ---------------------------------------------------------------------------

    def save_meanwhile(self, saving: PrefectFuture[Any]) -> None:
        """Let a checkpoint be written while the engines go on. The trainer must not change before `settle`."""
        self.settle()
        self._saving = saving

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is committed. Raises what its task raised."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _abandon_checkpoint(self) -> None:
        """At the end of the session: what can still be saved in the time that is left is saved."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(timeout=max(0.0, min(self.stop.seconds_left, self.config.train.train_timeout)))

    # ---- what rollouts need ---------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> PromptSource:
        """The rows of --prompt-data."""
        from stages.rollout.prompts.source import PromptSource

        return PromptSource.open(self.config.rollout)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        from stages.rollout.tokenizer import PromptTokenizer

        rollout = self.config.rollout
        return PromptTokenizer(
            self.config.convert.hf_checkpoint,
            apply_chat_template=rollout.apply_chat_template,
            template_options=rollout.apply_chat_template_kwargs,
        )

    @cached_property
    def grader(self) -> Grader:
        """The reward, its processes kept alive between rounds."""
        from stages.rollout.rollout import grader_of

        return self._stack.enter_context(grader_of(self.config.rollout))
