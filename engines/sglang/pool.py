"""The engines of a run: started side by side, watched while they generate, replaced when they die, ended together.

What the weights of a version are is the flow's business; that every engine serves them is seen to here (`serving`). On a standing Ray
engines outlive a killed driver, and the pool of the next one takes them over if they were made from an equal spec.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engines.cluster import Cluster
from engines.sglang import control
from engines.sglang.engine import Engine, end_engines_from
from engines.sglang.external import ExternalEngine
from engines.sglang.server import ServerSpec
from engines.sglang.supervisor import AnyEngine, HealthCheck, Listener, Publish, Supervisor, revived


class EnginePool:
    """Servers as Ray actors. The constructor only begins to start them; the first use waits. Safe to use from several threads.

    Args:
        cluster: where they run.
        spec: what they serve.
        num_engines: how many servers, with `spec.tensor_parallel` GPUs each where there are GPUs.
        offset: first GPU of the cluster to use; the trainer's first one to share GPUs with it.
        health: how they are watched within `serving`.
        external: host:port of engines that somebody else has started and ends; then none is started here.
        listener: told the addresses of the live engines whenever they change; a router for instance.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ServerSpec,
        num_engines: int = 1,
        offset: int = 0,
        health: HealthCheck | None = None,
        *,
        external: Sequence[str] = (),
        listener: Listener = lambda urls: None,
    ) -> None:
        self.spec = spec
        self.health = health or HealthCheck()
        self.listener = listener
        self._check = cluster.check
        self._lock = threading.RLock()
        self._engines: list[AnyEngine] = []
        owner = uuid.uuid4().hex
        if external:
            end_engines_from(cluster, 0)
            self._engines += [ExternalEngine(address, spec, index) for index, address in enumerate(external)]
        else:
            end_engines_from(cluster, num_engines)
            slots = cluster.place(num_engines, spec.tensor_parallel, offset)
            self._engines += [Engine(cluster, spec, index, slot, owner) for index, slot in enumerate(slots)]

    @contextmanager
    def serving(self, version: str, publish: Publish) -> Iterator[Callable[[], list[str]]]:
        """A block in which the engines serve `version` and are kept doing so. Gives a function: the addresses of those that do right now.

        Entering replaces dead engines and publishes to all that serve something else. Inside, whoever dies or hangs is replaced and
        given the same weights. Only one such block at a time.

        Args:
            version: what engines are to report with every answer, `<run>/<number>`.
            publish: gives the weights to the engines at these addresses. Called before the block by the caller's thread, and within it
                by threads of the pool, one at a time; when the block has ended, no more.

        Raises:
            RuntimeError: at entry, or out of the function: more than `health.max_restarts` engines have died; with the last log lines.
            ClusterLost: likewise: our Ray has died.
        """
        with self._lock:
            supervisor = self._supervisor(version, publish)
            supervisor.bring_up()
            with supervisor:
                yield supervisor.live

    def _supervisor(self, version: str, publish: Publish) -> Supervisor:
        return Supervisor(self._engines, version, publish, self.health, self.listener, self._check)

    def bring_to(self, version: str, publish: Publish) -> None:
        """Let every engine serve `version`, as at the beginning of `serving`."""
        with self._lock:
            self._supervisor(version, publish).bring_up()

    @property
    def urls(self) -> list[str]:
        """Addresses of all engines; waits until they have started.

        Raises:
            RuntimeError: one could not start, with its last log lines. The next use tries again.
        """
        with self._lock:
            for engine in self._engines:
                engine.settle()
            return [engine.url() for engine in self._engines]

    def ensure_alive(self) -> bool:
        """Replace every engine that is dead or does not answer. Returns whether any was.

        A new engine serves the model directory's weights and calls them `spec.weight_version`.

        Raises:
            RuntimeError: as `urls`.
        """
        with self._lock:
            return bool(revived(self._engines))

    @property
    def adopted(self) -> list[bool]:
        """Which engines an earlier driver has started; known once `urls` has returned."""
        return [engine.adopted for engine in self._engines]

    def weight_versions(self) -> list[str]:
        """What each engine says it serves."""
        return [control.weight_version(url) for url in self.urls]

    def pids(self) -> list[int]:
        """Each engine's first process; 0 for one that was started elsewhere."""
        return [engine.pid() for engine in self._engines]

    def log_tails(self, num_lines: int = 25) -> list[str]:
        """The last lines of each engine's log."""
        return [engine.log_tail(num_lines) for engine in self._engines]

    def stop(self) -> None:
        """End all engines, also those that are still starting; those that another driver has taken over are left. Safe to call twice."""
        for engine in self._engines:
            engine.release()
        self._engines = []
