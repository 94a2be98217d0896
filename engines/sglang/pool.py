"""The engines of a run: started side by side, replaced when they die, ended together.

What weights they serve is the flow's business.
"""

from __future__ import annotations

import threading
from typing import Any

from engines.cluster import Cluster, Slot
from engines.sglang import control
from engines.sglang.server import ServerSpec, SGLangServer


class EnginePool:
    """Servers as Ray actors. The constructor only begins to start them; the first use waits. Safe to use from several threads."""

    def __init__(self, cluster: Cluster, spec: ServerSpec, num_engines: int = 1, offset: int = 0) -> None:
        """
        Args:
            num_engines: how many servers, with `spec.tensor_parallel` GPUs each where there are GPUs.
            offset: first GPU of the cluster to use; the trainer's first one to share GPUs with it.
        """
        self.spec = spec
        self._lock = threading.Lock()
        slots = cluster.place(num_engines, spec.tensor_parallel, offset)
        self._engines = [_Engine(spec, index, slot) for index, slot in enumerate(slots)]

    @property
    def urls(self) -> list[str]:
        """Addresses of all engines; waits until they have started.

        Raises:
            RuntimeError: one could not start, with its last log lines. The next use tries again.
        """
        with self._lock:
            return [engine.url() for engine in self._engines]

    def ensure_alive(self) -> bool:
        """Replace every engine that is dead or does not answer. Returns whether any was.

        A new engine serves the model directory's weights and calls them `spec.weight_version`.

        Raises:
            RuntimeError: as `urls`.
        """
        with self._lock:
            for engine in self._engines:
                engine.url()
            dead = [engine for engine in self._engines if not engine.answers()]
            for engine in dead:
                engine.kill()
                engine.begin()
            for engine in dead:
                engine.url()
        return bool(dead)

    def weight_versions(self) -> list[str]:
        """What each engine says it serves."""
        return [control.weight_version(url) for url in self.urls]

    def pids(self) -> list[int]:
        """Each engine's first process."""
        import ray

        return ray.get([engine.actor.pid.remote() for engine in self._engines], timeout=30)

    def log_tails(self, num_lines: int = 25) -> list[str]:
        """The last lines of each engine's log."""
        import ray

        return ray.get([engine.actor.log_tail.remote(num_lines) for engine in self._engines], timeout=30)

    def stop(self) -> None:
        """End all engines, also those that are still starting. Safe to call twice."""
        with self._lock:
            for engine in self._engines:
                engine.kill()
            self._engines = []


class _Engine:
    """One place in the pool, and the server that stands there now."""

    def __init__(self, spec: ServerSpec, index: int, slot: Slot) -> None:
        self.spec = spec
        self.index = index
        self.slot = slot
        self.begin()

    def begin(self) -> None:
        """Start a server without waiting for it."""
        import ray

        self._url: str | None = None
        remote_class: Any = ray.remote(SGLangServer)
        self.actor = remote_class.options(**self.slot.options).remote(self.spec, self.index, self.slot.gpu_ids)
        self._start: Any = self.actor.start.remote()

    def url(self) -> str:
        """The server's address, once it has started. After a failed start, another one is tried."""
        import ray

        if self._url is None:
            if self._start is None:
                self.begin()
            start, self._start = self._start, None
            try:
                self._url = ray.get(start, timeout=self.spec.start_timeout + 60)
            except ray.exceptions.RayTaskError as error:
                self.kill()
                raise error.cause from None
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self.kill()
                raise RuntimeError(f"engine {self.index}: the process that holds its server is gone or stuck: {error}") from error
        return self._url

    def answers(self) -> bool:
        """Whether the server's process lives and its HTTP side speaks. A hung scheduler shows only in a generation's time-out."""
        import ray

        try:
            if not ray.get(self.actor.alive.remote(), timeout=30):
                return False
            control.weight_version(self.url())
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, control.ServerGone, RuntimeError):
            return False
        return True

    def kill(self) -> None:
        """End the server. Its actor's death takes it along, whatever either of them is doing (see `launch.py`)."""
        import ray

        ray.kill(self.actor, no_restart=True)
