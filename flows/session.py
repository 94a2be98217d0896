"""What a flow run holds while it lasts: the store, the Ray processes, the tracker, the terminal.

Processes start at first use and are replaceable at any time: whatever a task needs from them it asks for by policy version
(`trainer_at`, `engines_at`), and the store alone decides what that version is.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from flows.config import PostTrainConfig, config_hash
from flows.continual import resolved
from flows.display import Display
from flows.fork import bridge
from flows.prefect_api import wait_for_api
from flows.preflight import preflight, warnings
from flows.runs import code_version, open_run, open_store, run_commits
from flows.stopping import listen
from storage.preemption import Preempted, StopRequest
from storage.refs import CheckpointRef, Commit, commit_key
from storage.tracking import Tracker, tracking_directory, tracking_uri

if TYPE_CHECKING:
    from engines.cluster import Cluster
    from engines.sglang.client import EngineClient
    from engines.sglang.pool import EnginePool
    from engines.sglang.router import Router
    from stages.rewards.grading import Grader
    from stages.rollout.prompts.source import PromptSource
    from stages.rollout.tokenizer import PromptTokenizer
    from stages.train.group import TrainerGroup


class Session:
    """One flow run's grip on one run. A context manager: leaving it ends every process it started."""

    def __init__(self, flow: str, config: PostTrainConfig) -> None:
        preflight(flow, config)
        self.store = open_store(config.run)
        self.config = config = resolved(self.store, config)
        self.keys = open_run(self.store, flow, config)
        self.stop = StopRequest()
        self._entered = ExitStack()
        self.stamp: dict[str, Any] = {"config_hash": config_hash(config), "code_version": code_version()}
        self._start: CheckpointRef | None = None
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._starting = threading.RLock()  # the checkpoint's thread asks for the same processes
        self._trainer: TrainerGroup | None = None
        self._saving: PrefectFuture[Any] | None = None  # a checkpoint that is being written
        self._engines: EnginePool | None = None
        self._shared: tuple[int, Callable[[], list[str]]] | None = None  # engines of a block that several stages share
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
        for warning in warnings(flow, config):
            self.display.note(warning)

    def __enter__(self) -> Session:
        self._entered.enter_context(listen(self.stop, self.config.run.grace_period))
        self._entered.enter_context(self.display.hears("engines", "stages", "storage"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # what is left to do has limits of its own, and must not be cut short
        for end in (self._abandon_checkpoint, self._stack.close, self._end_processes):
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
        return commit

    def begin_at(self, base: CheckpointRef) -> CheckpointRef:
        """Tie the run to its starting weights. Raises ValueError if it began from others."""
        self.pin("base", self.config.convert.hf_checkpoint, base)
        self._start = base
        return base

    def pin(self, name: str, path: str, model: CheckpointRef) -> None:
        """Tie the run to a model by content: its base, a reference, a teacher. Raises ValueError if it had another one before."""
        key = self.keys.origin(name)
        self.store.create(key, model.model_dump_json().encode())
        pinned = CheckpointRef.model_validate(self.store.read_json(key))
        if pinned.key != model.key:
            raise ValueError(
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

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage has failed: say so. What the next attempt finds is judged by `trainer_at` and `engines_at`."""
        if isinstance(error, Preempted):
            self.display.note(f"{stage} is given up, as asked; the next start does it again")
        else:
            first_line = str(error).partition("\n")[0]
            self.display.note(f"{stage} failed ({type(error).__name__}: {first_line}); what it needs is restored from the store")

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

        return PromptTokenizer(self.config.convert.hf_checkpoint, apply_chat_template=self.config.rollout.apply_chat_template)

    @cached_property
    def grader(self) -> Grader:
        """The reward, its processes kept alive between rounds."""
        from stages.rollout.rollout import grader_of

        return self._stack.enter_context(grader_of(self.config.rollout))

    @cached_property
    def router(self) -> Router | None:
        """SGLang's router, if one is asked for: begun, and told by the engines which of them live."""
        from engines.sglang.args import check_router_args
        from engines.sglang.router import Router

        rollout = self.config.rollout
        if not (rollout.use_router or rollout.router):
            return None
        args = check_router_args(rollout.router)
        return self._stack.enter_context(Router(args, self._log_dir, max_restarts=rollout.engine_restarts))

    @property
    def connect(self) -> Callable[..., EngineClient]:
        """Makes a client of the engines; it goes through the router if there is one."""
        from engines.sglang.client import EngineClient

        return partial(EngineClient, router=self.router.address if self.router else None)

    @property
    def connect_to_train(self) -> Callable[..., EngineClient]:
        """The same for samples to train on: it asks for the engines' choice of experts if the trainer is to make the same."""
        from engines.megatron.experts import experts_format
        from engines.megatron.shape import ModelShape

        if not self.config.train.use_rollout_routing_replay:
            return self.connect
        shape = ModelShape.from_hf(self.config.convert.hf_checkpoint)
        return partial(self.connect, experts=experts_format(shape, "--use-rollout-routing-replay"))

    @property
    def start(self) -> CheckpointRef:
        """The starting weights."""
        assert self._start is not None, "convert comes first"
        return self._start

    # ---- processes ------------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """Ray: a standing one if an address is given, else one that ends with this session, and is started anew if it has died."""
        with self._starting:
            if self._cluster is not None and not self._cluster.alive():
                self.display.note("the run's own Ray has died: starting another one")
                self._trainer = self._engines = None
                self._end_cluster()
            if self._cluster is None:
                from engines.cluster import Cluster

                self._cluster = Cluster.start(self.config.run.ray_address, namespace=f"penstock-{self.keys.run}")
            return self._cluster

    @property
    def trainer(self) -> TrainerGroup:
        """The trainer, whatever it holds."""
        with self._starting:
            cluster = self.cluster  # a new one has no trainer yet
            if self._trainer is None:
                self._trainer = self._new_trainer(cluster, self.config)
            return self._trainer

    def trainer_at(self, version: int) -> TrainerGroup:
        """The trainer, holding exactly policy `version`: as it is, or restored from the newest checkpoint and replayed."""
        from stages.train.policy import ensure_policy

        ensure_policy(self.store, self.keys, self.trainer, version, base=self.start, on_progress=self.display.note)
        return self.trainer

    def bridge(self) -> None:
        """In a fork that trains in another way than its parent: save the policy at which it leaves, made in the parent's way."""
        from stages.train.policy import save_checkpoint

        record = self.store.read_json(self.keys.record)
        assert record is not None
        if (found := bridge(self.store, record)) is None:
            return
        version, before = found
        parents = self._new_trainer(self.cluster, before)
        try:
            save_checkpoint(self.store, self.keys, parents, version, base=self.start, on_progress=self.display.note, **self.stamp)
        finally:
            parents.kill()

    def start_engines(self) -> EnginePool:
        """The engines, whatever they serve. The first call begins to start them, and does not wait the 20-60 s that they load."""
        with self._starting:
            cluster = self.cluster
            if self._engines is None:
                self._engines = self._new_engines(cluster)
            return self._engines

    @contextmanager
    def engines_at(self, version: int) -> Iterator[Callable[[], list[str]]]:
        """A block in which all engines serve policy `version` and are kept doing so; gives their addresses of the moment."""
        if self._shared is not None:
            held, urls = self._shared
            assert held == version, f"the engines are held at {held}"
            yield urls
            return
        with self.start_engines().serving(self.weight_version(version), partial(self._publish, version)) as urls:
            yield urls

    @contextmanager
    def engines_shared(self, version: int) -> Iterator[None]:
        """A block in which stages that run side by side use the same engines."""
        with self.engines_at(version) as urls:
            self._shared = (version, urls)
            try:
                yield
            finally:
                self._shared = None

    def publish(self, version: int) -> None:
        """Let every engine serve policy `version`."""
        self.start_engines().bring_to(self.weight_version(version), partial(self._publish, version))

    def _publish(self, version: int, urls: list[str]) -> None:
        trainer = self.trainer_at(version)
        start = time.perf_counter()
        trainer.publish(
            urls,
            self.weight_version(version),
            transport=self._transport,
            model_path=self._model_path,
            directory=self.store.path(f"{self.keys.prefix}/published") if self.store.is_local else tempfile.gettempdir(),
        )
        seconds = time.perf_counter() - start
        self.display.published(seconds)
        self.tracker.log(f"publish-{version}-{time.time_ns()}", {"perf/update_weights_time": seconds}, step=max(0, version - 1))

    def weight_version(self, version: int) -> str:
        """What engines report while they serve this run's policy `version`."""
        return f"{self.keys.run}/{version}"

    def _end_processes(self) -> None:
        """End trainer, engines and our Ray; those that another driver has taken over are left."""
        trainer, self._trainer = self._trainer, None
        engines, self._engines = self._engines, None
        if self._cluster is not None and self._cluster.alive():
            if engines is not None:
                engines.stop()
            if trainer is not None:
                trainer.kill()
        self._end_cluster()

    @property
    def _colocated(self) -> bool:
        return self.config.rollout.rollout_num_gpus is None

    @property
    def _model_path(self) -> str:
        return str(Path(self.config.convert.hf_checkpoint).resolve())

    @property
    def _transport(self) -> Literal["tensor", "disk"]:
        """Memory is shared on one machine without GPUs, and between processes on the same GPU; else the disk carries the weights."""
        from engines.sglang.external import is_on_this_machine

        if external := self.config.rollout.rollout_external_engine_addrs:
            in_memory = not self.cluster.num_gpus and all(map(is_on_this_machine, external))
        else:
            in_memory = self._colocated or not self.cluster.num_gpus
        return self.config.run.update_weight_transport or ("tensor" if in_memory else "disk")

    def _new_trainer(self, cluster: Cluster, config: PostTrainConfig) -> TrainerGroup:
        from engines.megatron.shape import ModelShape
        from stages.train.group import TrainerGroup
        from stages.train.spec import TrainerSpec

        spec = TrainerSpec(
            run=self.keys.run,
            shape=ModelShape.from_hf(self.config.convert.hf_checkpoint),
            config=config.train,
            temperature=config.rollout.rollout_temperature,
            store=self.store.uri,
            store_options=self.config.run.store_options,
        )
        return TrainerGroup(cluster, spec)

    @property
    def _log_dir(self) -> str | None:
        return self.store.path(f"{self.keys.prefix}/logs") if self.store.is_local else None

    def _new_engines(self, cluster: Cluster) -> EnginePool:
        from engines.sglang.args import repeatable, returning_experts
        from engines.sglang.pool import EnginePool
        from engines.sglang.server import ServerSpec
        from engines.sglang.supervisor import HealthCheck

        rollout, train = self.config.rollout, self.config.train
        has_gpus = cluster.num_gpus > 0
        num_gpus = rollout.rollout_num_gpus or train.num_ranks
        args = returning_experts(rollout.sglang) if train.use_rollout_routing_replay else rollout.sglang
        if rollout.rollout_sampling_seeds:
            if not has_gpus and not rollout.rollout_external_engine_addrs:
                raise ValueError(
                    "--rollout-sampling-seeds: SGLang repeats a seed's tokens on GPUs alone, and there is none: leave it out"
                )
            args = repeatable(args)
        spec = ServerSpec(
            model_path=self._model_path,
            weight_version=self.weight_version(0),  # what it loads is what every policy of the run begins with
            port=rollout.sglang_port,
            args=args,
            tensor_parallel=rollout.rollout_num_gpus_per_engine if has_gpus else 1,
            threads=rollout.sglang_threads or 1,
            python=rollout.sglang_python,
            pythonpath=rollout.sglang_pythonpath,
            log_dir=self._log_dir,
            start_timeout=rollout.sglang_start_timeout,
        )
        return EnginePool(
            cluster,
            spec,
            num_gpus // rollout.rollout_num_gpus_per_engine if has_gpus else rollout.num_engines,
            offset=0 if self._colocated else train.num_ranks,
            health=HealthCheck(
                interval=rollout.rollout_health_check_interval,
                timeout=rollout.rollout_health_check_timeout,
                failures=rollout.rollout_health_check_failures,
                max_restarts=rollout.engine_restarts,
            ),
            external=rollout.rollout_external_engine_addrs,
            listener=self.router.lead_to if self.router else lambda urls: None,
        )

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
