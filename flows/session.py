"""What a flow run holds while it lasts: the store, the Ray processes, the tracker, the terminal.

Processes start at first use and are replaceable at any time: whatever a task needs from them it asks for by policy version
(`trainer_at`, `engines_at`), and the store alone decides what that version is.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import PostTrainConfig, config_hash
from flows.display import Display
from flows.runs import code_version, open_run, open_store
from storage.refs import CheckpointRef, Commit, commit_key

if TYPE_CHECKING:
    from engines.cluster import Cluster
    from engines.sglang.pool import EnginePool
    from stages.rollout.tokenizer import PromptTokenizer
    from stages.train.group import TrainerGroup


class Session:
    """One flow run's grip on one run. A context manager: leaving it ends every process it started."""

    def __init__(self, flow: str, config: PostTrainConfig) -> None:
        from storage.tracking import Tracker

        self.flow = flow
        self.config = config
        self.store = open_store(config.run)
        self.keys = open_run(self.store, flow, config)
        self.stamp = {"run": self.keys.run, "config_hash": config_hash(config), "code_version": code_version()}
        self.base: CheckpointRef | None = None
        self.publish_seconds = 0.0
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._trainer: TrainerGroup | None = None
        self._engines: EnginePool | None = None
        self._tokenizer: PromptTokenizer | None = None
        self.display = Display(self.keys.run, flow, config, self.store.uri)
        self.tracker = Tracker(self.keys.run, tracking_directory(self), tracking_uri(self), config.model_dump(mode="json"))
        self._stack.callback(self.tracker.close, timeout=30)
        self._offer_old_commits()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_engines()
        self.fence()
        if self._cluster is not None:
            self._cluster.stop()
        self._stack.close()

    # ---- where the run stands -------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[int]:
        """The rounds still to do, the last finished one included: its checkpoint or evaluation may be missing."""
        done = self.num_trained()
        total = self.config.run.num_rollout
        if done:
            self.display.note(f"{done} of {total} rounds are committed: going on from there")
        yield from range(max(0, done - 1), total)

    def num_trained(self) -> int:
        """Rounds whose training is committed."""
        return len(self.store.committed_indices(f"{self.keys.prefix}/steps"))

    def record(self, prefix: str, commit: Commit) -> Commit:
        """Show a commit on the terminal and hand it to the tracker (which knows those it has seen)."""
        self.tracker.record(commit_key(prefix), commit)
        self.display.commit(commit)
        return commit

    # ---- processes ------------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """Ray: a standing one if an address is given, else one that ends with this session."""
        if self._cluster is None:
            from engines.cluster import Cluster

            self._cluster = Cluster.start(self.config.run.ray_address, namespace=f"penstock-{self.keys.run}")
        return self._cluster

    def trainer_at(self, version: int) -> TrainerGroup:
        """The trainer, holding exactly policy `version`: as it is, or restored from the newest checkpoint and replayed."""
        from stages.train.policy import ensure_policy

        if self._trainer is None:
            self._trainer = self._start_trainer()
        ensure_policy(self.store, self.keys, self._trainer, version, base=self.base, on_progress=self.display.note)
        return self._trainer

    def start_engines(self) -> None:
        """Begin to start the engines without waiting; they load for 20-60 s while the trainer is built."""
        if self._engines is None:
            from engines.sglang.pool import EnginePool

            self._engines = EnginePool(self.cluster, self.engine_spec(), self.config.rollout.num_engines)

    def engines_at(self, version: int) -> list[str]:
        """Addresses of engines that all serve policy `version`; publishes to them if they do not."""
        self.start_engines()
        assert self._engines is not None
        self._engines.ensure_alive()
        wanted = self.weight_version(version)
        if set(self._engines.weight_versions()) != {wanted}:
            start = time.perf_counter()
            self.trainer_at(version).publish(self._engines.urls, wanted)
            self.publish_seconds = time.perf_counter() - start
        return self._engines.urls

    def weight_version(self, version: int) -> str:
        """What engines report while they serve this run's policy `version`."""
        return f"{self.keys.run}/{version}"

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            from stages.rollout.tokenizer import PromptTokenizer

            self._tokenizer = PromptTokenizer(self.config.convert.hf_checkpoint, apply_chat_template=self.config.rollout.apply_chat_template)
        return self._tokenizer

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
