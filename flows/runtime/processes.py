"""The processes of one flow run: Ray, the trainer, the engines and their router.

They start on first use and can be replaced at any time: a stage requests them at a policy version
(`restore_trainer_at`, `engines_at`), whose weights are restored from the store if necessary.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from penstock.engines.backends import engine_backend
from penstock.engines.local_gpus import Counters, all_counters, read_counters, used_joules
from penstock.engines.serving.adapter_requests import BASE, AdapterNames
from penstock.engines.serving.endpoints import engine_url
from penstock.engines.training import MemorySwitch
from penstock.engines.weights.routes import add_upload
from penstock.engines.weights.weight_check import INITIAL, update_and_check
from penstock.flows.config import PostTrainConfig
from penstock.flows.debugging.config import DebugConfig
from penstock.flows.options.adapters import adapter_of_version, with_adapters
from penstock.flows.options.start_weights import starting_weights
from penstock.flows.runtime.engine_options import TEACHER, engine_options, run_placement, teacher_options
from penstock.flows.runtime.runs import logs_of_run, missing_fork_checkpoint
from penstock.flows.turns import Turns
from penstock.storage.commit import CheckpointRef, RunKeys
from penstock.storage.failpoints import failpoint
from penstock.storage.history.run_record import RunRecord, read_run_record
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.engines.backends import RequestRouter
    from penstock.engines.cluster import Cluster, ClusterStart
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.generation import EngineClient, WeightTransport
    from penstock.engines.options import EngineOptions
    from penstock.engines.serving.pool import EnginePool
    from penstock.stages.train.restore import PolicyRestorer
    from penstock.stages.train.trainer_group import TrainerGroup


_ray_start: ClusterStart | None = None  # inside `ray_starting`


@contextmanager
def ray_starting(config: PostTrainConfig) -> Iterator[None]:
    """Start the run's local Ray in a thread, for the `Processes` that are created during the block."""
    global _ray_start
    if config.run.ray_address is not None:
        yield
        return
    from penstock.engines.cluster import ClusterStart

    _ray_start = ClusterStart(namespace_of_run(config.run.run), run_placement(config))
    try:
        yield
    finally:
        start, _ray_start = _ray_start, None
        if (cluster := start.take()) is not None:  # the flow did not begin
            cluster.stop()


def namespace_of_run(run: str) -> str:
    """Return the Ray namespace of a run's actors."""
    return f"penstock-{run}"


class Processes:
    """Starts, restores and stops the Ray cluster, trainer, engines and router of one run.

    Args:
        config: the run's config.
        store: the run's store.
        keys: store keys of the run's files.
        provenance: fields to add to every commit (config hash and code version).
        note: prints a message for the user.
        on_published: called after each weight update with (policy version, metrics, moves of state between devices and
            host memory since the previous weight update).
        has_trainer: whether the flow run has a trainer, which sends weights to the engines.
    """

    def __init__(
        self,
        config: PostTrainConfig,
        store: Store,
        keys: RunKeys,
        provenance: dict[str, Any],
        note: Callable[[str], None],
        on_published: Callable[[int, dict[str, float], list[MemorySwitch]], None],
        *,
        has_trainer: bool = True,
    ) -> None:
        self.config = config
        self.store = store
        self.keys = keys
        self.provenance = provenance
        self.note = note
        self.on_published = on_published
        self.has_trainer = has_trainer
        self._base: CheckpointRef | None = None
        self._entered = ExitStack()
        self._starting = threading.RLock()  # the thread that saves a checkpoint uses the same processes
        self._cluster: Cluster | None = None
        self._trainer: TrainerGroup | None = None
        self._engines: EnginePool | None = None
        self._eval_engines: EnginePool | None = None  # with --eval-mode apart
        self._teacher: EnginePool | None = None  # of --opd-teacher-load in an engine
        self._shared_for_evaluation: Callable[[], list[str]] | None = None  # their addresses in `share_engines_at`
        self._switches: list[MemorySwitch] = []  # since the last weight update
        self._counters_at_start = all_counters()
        run = config.run
        max_ahead = run.num_rollout if run.debug_rollout_only else run.async_buffer_size
        self.turns = Turns(max_ahead, run.update_weights_interval)
        # Policy version and address function inside `share_engines_at` and `engines_for_stream`.
        self._shared: tuple[int, Callable[[], list[str]]] | None = None
        self._serving = threading.RLock()  # held by the thread whose block keeps the engines at a policy version
        self.stream_ended = threading.Event()  # cleared inside `engines_for_stream`
        self.stream_ended.set()

    @property
    def base_checkpoint(self) -> CheckpointRef:
        """Return the converted model: the weights of policy version 0."""
        assert self._base is not None, "base_checkpoint is not set: run the convert stage first"
        return self._base

    @base_checkpoint.setter
    def base_checkpoint(self, base: CheckpointRef) -> None:
        self._base = base

    @cached_property
    def _run_record(self) -> RunRecord | None:
        return read_run_record(self.store, self.keys)

    @cached_property
    def _options(self) -> EngineOptions:
        """Return the engine options. New engines load the weights of --hf-checkpoint and report policy version 0. They
        report "hf-checkpoint" with --check-weight-update-equal, and if version 0 has other weights: the trainer then
        sends them version 0."""
        logs = logs_of_run(self.store, self.keys)
        start, run = starting_weights(self.config), self.config.run
        awaits_weights = run.check_weight_update_equal or (
            self.has_trainer and start != self.config.convert.hf_checkpoint
        )
        version = INITIAL if awaits_weights else self.weight_version(0)
        options = engine_options(self.config)
        if self.has_trainer:
            options = with_adapters(options, self.config, self._run_record.parent if self._run_record else None)
        if options.adapters is not None:
            version = BASE
        return options.replace_spec_fields(weight_version=version, log_dir=logs and str(logs))

    @cached_property
    def _adapter_names(self) -> AdapterNames:
        created_at = self._run_record.created_at if self._run_record else None
        return AdapterNames(f"{self.store.uri} {self.keys.run} {created_at}")

    @cached_property
    def router(self) -> RequestRouter | None:
        """Return the started router in front of the engines, or None if none is configured."""
        router = engine_backend(self._options.engine).create_router(self._options)
        return None if router is None else self._entered.enter_context(router)

    @property
    def engine_client_factory(self) -> Callable[..., EngineClient]:
        """Return a function: engine URLs -> client that sends its requests to the router, if there is one."""
        return partial(
            engine_backend(self._options.engine).connect, router=self.router.address if self.router else None
        )

    @property
    def evaluation_client_factory(self) -> Callable[..., EngineClient]:
        """Return `engine_client_factory` for evaluations. The router does not know engines that only evaluate."""
        return engine_backend(self._options.engine).connect if self.evaluates_apart else self.engine_client_factory

    @property
    def training_client_factory(self) -> Callable[..., EngineClient]:
        """Return `engine_client_factory` for training rollouts. With --use-rollout-routing-replay, its clients also
        request the ids of the experts that each token was routed to."""
        if not self._options.return_experts:
            return self.engine_client_factory
        from penstock.engines.families.shape import experts_format

        return partial(self.engine_client_factory, experts=experts_format(self.shape, "--use-rollout-routing-replay"))

    @property
    def cluster(self) -> Cluster:
        """Return the Ray cluster: the external one at --ray-address, else the run's own, restarted if it died."""
        with self._starting:
            if self._cluster is not None and not self._cluster.alive():
                self.note("the run's Ray cluster died; starting a new one")
                self._trainer = self._engines = self._eval_engines = self._teacher = None
                self._stop_cluster()
            if self._cluster is None and _ray_start is not None:
                self._cluster = _ray_start.take()
            if self._cluster is None:
                from penstock.engines.cluster import Cluster

                self._cluster = Cluster.start(
                    self.config.run.ray_address,
                    namespace=namespace_of_run(self.keys.run),
                    options=run_placement(self.config),
                )
            return self._cluster

    @property
    def trainer(self) -> TrainerGroup:
        """Return the trainer, whichever policy version it has, or create it if there is none."""
        with self._starting:
            cluster = self.cluster  # first, because a new cluster resets the trainer
            if self._trainer is None:
                self._trainer = self._new_trainer(cluster, self.config)
            return self._trainer

    def start_trainer(self) -> None:
        """Start the trainer's processes, without models, unless `materialize_fork` needs another trainer first. Does
        not wait until they have imported torch and Megatron (5-15 s)."""
        if self._run_record and missing_fork_checkpoint(self.store, self._run_record) is None:
            self.trainer.start_processes()

    def restore_trainer_at(self, version: int) -> TrainerGroup:
        """Return the trainer at policy `version`. If the trainer has another version, first load the newest checkpoint
        up to `version` and replay the rounds after that checkpoint."""
        self.policy_restorer.restore(version)
        return self.trainer

    @property
    def policy_restorer(self) -> PolicyRestorer:
        """Return the object that restores, trains and saves policy versions of the run with the trainer."""
        return self._new_restorer(self.trainer)

    def _new_restorer(self, trainer: TrainerGroup) -> PolicyRestorer:
        from penstock.stages.train.restore import PolicyRestorer

        return PolicyRestorer(
            self.store,
            self.keys,
            trainer,
            self.base_checkpoint,
            provenance=self.provenance,
            on_progress=self.note,
            read_counters=self.read_trainer_counters,
        )

    def read_trainer_counters(self) -> Counters:
        """Return the energy counters of the trainer's GPUs; {} if they are not measured."""
        places = self._trainer.places() if self._trainer is not None else []
        return self._read_counters([(place.node, gpu) for place in places for gpu in place.gpu_ids])

    def read_engine_counters(self, *, evaluation: bool = False) -> Counters:
        """Return the energy counters of the engines' GPUs, with `evaluation` of those that evaluate; {} if they are not
        measured."""
        engines = self._eval_engines if evaluation and self.evaluates_apart else self._engines
        pools = [engines] if evaluation else [engines, self._teacher]
        return self._read_counters([gpu for pool in pools if pool is not None for gpu in pool.gpus()])

    def used_joules(self) -> float | None:
        """Return the energy in joules that the GPUs of trainer and engines have used since this object was created, or
        None if it is not measured. Call it before `stop_all`, which forgets whose GPUs they are."""
        now = {
            **self.read_trainer_counters(),
            **self.read_engine_counters(),
            **self.read_engine_counters(evaluation=True),
        }
        return used_joules({gpu: at_start for gpu, at_start in self._counters_at_start.items() if gpu in now}, now)

    def _read_counters(self, gpus: list[tuple[str, str]]) -> Counters:
        if not gpus or self._cluster is None or not self._cluster.alive():
            return {}
        return read_counters(gpus, self._cluster.driver_node())

    def materialize_fork(self) -> None:
        """In a fork whose training options differ from its parent's, save a checkpoint of the policy at the fork point.

        The policy is recomputed by replaying the rounds before the fork point with the parent's options.
        """
        assert self._run_record is not None
        if (fork_point := missing_fork_checkpoint(self.store, self._run_record)) is None:
            return
        version, parent_config = fork_point
        parent_config = parent_config.model_copy(update={"debug": DebugConfig()})  # its files are those of its own run
        trainer = self._new_trainer(self.cluster, parent_config)
        try:
            self._new_restorer(trainer).save_checkpoint(version)
        finally:
            trainer.kill()

    def start_engines(self) -> EnginePool:
        """Return the engine pool, whichever policy version it serves.

        The first call starts the engines and does not wait until they have loaded the model (20-60 s).
        """
        from penstock.engines.serving.pool import start_pool

        with self._starting:
            cluster = self.cluster
            if self._engines is None:
                engines = start_pool(cluster, self._options)
                if self.evaluates_apart:
                    self._eval_engines = engines.split(self.config.eval.eval_num_engines)
                self._engines = engines
                if self.router is not None:
                    self._engines.listener = self.router.set_backends
                if self.has_trainer and teacher_options(self.config) is not None:
                    self._start_teacher()
            return self._engines

    @contextmanager
    def serving_teacher(self) -> Iterator[Callable[[], list[str]]]:
        """Keep the engine of --opd-teacher-load running during the block. Yields a function that returns its address,
        or nothing while it restarts."""
        with self._start_teacher().serving(TEACHER, _refuse_weights) as urls:
            yield urls

    def _start_teacher(self) -> EnginePool:
        """Return the pool with the teacher's engine; the first call starts it and does not wait."""
        from penstock.engines.serving.pool import start_pool

        with self._starting:
            cluster = self.cluster
            if self._teacher is None:
                options = teacher_options(self.config)
                assert options is not None, "the run has no engine for a teacher"
                first_gpu = run_placement(self.config).end_of_engines(cluster.gpus_per_node)
                log_dir = self._options.spec.log_dir and f"{self._options.spec.log_dir}/teacher"
                options = replace(options, trainer_gpus=first_gpu).replace_spec_fields(log_dir=log_dir)
                self._teacher = start_pool(cluster, options)
            return self._teacher

    def describe_engines(self) -> str:
        """Return how many engines have started, and their policy version; "" before their start. Does not wait."""
        pools = [pool for pool in (self._engines, self._eval_engines) if pool is not None]
        started = [ready for pool in pools for ready in pool.have_started()]
        if not all(started):
            return f"{sum(started)} of {len(started)} engines started"
        version = self.turns.engine_version
        policy = "" if version is None else f" at version {version}"
        return f"{len(started)} engine{'s'[: len(started) - 1]}{policy}" if started else ""

    @contextmanager
    def engines_for_rollout(self, rollout_id: int) -> Iterator[tuple[int, Callable[[], list[str]]]]:
        """Wait until rollout `rollout_id` may start, and load the policy version that generates it into all engines.
        Yields this version and a function that returns the addresses of the live engines."""
        version = self.turns.begin_rollout(rollout_id)
        try:
            with self.engines_at(version, rewind=False) as urls:
                yield version, urls
        except BaseException:
            self.turns.forget_weights()  # the trainer may have a newer version by now
            raise
        finally:
            self.turns.end_turn()

    @contextmanager
    def engines_at(self, version: int, *, rewind: bool = True) -> Iterator[Callable[[], list[str]]]:
        """Load policy `version` into all engines, and into engines that restart during the block. Yields a function
        that returns the addresses of the live engines.

        If another thread is inside such a block or inside `engines_for_stream`, wait until it ends or shares the
        engines at this version. A stream at another version does not end before all its rounds: RuntimeError.

        Args:
            version: the policy version.
            rewind: whether a trainer that has a newer version is restored to `version`; otherwise RuntimeError is
                raised.
        """
        while True:
            shared = self._shared
            if shared is not None and shared[0] == version:
                yield shared[1]
                return
            if shared is not None and not self.stream_ended.is_set():
                raise RuntimeError(f"the engines have got the weights of version {shared[0]} meanwhile")
            if shared is None and self._serving.acquire(timeout=0.1):
                break
            time.sleep(0.1 if shared else 0.0)
        try:
            engines = self.start_engines()
            self._offload_trainer(keep_weights=True)
            publish = partial(self._publish, version, rewind=rewind)
            with engines.serving(self.weight_version(version), publish) as urls:
                self.turns.weights_sent(version)
                self._offload_trainer()
                yield urls
        finally:
            self._serving.release()

    @property
    def evaluates_apart(self) -> bool:
        """Return whether evaluations have engines of their own."""
        return self.config.eval.eval_mode == "apart" and self.has_trainer

    @contextmanager
    def engines_for_evaluation(self, version: int) -> Iterator[Callable[[], list[str]]]:
        """Load policy `version` into the engines that evaluate, as `engines_at`."""
        # A trainer that trains the next rounds meanwhile is not restored.
        rewind = not self.turns.is_evaluating
        if not self.evaluates_apart:
            with self.engines_at(version, rewind=rewind) as urls:
                yield urls
        elif self._shared_for_evaluation is not None:
            yield self._shared_for_evaluation
        else:
            publish = partial(self._publish, version, rewind=rewind)
            with self._pool_for_evaluation.serving(self.weight_version(version), publish) as urls:
                yield urls

    def publish_for_evaluation(self, version: int) -> None:
        """Load policy `version`, the trainer's, into the engines that only evaluate."""
        self._pool_for_evaluation.update_to_version(self.weight_version(version), partial(self._publish, version))

    @property
    def _pool_for_evaluation(self) -> EnginePool:
        self.start_engines()
        assert self._eval_engines is not None
        return self._eval_engines

    @contextmanager
    def share_engines_at(self, version: int) -> Iterator[None]:
        """Let evaluations that run in parallel during the block share the engines at policy `version`."""
        with self.engines_for_evaluation(version) as urls:
            if self.evaluates_apart:
                self._shared_for_evaluation = urls
                try:
                    yield
                finally:
                    self._shared_for_evaluation = None
                return
            if self._shared is not None:  # already shared by `engines_for_stream`
                yield
                return
            self._shared = (version, urls)
            try:
                yield
            finally:
                self._shared = None

    @contextmanager
    def engines_for_stream(self) -> Iterator[Callable[[], list[str]]]:
        """Load the trainer's policy into all engines, and those that other threads publish during the block. Yields a
        function that returns the addresses of the live engines."""
        engines, turns = self.start_engines(), self.turns
        self.stream_ended.clear()
        with ExitStack() as entered:
            entered.callback(self.stream_ended.set)
            entered.enter_context(self._serving)
            with turns.sending():
                version = turns.num_trained
                publish = self._publish_newest
                urls = entered.enter_context(engines.serving(self.weight_version(version), publish))
                turns.weights_sent(version)
                self._shared = (version, urls)
            try:
                yield urls
                turns.wait_for_evaluation()
            finally:
                self._shared = None

    def publish_in_flight(self, version: int, *, during_evaluation: bool = True) -> None:
        """Load policy `version` into every engine while it generates. During an evaluation, which needs the policy that
        it began with, leave this to a later call if rollouts stay new enough, else wait for its end.

        Does nothing if the engines have no requests: they get the newest policy before the next ones.
        """
        turns, run = self.turns, self.config.run
        if turns.is_evaluating and not self.evaluates_apart:
            sent = turns.engine_version
            if sent is None:  # the engines of the evaluation are starting, after a restart of the driver
                return
            if during_evaluation and version + run.update_weights_interval - sent <= run.max_staleness:
                return
            turns.wait_for_evaluation()
        if self._shared is None or turns.engine_version == version:
            return
        self.start_engines().update_while_serving(self.weight_version(version), self._publish_newest)
        if self._shared is not None:
            self._shared = (version, self._shared[1])
        turns.weights_sent(version)

    def _publish_newest(self, urls: list[str]) -> None:
        """Send the newest policy to the engines at `urls`, even if the others have an older one."""
        with self.turns.sending():
            self._send_weights(self.turns.num_trained, urls, rewind=False)

    def publish_weights(self, version: int) -> None:
        """Load policy `version` into every engine."""
        engines = self.start_engines()
        self._offload_trainer(keep_weights=True)
        engines.update_to_version(self.weight_version(version), partial(self._publish, version))
        self.turns.weights_sent(version)

    def _publish(self, version: int, urls: list[str], *, rewind: bool = True) -> None:
        with self.turns.sending():
            self._send_weights(version, urls, rewind=rewind)

    def _send_weights(self, version: int, urls: list[str], *, rewind: bool) -> None:
        if not rewind and (state := self.trainer.policy_state()) is not None and state.version > version:
            raise RuntimeError(  # not a ValueError, which is not retried
                f"an engine needs the weights of version {version}, but the trainer has version {state.version}: a "
                "rollout starts again with these and keeps its finished groups; an evaluation follows later"
            )
        trainer = self.restore_trainer_at(version)
        start = time.perf_counter()
        transport = self._weight_transport(trainer, urls, version)
        metrics: dict[str, float] = {}
        if transport.adapter is not None:
            metrics = self._publish_adapter(trainer, urls, version, transport)
        elif self.config.run.check_weight_update_equal:
            metrics = self._publish_and_check(trainer, urls, version, transport)
        else:
            trainer.publish(urls, self.weight_version(version), transport)
        if self.config.run.offloads_engines:
            self._offload_trainer()  # the KV cache needs the memory of the weights
            failpoint("engines-without-cache")
            with self._record_memory_switch("engines: resume KV cache"):
                self.engine_client_factory(urls).resume_kv_cache()
        metrics["perf/update_weights_time"] = time.perf_counter() - start - metrics.get("perf/check_weights_time", 0.0)
        if self.config.run.alternates_trainer_and_engines:
            self._switches += trainer.take_memory_switches()
        switches, self._switches = self._switches, []
        self.on_published(version, metrics, switches)

    def _publish_adapter(
        self, trainer: TrainerGroup, urls: list[str], version: int, transport: WeightTransport
    ) -> dict[str, float]:
        """Send the adapters of policy `version` to the engines at `urls`, make later requests use them, and return
        metrics."""
        adapter = transport.adapter
        assert adapter is not None, "the engines get weights"
        trainer.publish(urls, self.weight_version(version), transport)
        failpoint("adapter-loaded")
        self.engine_client_factory(urls).use_adapter(adapter.name)
        return {"perf/checked_weight_tensors": adapter.num_tensors} if adapter.compare else {}

    def _weight_transport(self, trainer: TrainerGroup, urls: list[str], version: int) -> WeightTransport:
        """Return the transport of policy `version` to the engines at `urls`. If it is disk, the files are written to
        --update-weight-disk-dir, else to a local store, else to the trainer machine's temporary directory, from which
        they are uploaded to the store if engines run on other machines."""
        from penstock.engines.generation import WeightUpload

        engines, prefix = self.start_engines(), f"{self.keys.prefix}/published"
        places, ranks = engines.places(urls), trainer.places()
        directory = self.config.run.update_weight_disk_dir or (self.store.path(prefix) if self.store.is_local else None)
        transport = self._options.weight_transport(places, ranks, directory or tempfile.gettempdir())
        if self._options.adapters is not None:
            name, path = self.weight_version(version), self.config.convert.hf_checkpoint
            compare = self.config.run.check_weight_update_equal
            adapter = adapter_of_version(
                name, self._adapter_names, self.config.train, self.shape, path, compare=compare
            )
            transport = replace(transport, adapter=adapter)
        if directory is not None:
            return transport
        upload = WeightUpload(self.store.uri, self.store.options, prefix, engines.actors(urls))
        return add_upload(transport, places, ranks[0].node, upload)

    def _publish_and_check(
        self, trainer: TrainerGroup, urls: list[str], version: int, transport: WeightTransport
    ) -> dict[str, float]:
        """Send the weights of policy `version` to the engines at `urls`, check every tensor, and return metrics."""
        skipped = self._reason_against_initial_comparison() if version == 0 else None
        if skipped:
            self.note(f"the weights that engines load from --hf-checkpoint are not compared with version 0: {skipped}")
        start, client = time.perf_counter(), self.engine_client_factory(urls)
        num_tensors, update_time = update_and_check(
            client,
            partial(trainer.publish, urls),
            self.weight_version(version),
            transport,
            is_initial=version == 0 and not skipped,
        )
        self.note(f"weights of version {version} are equal in trainer and engines: {num_tensors} tensors compared")
        check_time = time.perf_counter() - start - update_time
        return {"perf/checked_weight_tensors": num_tensors, "perf/check_weights_time": check_time}

    def _reason_against_initial_comparison(self) -> str | None:
        """Return why the weights of --hf-checkpoint may differ from those that the trainer sends as version 0; None if
        they must be equal."""
        from penstock.engines.weights.fp8_blocks import fp8_weights, keeps_scales

        path, start = self.config.convert.hf_checkpoint, starting_weights(self.config)
        if start != path:
            return f"version 0 has the weights of {start}"
        if fp8_weights(path) and not keeps_scales(path):
            return "its fp8 scales are not amax / 448 of bf16 weights, so they change when they are computed again"
        return None

    def _offload_trainer(self, keep_weights: bool = False) -> None:
        """With --offload-train, move the trainer's state to host memory; the trainer moves it back on next use."""
        if self._trainer is not None and self.config.run.offloads_trainer:
            self._trainer.offload(keep=("weights",) if keep_weights else ())
            failpoint("trainer-offloaded")

    def _release_engines(self) -> None:
        """With --offload-rollout, release the GPU memory of the engines before the trainer uses it, also of engines
        that a previous driver of this run left running on an external Ray cluster."""
        run = self.config.run
        if not run.offloads_engines or run.debug_train_only or self.config.train.loss_type == "sft_loss":
            return
        if self._engines is None and not self.cluster.owned:
            self.start_engines()
        if self._engines is not None:
            with self._record_memory_switch("engines: release weights and KV cache"):
                self._engines.release_memory()
            failpoint("engines-released")

    @contextmanager
    def _record_memory_switch(self, name: str) -> Iterator[None]:
        """Record a `MemorySwitch` for the block: its duration, and memory use of trainer rank 0 before and after."""
        trainer, start = self._trainer, time.perf_counter()
        before = trainer.memory_use() if trainer else (0, 0)
        yield
        seconds, after = time.perf_counter() - start, trainer.memory_use() if trainer else (0, 0)
        self._switches.append(
            MemorySwitch(
                name=name,
                seconds=seconds,
                device_bytes_before=before[0],
                device_bytes_after=after[0],
                host_bytes_before=before[1],
                host_bytes_after=after[1],
            )
        )

    def weight_version(self, version: int) -> str:
        """Return the weight version that engines report while they serve policy `version`: `RUN/VERSION`."""
        return f"{self.keys.run}/{version}"

    def stop_all(self) -> None:
        """Stop the router, the engines, the trainer and the run's own Ray cluster.

        Engines that another driver of this run has taken over (adopted) keep running.
        """
        self._entered.close()
        trainer, self._trainer = self._trainer, None
        pools = [pool for pool in (self._engines, self._eval_engines, self._teacher) if pool is not None]
        self._teacher = None
        self._engines = self._eval_engines = None
        if pools and self._options.adapters is not None and (external := self._options.external):
            engine_backend(self._options.engine).connect(list(map(engine_url, external))).unload_adapters()
        if self._cluster is not None and self._cluster.alive():
            for pool in pools:
                pool.stop()
            if trainer is not None:
                trainer.kill()
        self._stop_cluster()

    @property
    def shape(self) -> ModelShape:
        """Return the shape of --hf-checkpoint."""
        from penstock.engines.families import read_shape

        return read_shape(self.config.convert.hf_checkpoint, self.config.convert.model_family_path)

    def _new_trainer(self, cluster: Cluster, config: PostTrainConfig) -> TrainerGroup:
        from penstock.stages.train.spec import TrainerSpec
        from penstock.stages.train.trainer_group import TrainerGroup

        spec = TrainerSpec(
            run=self.keys.run,
            shape=self.shape,
            config=config.train,
            temperature=config.rollout.rollout_temperature,
            engine=config.rollout.engine,
            store=self.store.uri,
            store_options=self.store.options,  # with resolved secrets: another process cannot resolve the references
            network_interface=self.config.run.network_interface,
            diagnostics=config.debug.diagnostics,
        )
        group = TrainerGroup(cluster, spec)
        group.before_onload = self._release_engines
        return group

    def _stop_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


def _refuse_weights(urls: list[str]) -> None:
    """Raise ConnectionError: the teacher's weights are those of its model, so an engine without them has died."""
    raise ConnectionError(f"the teacher's engine at {', '.join(urls)} does not answer")
