"""One place in the pool and the server that stands there now: begun without waiting, found again, asked how it is, ended.

Who is replaced when, and which weights are served, is decided in supervisor.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.cluster import Cluster, ClusterLost, Slot
from engines.sglang import control
from engines.sglang.server import ServerSpec, SGLangServer, last_lines

LOOK_EVERY = 0.5  # seconds between looks whether anybody still waits for a server that starts
SHORT_CALL = 30.0  # seconds for a question to an actor that has nothing else to do
NAME_FREED = 30.0  # seconds that Ray may take to free the name of an actor it has killed
logger = logging.getLogger(__name__)


class GivenUp(Exception):
    """Nobody waits for this server any more."""


class Engine:
    """Begins to start a server, or takes over the one that an earlier driver of the run has left on a standing Ray.

    Args:
        cluster: where it runs.
        spec: what it serves.
        index: its number in the pool, and in its name.
        slot: its GPUs.
        owner: of the pool; a server that another owner has taken over is not touched any more.
    """

    def __init__(self, cluster: Cluster, spec: ServerSpec, index: int, slot: Slot, owner: str) -> None:
        self.cluster = cluster
        self.spec = spec
        self.index = index
        self.slot = slot
        self.owner = owner
        self.adopted = False
        self._log = ""
        self._url: str | None = None
        self._starting: Any = None  # the answer to come of a start, or of an adoption
        self._deadline = 0.0
        self.actor: Any = cluster.find(name_of(index))
        if self.actor is None:
            self.begin()
        else:
            self._expect(self.actor.adopt.remote(owner, spec.digest(slot.gpu_ids)))
            self.adopted = True

    def begin(self) -> None:
        """Start a server without waiting for it."""
        import ray

        remote_class: Any = ray.remote(SGLangServer)
        options = {**self.slot.options, **self.cluster.lasting(name_of(self.index))}
        deadline = time.monotonic() + NAME_FREED
        while True:
            try:
                new_actor = remote_class.options(**options).remote
                self.actor = self.cluster.call(new_actor, self.spec, self.index, self.slot.gpu_ids, self.owner)
                break
            except ValueError as error:
                if "name" not in options:
                    raise
                if time.monotonic() > deadline:  # not the one just killed, whose name is freed within moments
                    raise RuntimeError("another driver has started engines for this run: let only one work on it") from error
                time.sleep(0.1)
        self.adopted = False
        self._expect(self.actor.start.remote())

    def settle(self, timeout: float = 10.0) -> None:
        """If it was to be taken over and does not fit, or is dead, begin anew. One that is still starting is left to start."""
        if self.adopted and self._url is None and self._starting is not None and self.cluster.wait([self._starting], timeout)[0]:
            self._outcome()

    def url(self, given_up: Callable[[], bool] = lambda: False) -> str:
        """The server's address, once it has started. After a failed start, another one is tried.

        Raises:
            RuntimeError: it could not start, with its last log lines.
            GivenUp: `given_up` said so meanwhile; the server goes on starting.
            ClusterLost: our Ray has died meanwhile.
        """
        while self._url is None:
            if self._starting is None:
                self.begin()
            if self.cluster.wait([self._starting], LOOK_EVERY)[0]:
                self._outcome()
            elif given_up():
                raise GivenUp
            elif time.monotonic() > self._deadline:
                self.kill()
                raise RuntimeError(f"engine {self.index}: the process that holds its server is stuck")
        return self._url

    def alive(self) -> bool:
        """Whether the server's process runs; cheap.

        Raises:
            RuntimeError: another driver has taken it over.
        """
        import ray

        try:
            return bool(self._ask("alive", self.owner))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

    def answers(self) -> bool:
        """Whether the process runs and its HTTP side speaks. A hung scheduler shows only in `generates`."""
        if not self.alive():
            return False
        try:
            control.weight_version(self.url())
        except (control.ServerGone, RuntimeError):
            return False
        return True

    def generates(self, timeout: float) -> bool:
        """Whether it makes tokens: for us or, if it has nothing to do, for this question."""
        return self.alive() and control.generates(self.url(), timeout)

    def pid(self) -> int:
        """Of the server's first process."""
        return int(self._ask("pid"))

    def log_tail(self, num_lines: int = 25) -> str:
        """The last lines of the server's log."""
        return str(self._ask("log_tail", num_lines))

    def last_words(self) -> str:
        """How a dead server ended, with the end of its log."""
        import ray

        try:
            return f"engine {self.index} {self._ask('last_words')}"
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            # The server has died with the actor; its log is on this machine, or out of reach.
            tail = last_lines(Path(self._log), 25)
            return f"engine {self.index} went with the process that held it. The end of its log, {self._log}:\n{tail}"

    def kill(self) -> None:
        """End the server. Its actor's death takes it along, whatever either of them is doing (see `launch.py`)."""
        import ray

        self._url = self._starting = None
        self.cluster.call(ray.kill, self.actor, no_restart=True)

    def release(self) -> None:
        """End the server, unless another driver has taken it over, or it has ended with our Ray."""
        if not self.cluster.owned:
            try:
                self.alive()
            except RuntimeError as error:
                logger.warning("engine %d is left alone: %s", self.index, error)
                return
        with suppress(ClusterLost):
            self.kill()

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _expect(self, starting: Any) -> None:
        self._url, self._starting = None, starting
        self._deadline = time.monotonic() + self.spec.start_timeout + 60

    def _outcome(self) -> None:
        """Take the answer of a start, or of an adoption, that has come."""
        import ray

        starting, self._starting = self._starting, None
        try:
            url = self.cluster.get(starting, timeout=SHORT_CALL)
            if url is not None:
                self._log = str(self._ask("log_path"))
                control.use_key(url, self._ask("key"))  # only the actor knows the key of a server that an earlier driver started
        except (
            ray.exceptions.RayError,
            AttributeError,
        ) as error:  # AttributeError: an actor of a release whose servers had no key
            self.kill()
            if self.adopted:  # of another release perhaps, or it died before its driver
                logger.warning("engine %d of an earlier driver is of no use, starting another one: %s", self.index, error)
                self.begin()
                return
            if isinstance(error, ray.exceptions.RayTaskError):
                raise error.cause from None
            raise RuntimeError(f"engine {self.index}: the process that holds its server is gone: {error}") from error
        if url is None:
            self.kill()
            self.begin()
            return
        self._url = url

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return self.cluster.get(getattr(self.actor, method).remote(*args), timeout=SHORT_CALL)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


def name_of(index: int) -> str:
    """What an engine's actor is called on a standing Ray, in the namespace of the run."""
    return f"engine-{index}"


def end_engines_from(cluster: Cluster, index: int) -> None:
    """End what an earlier driver, which had more engines, has left from number `index` on."""
    import ray

    while (actor := cluster.find(name_of(index))) is not None:
        cluster.call(ray.kill, actor, no_restart=True)
        index += 1
