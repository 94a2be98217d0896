"""The processes of one flow run: Ray, the trainer, the engines and their router.

They start on first use and can be replaced at any time: a stage requests them at a policy version
(`restore_trainer_at`, `PolicyEngines.at`), whose weights are restored from the store if necessary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial

from penstock.engines.backends import RequestRouter, engine_backend
from penstock.engines.cluster import Cluster, ClusterStart
from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.generation import EngineClient
from penstock.engines.local_gpus import Counters, read_counters, used_joules
from penstock.engines.options import EngineOptions
from penstock.engines.serving.endpoints import BASE, engine_url
from penstock.engines.serving.pool import EnginePool, start_pool
from penstock.engines.training import MemorySwitch
from penstock.engines.weights.transfer import INITIAL
from penstock.flows.config import PostTrainConfig
from penstock.flows.debug_config import DebugConfig
from penstock.flows.options.adapters import with_adapters
from penstock.flows.runtime.engine_options import TEACHER, engine_options, run_placement, teacher_options
from penstock.flows.runtime.runs import ActiveRun, logs_of_run, missing_fork_checkpoint
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef
from penstock.storage.failpoints import failpoint

NAMESPACE = "penstock-"  # begins the Ray namespace of the actors of a run
_early_ray: ContextVar[ClusterStart | None] = ContextVar("early_ray", default=None)  # inside `ray_starting`


@contextmanager
def ray_starting(config: PostTrainConfig) -> Iterator[None]:
    """Start the run's local Ray in a thread, for the `Processes` that are created during the block."""
    if config.run.ray_address is not None:
        yield
        return
    start = ClusterStart(NAMESPACE + config.run.run, run_placement(config)).start()
    token = _early_ray.set(start)
    try:
        yield
    finally:
        _early_ray.reset(token)
        if (cluster := start.take()) is not None:  # the flow did not begin
            cluster.stop()


class Processes:
    """Starts, restores and stops the Ray cluster, trainer and engines of one run. A context manager.

    Args:
        run: the run.
        note: prints a message for the user.
        has_trainer: whether the flow run has a trainer, which sends weights to the engines.

    Attributes:
        base_checkpoint: the converted model, which has the weights of policy version 0.
        pools: the engines that were started: "rollout", with --eval-mode apart "evaluation", and "teacher".
        memory_switches: moves of state between devices and host memory since the last weight update.
    """

    def __init__(self, run: ActiveRun, note: Callable[[str], None], *, has_trainer: bool = True) -> None:
        self.run = run
        self.note = note
        self.has_trainer = has_trainer
        self.evaluates_apart = run.config.eval.eval_mode == "apart" and has_trainer  # on engines for evaluations only
        self.base_checkpoint: CheckpointRef | None = None
        self.pools: dict[str, EnginePool] = {}
        self.memory_switches: list[MemorySwitch] = []
        self.started_trainer: TrainerGroup | None = None
        self._early_ray = _early_ray.get()
        self._cluster: Cluster | None = None
        self._entered = ExitStack()  # holds the router
        self._starting = threading.RLock()  # the thread that saves a checkpoint uses the same processes

    @property
    def cluster(self) -> Cluster:
        """Return the Ray cluster: the external one at --ray-address, else the run's own, restarted if it died."""
        with self._starting:
            if self._cluster is not None and not self._cluster.alive():
                self.note("the run's Ray cluster died; starting a new one")
                self.started_trainer = None
                self.pools.clear()
                self._cluster.stop()
                self._cluster = None
            if self._cluster is None and self._early_ray is not None:
                self._cluster = self._early_ray.take()
            if self._cluster is None:
                self._cluster = Cluster.start(
                    self.run.config.run.ray_address,
                    namespace=NAMESPACE + self.run.keys.run,
                    options=run_placement(self.run.config),
                )
            return self._cluster

    # ---- the trainer -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerGroup:
        """Return the trainer, whichever policy version it has, or create it if there is none."""
        with self._starting:
            cluster = self.cluster  # first, because a new cluster resets the trainer
            if self.started_trainer is None:
                offloads = self.run.config.run.offloads_trainer and "rollout" in self.pools  # engines will generate
                self.started_trainer = self.new_trainer(cluster, self.run.config, offloads=offloads)
            return self.started_trainer

    def restore_trainer_at(self, version: int) -> TrainerGroup:
        """Return the trainer at policy `version`. If the trainer has another version, first load the newest checkpoint
        up to `version` and replay the rounds after that checkpoint."""
        self.policy_restorer().restore(version)
        return self.trainer

    def policy_restorer(self, trainer: TrainerGroup | None = None) -> PolicyRestorer:
        """Return the object that restores, trains and saves policy versions of the run with a trainer; default: the
        run's trainer."""
        assert self.base_checkpoint is not None, "base_checkpoint is not set: run the convert stage first"
        return PolicyRestorer(
            self.run.store,
            self.run.keys,
            trainer or self.trainer,
            self.base_checkpoint,
            provenance=self.run.provenance,
            on_progress=self.note,
            read_counters=partial(self.counters, "trainer"),
        )

    def new_trainer(self, cluster: Cluster, config: PostTrainConfig, *, offloads: bool = False) -> TrainerGroup:
        """Return a new trainer, whose processes start on first use. `offloads`: see `TrainerGroup`."""
        spec = TrainerSpec(
            run=self.run.keys.run,
            shape=self.shape,
            config=config.train,
            temperature=config.rollout.rollout_temperature,
            engine=config.rollout.engine,
            store=self.run.store.uri,
            store_options=self.run.store.options,  # with resolved secrets: another process cannot resolve references
            network_interface=self.run.config.run.network_interface,
            diagnostics=config.debug.diagnostics,
        )
        return TrainerGroup(cluster, spec, before_onload=self.release_engines, offloads=offloads)

    # ---- the engines -------------------------------------------------------------------------------------------------

    @cached_property
    def engine_options(self) -> EngineOptions:
        """Return the engine options. New engines load the weights of --hf-checkpoint and report policy version 0. If
        version 0 has other weights, or with --check-weight-update-equal, they report "hf-checkpoint" instead, and the
        trainer sends them version 0."""
        logs = logs_of_run(self.run.store, self.run.keys)
        awaits_weights = self.run.config.run.check_weight_update_equal or (
            self.has_trainer and self.run.config.start_weights != self.run.config.convert.hf_checkpoint
        )
        version = INITIAL if awaits_weights else f"{self.run.keys.run}/0"
        options = engine_options(self.run.config)
        if self.has_trainer:
            options = with_adapters(options, self.run.config, self.run.record.parent if self.run.record else None)
        if options.adapters is not None:
            version = BASE
        return options.replace_spec_fields(weight_version=version, log_dir=logs and str(logs))

    @cached_property
    def router(self) -> RequestRouter | None:
        """Return the started router in front of the engines, or None if none is configured."""
        router = engine_backend(self.engine_options.engine).create_router(self.engine_options)
        return None if router is None else self._entered.enter_context(router)

    @cached_property
    def shape(self) -> ModelShape:
        """Return the shape of --hf-checkpoint."""
        return read_shape(self.run.config.convert.hf_checkpoint, self.run.config.convert.model_family_path)

    @property
    def connect(self) -> Callable[..., EngineClient]:
        """Return a function: engine URLs -> client that sends its requests to the router, if there is one."""
        return partial(
            engine_backend(self.engine_options.engine).connect, router=self.router.address if self.router else None
        )

    @property
    def connect_for_evaluation(self) -> Callable[..., EngineClient]:
        """Return `connect` for evaluations. The router does not know engines that only evaluate."""
        return engine_backend(self.engine_options.engine).connect if self.evaluates_apart else self.connect

    def start_engines(self, role: str = "rollout") -> EnginePool:
        """Return the engines that generate rollouts, or with `role` "evaluation" those that only evaluate, whichever
        policy version they serve. The first call starts them and does not wait until they have loaded the model
        (20-60 s)."""
        with self._starting:
            cluster = self.cluster
            if "rollout" not in self.pools:
                engines = start_pool(cluster, self.engine_options)
                if self.evaluates_apart:
                    self.pools["evaluation"] = engines.split(self.run.config.eval.eval_num_engines)
                self.pools["rollout"] = engines
                if self.router is not None:
                    engines.listener = self.router.set_backends
                if self.has_trainer and teacher_options(self.run.config) is not None:
                    self._start_teacher()
            return self.pools[role]

    def serving_teacher(self) -> AbstractContextManager[Callable[[], list[str]]]:
        """Start the engine of --opd-teacher-engine, and keep it running during a block. The block gets a function that
        returns the engine's address, or nothing while it restarts."""
        return self._start_teacher().serving(TEACHER, _refuse_weights)

    def _start_teacher(self) -> EnginePool:
        """Return the pool with the teacher's engine; the first call starts it and does not wait."""
        with self._starting:
            cluster = self.cluster
            if "teacher" not in self.pools:
                options = teacher_options(self.run.config)
                assert options is not None, "the run has no engine for a teacher"
                first_gpu = run_placement(self.run.config).end_of_engines(cluster.gpus_per_node)
                log_dir = self.engine_options.spec.log_dir and f"{self.engine_options.spec.log_dir}/teacher"
                options = replace(options, trainer_gpus=first_gpu).replace_spec_fields(log_dir=log_dir)
                self.pools["teacher"] = start_pool(cluster, options)
            return self.pools["teacher"]

    def describe_engines(self, version: int | None) -> str:
        """Return how many engines have started, and their policy `version`; "" before their start. Does not wait."""
        replicas = [each for role, pool in self.pools.items() if role != "teacher" for each in pool.replicas]
        started = [replica.known_url is not None for replica in replicas]
        if not all(started):
            return f"{sum(started)} of {len(started)} engines started"
        policy = "" if version is None else f" at version {version}"
        return f"{len(started)} engine{'s'[: len(started) - 1]}{policy}" if started else ""

    def release_engines(self) -> None:
        """With --offload-rollout, release the GPU memory of the engines before the trainer uses it, also of engines
        that a previous driver of this run left running on an external Ray cluster."""
        config = self.run.config
        if not config.run.offloads_engines or config.run.debug_train_only or config.train.loss_type == "sft_loss":
            return
        if "rollout" not in self.pools and not self.cluster.owned:
            self.start_engines()
        if (engines := self.pools.get("rollout")) is not None:
            with self.record_memory_switch("engines: release weights and KV cache"):
                engines.release_memory()
            failpoint("engines-released")

    @contextmanager
    def record_memory_switch(self, name: str) -> Iterator[None]:
        """Record a `MemorySwitch` for the block: its duration, and memory use of trainer rank 0 before and after."""
        trainer, start = self.started_trainer, time.perf_counter()
        before = trainer.memory_use() if trainer else (0, 0)
        yield
        seconds, after = time.perf_counter() - start, trainer.memory_use() if trainer else (0, 0)
        self.memory_switches.append(
            MemorySwitch(
                name=name,
                seconds=seconds,
                device_bytes_before=before[0],
                device_bytes_after=after[0],
                host_bytes_before=before[1],
                host_bytes_after=after[1],
            )
        )

    # ---- energy and end ----------------------------------------------------------------------------------------------

    def counters(self, *roles: str) -> Counters:
        """Return the energy counters of the GPUs of `roles`: "trainer", or keys of `pools`; {} if energy is not
        measured."""
        if self._cluster is None or not self._cluster.alive():
            return {}
        replicas = [replica for role in roles if role in self.pools for replica in self.pools[role].replicas]
        gpus = [gpu for replica in replicas for gpu in replica.gpus()]
        if "trainer" in roles and self.started_trainer is not None:
            gpus += [(place.node, gpu) for place in self.started_trainer.places() for gpu in place.gpu_ids]
        return read_counters(gpus, self._cluster.ray.get_runtime_context().get_node_id()) if gpus else {}

    def used_joules(self) -> float | None:
        """Return the energy in joules that the GPUs of trainer and engines have used since the start of the run, or
        None if it is not measured. Call it before `stop`, which discards the list of these GPUs."""
        now = self.counters("trainer", *self.pools)
        return used_joules({gpu: joules for gpu, joules in self.run.counters_at_start.items() if gpu in now}, now)

    def stop(self) -> None:
        """Stop the router, the engines, the trainer and the run's own Ray cluster.

        Engines that another driver of this run has taken over (adopted) keep running.
        """
        self._entered.close()
        trainer, self.started_trainer = self.started_trainer, None
        pools, self.pools = list(self.pools.values()), {}
        if pools and self.engine_options.adapters is not None and (external := self.engine_options.external):
            engine_backend(self.engine_options.engine).connect(list(map(engine_url, external))).unload_adapters()
        if self._cluster is None:
            return
        if self._cluster.alive():
            for pool in pools:
                pool.stop()
            if trainer is not None:
                trainer.kill()
        self._cluster.stop()
        self._cluster = None


def wait_for_engines_on_trainer_gpus(processes: Processes) -> None:
    """Wait until the engines that share GPUs with the trainer have started. Call this before the trainer first loads a
    policy: an engine takes a share of the GPU memory that is free while it starts."""
    options, engines = processes.engine_options, processes.pools.get("rollout")
    if engines is not None and processes.cluster.num_gpus and options.num_gpus is None and not options.external:
        _ = engines.urls  # waits


def materialize_fork(processes: Processes) -> None:
    """In a fork whose training options differ from its parent's, save a checkpoint of the policy at the fork point.

    The policy is recomputed by replaying the rounds before the fork point with the parent's options.
    """
    run = processes.run
    assert run.record is not None
    if (fork_point := missing_fork_checkpoint(run.store, run.record)) is None:
        return
    version, parent_config = fork_point
    # the parent's debug options name files of the parent
    parent_config = parent_config.model_copy(update={"debug": DebugConfig()})
    trainer = processes.new_trainer(processes.cluster, parent_config)
    try:
        processes.policy_restorer(trainer).save_checkpoint(version)
    finally:
        trainer.kill()


def _refuse_weights(urls: list[str]) -> None:
    """Raise ConnectionError instead of sending weights: the teacher loads them from its model, so an engine without
    weights has died."""
    raise ConnectionError(f"the teacher's engine at {', '.join(urls)} does not answer")
