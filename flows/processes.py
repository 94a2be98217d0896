"""The processes of one flow run: Ray, the trainer, the engines and what stands before them.

They start at first use and are replaceable at any time: whatever a stage needs from them it asks for by policy version (`trainer_at`,
`engines_at`), and the store alone decides what that version is.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.config import PostTrainConfig
from flows.fork import bridge
from storage.errors import OptionError
from storage.refs import CheckpointRef, RunKeys
from storage.secrets import reveal
from storage.store import Store

if TYPE_CHECKING:
    from engines.cluster import Cluster
    from engines.sglang.client import EngineClient
    from engines.sglang.pool import EnginePool
    from engines.sglang.router import Router
    from stages.train.group import TrainerGroup


class Processes:
    """What runs for one run.

    Args:
        config: of the run.
        store: where it lies.
        keys: of the run.
        stamp: further fields of commits that are made here.
        note: told what people should know.
        on_published: told (policy version, seconds) whenever engines have been given weights.
    """

    def __init__(
        self,
        config: PostTrainConfig,
        store: Store,
        keys: RunKeys,
        stamp: dict[str, Any],
        note: Callable[[str], None],
        on_published: Callable[[int, float], None],
    ) -> None:
        self.config = config
        self.store = store
        self.keys = keys
        self.stamp = stamp
        self.note = note
        self.on_published = on_published
        self._base: CheckpointRef | None = None
        self._entered = ExitStack()
        self._starting = threading.RLock()  # the checkpoint's thread asks for the same processes
        self._cluster: Cluster | None = None
        self._trainer: TrainerGroup | None = None
        self._engines: EnginePool | None = None
        self._shared: tuple[int, Callable[[], list[str]]] | None = None  # engines of a block that several stages share

    @property
    def base(self) -> CheckpointRef:
        """The weights that every policy of the run begins with."""
        assert self._base is not None, "convert comes first"
        return self._base

    @base.setter
    def base(self, base: CheckpointRef) -> None:
        self._base = base

    @cached_property
    def router(self) -> Router | None:
        """SGLang's router, if one is asked for: begun, and told by the engines which of them live."""
        from engines.sglang.args import check_router_args
        from engines.sglang.router import Router

        rollout = self.config.rollout
        if not (rollout.use_router or rollout.router):
            return None
        args = check_router_args(reveal(rollout.router))
        return self._entered.enter_context(Router(args, self._log_dir, max_restarts=rollout.engine_restarts))

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
    def cluster(self) -> Cluster:
        """Ray: a standing one if an address is given, else one that ends with this session, and is started anew if it has died."""
        with self._starting:
            if self._cluster is not None and not self._cluster.alive():
                self.note("the run's own Ray has died: starting another one")
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

        ensure_policy(self.store, self.keys, self.trainer, version, base=self.base, on_progress=self.note)
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
            save_checkpoint(self.store, self.keys, parents, version, base=self.base, on_progress=self.note, **self.stamp)
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
        self.on_published(version, time.perf_counter() - start)

    def weight_version(self, version: int) -> str:
        """What engines report while they serve this run's policy `version`."""
        return f"{self.keys.run}/{version}"

    def end(self) -> None:
        """End router, trainer, engines and our Ray; those that another driver has taken over are left."""
        self._entered.close()
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
            store_options=self.store.options,  # references to secrets are resolved: another process could not
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
        given = reveal(rollout.sglang)
        args = returning_experts(given) if train.use_rollout_routing_replay else given
        if rollout.rollout_sampling_seeds:
            if not has_gpus and not rollout.rollout_external_engine_addrs:
                raise OptionError(
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
                max_restarts=rollout.engine_restarts if rollout.use_fault_tolerance else 0,
            ),
            external=rollout.rollout_external_engine_addrs,
            listener=self.router.lead_to if self.router else lambda urls: None,
        )

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
