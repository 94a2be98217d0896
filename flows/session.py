"""What a flow run holds while it lasts: the store, the Ray processes, the tracker, the terminal.

Processes start at first use and are replaceable at any time: whatever a task needs from them it asks for by policy version
(`trainer_at`, `engines_at`), and the store alone decides what that version is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import get_run_logger
from prefect.runtime import flow_run

from flows.config import PostTrainConfig, config_hash
from flows.display import Display
from flows.preflight import preflight
from flows.runs import code_version, open_run, open_store, run_commits
from storage.refs import CheckpointRef, Commit, commit_key
from storage.tracking import Tracker, tracking_directory, tracking_uri

if TYPE_CHECKING:
    from engines.cluster import Cluster
    from engines.sglang.pool import EnginePool
    from stages.rewards.grading import Grader
    from stages.rollout.data_source import PromptSource
    from stages.rollout.tokenizer import PromptTokenizer
    from stages.train.group import TrainerGroup


class Session:
    """One flow run's grip on one run. A context manager: leaving it ends every process it started."""

    def __init__(self, flow: str, config: PostTrainConfig) -> None:
        preflight(flow, config)
        self.config = config
        self.store = open_store(config.run)
        self.keys = open_run(self.store, flow, config)
        self.stamp: dict[str, Any] = {"config_hash": config_hash(config), "code_version": code_version()}
        self._start: CheckpointRef | None = None
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._trainer: TrainerGroup | None = None
        self._engines: EnginePool | None = None
        uri = tracking_uri(self.store, config.run.mlflow_tracking_uri)
        self.display = Display(self.keys.run, flow, config, self.store.uri, uri, prefect_page=flow_run.ui_url or "")
        self.tracker = Tracker(
            self.keys.run,
            tracking_directory(self.store, self.keys.run),
            uri,
            config.model_dump(mode="json"),
            store_uri=self.store.uri,
        )
        self.tracker.catch_up(self.store, self.keys)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for end in (self._stack.close, self.end_engines, self.fence, self._end_cluster):
            end()
        self.display.close()
        waiting = self.tracker.close("FAILED" if kind else "FINISHED", timeout=30)
        if waiting:
            self.display.note(
                f"{waiting} lines wait for MLflow ({self.tracker.problem}); they are delivered when the run is started again"
            )

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
        return commit

    def begin_at(self, base: CheckpointRef) -> CheckpointRef:
        """Tie the run to its starting weights. Raises ValueError if it began from others."""
        self.store.create(f"{self.keys.prefix}/base.json", base.model_dump_json().encode())
        pinned = CheckpointRef.model_validate(self.store.read_json(f"{self.keys.prefix}/base.json"))
        if pinned.key != base.key:
            raise ValueError(
                f"run {self.keys.run!r} began from {pinned.key}, but --hf-checkpoint {self.config.convert.hf_checkpoint} now holds {base.key}: "
                "restore the directory, or start a new run with another --run"
            )
        self._start = base
        return base

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

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage has failed: say so, and fence the trainer."""
        first_line = str(error).partition("\n")[0]
        self.display.note(f"{stage} failed ({type(error).__name__}: {first_line}); what it needs is restored from the store")
        self.fence()

    # ---- what rollouts need ---------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> PromptSource:
        """The rows of --prompt-data."""
        from stages.rollout.data_source import PromptSource

        return PromptSource.open(self.config.rollout)

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        from stages.rollout.tokenizer import PromptTokenizer

        return PromptTokenizer(self.config.convert.hf_checkpoint, apply_chat_template=self.config.rollout.apply_chat_template)

    @cached_property
    def grader(self) -> Grader:
        """The reward, its processes kept alive between rounds."""
        from stages.rollout.rollout import grader_of

        return self._stack.enter_context(grader_of(self.config.rollout))

    @property
    def start(self) -> CheckpointRef:
        """The starting weights."""
        assert self._start is not None, "convert comes first"
        return self._start

    # ---- processes ------------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """Ray: a standing one if an address is given, else one that ends with this session."""
        if self._cluster is None:
            from engines.cluster import Cluster

            self._cluster = Cluster.start(self.config.run.ray_address, namespace=f"penstock-{self.keys.run}")
        return self._cluster

    @property
    def trainer(self) -> TrainerGroup:
        """The trainer, whatever it holds."""
        if self._trainer is None:
            self._trainer = self._new_trainer()
        return self._trainer

    def trainer_at(self, version: int) -> TrainerGroup:
        """The trainer, holding exactly policy `version`: as it is, or restored from the newest checkpoint and replayed."""
        from stages.train.policy import ensure_policy

        ensure_policy(self.store, self.keys, self.trainer, version, base=self.start, on_progress=self.display.note)
        return self.trainer

    def start_engines(self) -> None:
        """Begin to start the engines without waiting; they load for 20-60 s while the trainer is built."""
        if self._engines is None:
            self._engines = self._new_engines()

    def engines_at(self, version: int) -> list[str]:
        """Addresses of engines that all serve policy `version`; publishes to them if they do not."""
        self.start_engines()
        assert self._engines is not None
        self._engines.ensure_alive()
        wanted = self.weight_version(version)
        if set(self._engines.weight_versions()) != {wanted}:
            trainer = self.trainer_at(version)
            start = time.perf_counter()
            trainer.publish(
                self._engines.urls,
                wanted,
                transport=self._transport,
                model_path=self._model_path,
                directory=self.store.path(f"{self.keys.prefix}/published") if self.store.is_local else tempfile.gettempdir(),
            )
            seconds = time.perf_counter() - start
            self.display.published(seconds)
            self.tracker.log(
                f"publish-{version}-{time.time_ns()}", {"perf/update_weights_time": seconds}, step=max(0, version - 1)
            )
        return self._engines.urls

    def weight_version(self, version: int) -> str:
        """What engines report while they serve this run's policy `version`."""
        return f"{self.keys.run}/{version}"

    def fence(self) -> None:
        """Kill the trainer; the next task that needs it gets a new one. Called when a task has failed, for then nobody knows its state."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer = None

    def end_engines(self) -> None:
        """Stop the engines."""
        if self._engines is not None:
            self._engines.stop()
            self._engines = None

    @property
    def _colocated(self) -> bool:
        return self.config.rollout.rollout_num_gpus is None

    @property
    def _model_path(self) -> str:
        return str(Path(self.config.convert.hf_checkpoint).resolve())

    @property
    def _transport(self) -> Literal["tensor", "disk"]:
        """Memory is shared on one machine without GPUs, and between processes on the same GPU; else the disk carries the weights."""
        in_memory = self._colocated or not self.cluster.num_gpus
        return self.config.run.update_weight_transport or ("tensor" if in_memory else "disk")

    def _new_trainer(self) -> TrainerGroup:
        from engines.megatron.shape import ModelShape
        from stages.train.group import TrainerGroup
        from stages.train.spec import TrainerSpec

        spec = TrainerSpec(
            run=self.keys.run,
            shape=ModelShape.from_hf(self.config.convert.hf_checkpoint),
            config=self.config.train,
            temperature=self.config.rollout.rollout_temperature,
            store=self.store.uri,
            store_options=self.config.run.store_options,
        )
        return TrainerGroup(self.cluster, spec)

    def _new_engines(self) -> EnginePool:
        from engines.sglang.pool import EnginePool
        from engines.sglang.server import ServerSpec

        rollout, train = self.config.rollout, self.config.train
        has_gpus = self.cluster.num_gpus > 0
        num_gpus = rollout.rollout_num_gpus or train.num_ranks
        spec = ServerSpec(
            model_path=self._model_path,
            weight_version=self.weight_version(0),  # what it loads is what every policy of the run begins with
            port=rollout.sglang_port,
            args=rollout.sglang,
            tensor_parallel=rollout.rollout_num_gpus_per_engine if has_gpus else 1,
            threads=rollout.sglang_threads or 1,
            python=rollout.sglang_python,
            pythonpath=rollout.sglang_pythonpath,
            log_dir=self.store.path(f"{self.keys.prefix}/logs") if self.store.is_local else None,
            start_timeout=rollout.sglang_start_timeout,
        )
        count = num_gpus // rollout.rollout_num_gpus_per_engine if has_gpus else rollout.num_engines
        return EnginePool(self.cluster, spec, count, offset=0 if self._colocated else train.num_ranks)

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
