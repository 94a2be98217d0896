"""The engine pool of a run: start inference engines in parallel, supervise them while they generate, and stop them.

The caller provides a function that sends the weights of a policy version; the pool calls it for every engine that does
not serve that version (`EnginePool.serving`). On an external Ray cluster engines outlive a killed driver, and the next
driver's pool adopts (reuses) the engines that were started with the same `ServerSpec`.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from penstock.engines.backends import EngineBackend, engine_backend
from penstock.engines.cluster import Cluster
from penstock.engines.options import EngineOptions, HealthCheck
from penstock.engines.placement import Slot, num_engine_nodes
from penstock.engines.serving.replica import ExternalReplica, RayReplica, Replica, kill_surplus_replicas
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import Listener, Publish, Supervisor
from penstock.engines.weights.transfer import ProcessPlace
from penstock.storage.errors import EngineError
from penstock.storage.secret_references import resolve_secrets


class EnginePool:
    """A pool of inference engines in Ray actors, or of external engines (host:port). Thread-safe.

    The constructor starts the engines without waiting; methods that need running engines wait until they have started.
    If the cluster has GPUs, the engines use consecutive ones, `spec.tensor_parallel` each, from number `first_gpu` on.

    Attributes:
        listener: called with the addresses of the live engines whenever these addresses change.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ServerSpec,
        num_engines: int = 1,
        first_gpu: int = 0,
        health: HealthCheck | None = None,
        *,
        external: Sequence[str] = (),
        backend: EngineBackend | None = None,
    ) -> None:
        backend = backend or engine_backend()
        self.spec = spec
        self.health = health or HealthCheck()
        self.listener: Listener = lambda urls: None
        self._check = cluster.check_alive
        self._connect = backend.connect
        self._lock = threading.RLock()
        self.replicas: list[Replica] = []  # the engines, of which some may be starting
        self._split_off: list[Replica] = []  # replicas that `split` moved to another pool
        self._serving: Supervisor | None = None  # set while a thread is inside a block of `serving`
        owner = uuid.uuid4().hex
        kill_surplus_replicas(cluster, 0 if external else num_engines, spec.num_nodes, spec.role)
        if external:
            self.replicas += [ExternalReplica(address, spec, index, backend) for index, address in enumerate(external)]
            return
        size, gpus = spec.num_nodes, spec.tensor_parallel // spec.num_nodes

        def place(index: int) -> Sequence[Slot]:
            return cluster.place_processes(num_engines * size, gpus, first_gpu)[index * size : (index + 1) * size]

        self.replicas += [
            RayReplica(cluster, spec, index, partial(place, index), owner, backend) for index in range(num_engines)
        ]

    def split(self, num_engines: int) -> EnginePool:
        """Move the last `num_engines` engines to a new pool, and return it."""
        left = len(self.replicas) - num_engines
        if left < 1:
            raise EngineError(
                f"--eval-mode apart with --eval-num-engines {num_engines} leaves no engine for rollouts, because the "
                f"run has {len(self.replicas)}: start more engines, or use --eval-mode between"
            )
        other = copy.copy(self)
        other._lock, other.listener = threading.RLock(), lambda urls: None
        self.replicas, other.replicas = self.replicas[:left], self.replicas[left:]
        self._split_off = other.replicas
        return other

    @contextmanager
    def serving(self, version: str, publish: Publish) -> Iterator[Callable[[], list[str]]]:
        """Make all engines serve the weights of policy version `version`, also after restarts inside the block. Yield a
        function that returns the addresses of the engines that currently serve this version.

        Only one thread at a time can be inside such a block; a second caller waits. `publish` sends the weights to
        engines. The caller's thread calls it on entry, and threads of the pool call it inside the block, one call at a
        time.

        Both the entry and the yielded function raise ClusterLost if the local Ray died. They raise RuntimeError, with
        the tail of the log, if an engine could not start, or died after `health.max_restarts` restarts.
        """
        with self._lock:
            supervisor = Supervisor(self.replicas, version, publish, self.health, self.listener, self._check)
            supervisor.restart_and_publish()
            self._serving = supervisor
            try:
                with supervisor:
                    yield supervisor.live_urls
            finally:
                self._serving = None

    def update_while_serving(self, version: str, publish: Publish) -> None:
        """Send the weights of policy version `version` to the engines while another thread is inside `serving`, also
        after later restarts. Requests in flight continue with the new weights."""
        supervisor = self._serving
        if supervisor is None:
            raise RuntimeError("weights cannot be sent to engines in use: the stage that used them has failed or ended")
        supervisor.update(version, publish)

    def update_to_version(self, version: str, publish: Publish) -> None:
        """Restart dead engines, and send the weights to every engine that does not serve policy version `version`."""
        with self._lock:
            Supervisor(self.replicas, version, publish, self.health, self.listener, self._check).restart_and_publish()

    @property
    def urls(self) -> list[str]:
        """Wait until all engines have started, and return their addresses."""
        with self._lock:
            for replica in self.replicas:
                replica.finish_adoption()
            return [replica.wait_for_url() for replica in self.replicas]

    def places(self, urls: Sequence[str]) -> dict[str, ProcessPlace]:
        """Return where the engines at `urls` run: URL -> place."""
        known = {replica.known_url: replica for replica in [*self.replicas, *self._split_off]}
        return {url: known[url].place() for url in urls}

    def actors(self, urls: Sequence[str]) -> dict[str, Any]:
        """Return URL -> handle of the Ray actor on the first node of each engine at `urls`, except external ones."""
        replicas = [*self.replicas, *self._split_off]
        known = {replica.known_url: replica for replica in replicas if isinstance(replica, RayReplica)}
        return {url: known[url].actors[0] for url in urls if url in known}

    def release_memory(self) -> None:
        """Release the GPU memory of weights and KV cache of all engines; the next publish allocates it again. Waits for
        engines that are starting, because a start needs GPU memory, too. Does nothing while a thread is inside
        `serving`: its engines generate, and the caller needs the trainer only to send weights to a restarted engine."""
        if self._serving is not None:
            return
        with self._lock:
            for replica in self.replicas:
                replica.finish_adoption()
                with suppress(RuntimeError):  # it could not start; `restart_and_publish` starts it again
                    replica.wait_for_url()
            urls = [replica.wait_for_url() for replica in self.replicas if replica.answers_requests()]
            if urls:
                self._connect(urls).release_memory()

    def stop(self) -> None:
        """Stop all engines, also those that are still starting. External engines, and engines that another driver has
        adopted, keep running. Safe to call twice."""
        for replica in self.replicas:
            replica.release()
        self.replicas = []


def start_pool(cluster: Cluster, options: EngineOptions) -> EnginePool:
    """Create the engine pool of a run, without waiting for the start of the engines."""
    has_gpus = cluster.num_gpus > 0
    options = options.replace_spec_fields(args=resolve_secrets(options.spec.args))
    spec = options.spec.model_copy(
        update={
            "args": engine_backend(options.engine).server_args(options, has_gpus=has_gpus),
            "tensor_parallel": options.gpus_per_engine if has_gpus else 1,
            "num_nodes": num_engine_nodes(options.gpus_per_engine, cluster.gpus_per_node) if has_gpus else 1,
            "several_nodes": not options.external and cluster.spans_nodes,
        }
    )
    return EnginePool(
        cluster,
        spec,
        options.num_engines_to_start(has_gpus),
        options.first_gpu,
        options.health,
        external=options.external,
        backend=engine_backend(options.engine),
    )
