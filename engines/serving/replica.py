"""One inference engine of the pool (`Replica`): start, adopt, check and kill its server process.

`supervisor.py` decides when a replica is restarted and which weights it serves.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.engines.backends import EngineBackend
from penstock.engines.cluster import Cluster, ClusterLost, Slot
from penstock.engines.generation import EngineClient, EngineGone
from penstock.engines.serving import keys
from penstock.engines.serving.server import ServerSpec, read_log_tail
from penstock.engines.weights.routes import ProcessPlace

POLL_SECONDS = 0.5  # interval at which a wait for a starting server checks `cancelled`
CALL_TIMEOUT = 30.0  # seconds for a call to an idle actor
NAME_TIMEOUT = 30.0  # seconds within which Ray frees the name of a killed actor
logger = logging.getLogger(__name__)


class StartCancelled(Exception):
    """Raised by `Replica.wait_for_url` when `cancelled` returned True before the server had started."""


class Replica(ABC):
    """One inference engine, as seen by `EnginePool` and `Supervisor`."""

    index: int  # position in the pool
    adopted = False  # True if an earlier driver started the server
    client: EngineClient
    known_url: str | None = None  # address of the server; None while it is starting

    @abstractmethod
    def launch_server(self) -> None:
        """Start a new server without waiting until it is ready."""

    def finish_adoption(self) -> None:  # noqa: B027
        """Finish the adoption of a server that an earlier driver left: start a new server instead if the old one is
        dead or was started with another `ServerSpec`. Does nothing if there is no server to adopt."""

    @abstractmethod
    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Wait until the server has started and return its address. The call after a failed start starts it again.

        Raises:
            RuntimeError: the server could not start; the message has the tail of its log.
            StartCancelled: `cancelled` returned True while waiting; the server continues to start.
            ClusterLost: the local Ray died while waiting.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the server's process is running. Takes about a millisecond and sends no request to the server.

        Raises:
            RuntimeError: another driver has adopted the server.
        """

    @abstractmethod
    def place(self) -> ProcessPlace:
        """Return where the server runs."""

    def answers_requests(self) -> bool:
        """Return whether the server runs and answers a request for its weight version.

        This does not detect a stuck scheduler, unlike `generates_tokens`.
        """
        if not self.alive():
            return False
        try:
            self.client.weight_version(self._address())
        except (EngineGone, RuntimeError):
            return False
        return True

    def generates_tokens(self, timeout: float) -> bool:
        """Return whether the server runs and generates tokens within `timeout` seconds."""
        return self.alive() and self.client.generates_tokens(self._address(), timeout)

    def _address(self) -> str:
        """Return the address for health checks."""
        return self.wait_for_url()

    def weight_version(self) -> str:
        """Return the weight version that the server reports."""
        return self.client.weight_version(self.wait_for_url())

    @abstractmethod
    def pid(self) -> int:
        """Return the process id of the server's main process, 0 if unknown."""

    @abstractmethod
    def log_tail(self, num_lines: int = 25) -> str:
        """Return the last `num_lines` lines of the server's log."""

    @abstractmethod
    def exit_report(self) -> str:
        """Return why the server failed (for instance its exit code), and the tail of its log, for error messages."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the server. An external engine is not killed, but its model and health are checked again."""

    @abstractmethod
    def release(self) -> None:
        """Kill the server at the end of the run, unless it is external or another driver has adopted it."""


class RayReplica(Replica):
    """An engine whose server process is started by a Ray actor.

    The constructor starts a server without waiting, or adopts the server with this index that an earlier driver of the
    run left on an external Ray cluster.

    Args:
        cluster: the Ray connection that runs the actor.
        spec: model and settings of the server.
        index: position in the pool; part of the actor's name.
        slot: the server's GPUs and Ray options.
        owner: id of the pool. A server that another pool has adopted since is neither used nor killed.
        backend: the engine implementation.
    """

    def __init__(
        self, cluster: Cluster, spec: ServerSpec, index: int, slot: Slot, owner: str, backend: EngineBackend
    ) -> None:
        self.cluster = cluster
        self.spec = spec
        self.index = index
        self.slot = slot
        self.owner = owner
        self.backend = backend
        self.client = backend.connect(
            lambda: []
        )  # only its `generates_tokens` and `weight_version` are used, which take an address
        self._log = ""
        self._starting: Any = None  # object reference of the actor's running `start` or `adopt` call
        self._deadline = 0.0
        self.actor: Any = cluster.find_actor(actor_name(index))
        if self.actor is None:
            self.launch_server()
        else:
            self._set_pending_start(self.actor.adopt.remote(owner, spec.digest(slot.gpu_ids)))
            self.adopted = True

    def launch_server(self) -> None:
        import ray

        remote_class: Any = ray.remote(self.backend.server_class())
        options = {**self.slot.options, **self.cluster.detached_options(actor_name(self.index))}
        deadline = time.monotonic() + NAME_TIMEOUT
        while True:
            try:
                new_actor = remote_class.options(**options).remote
                self.actor = self.cluster.call_ray(new_actor, self.spec, self.index, self.slot.gpu_ids, self.owner)
                break
            except ValueError as error:
                if "name" not in options:
                    raise
                if time.monotonic() > deadline:  # Ray would have freed a killed actor's name by now
                    raise RuntimeError(
                        "another driver has started engines for this run: start only one driver per run"
                    ) from error
                time.sleep(0.1)
        self.adopted = False
        self._set_pending_start(self.actor.start.remote())

    def finish_adoption(self, timeout: float = 10.0) -> None:
        # After `timeout` the server is still starting under the earlier driver's spec: `url` waits for it.
        adopting = self.adopted and self.known_url is None and self._starting is not None
        if adopting and self.cluster.wait([self._starting], timeout)[0]:
            self._read_start_result()

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        while self.known_url is None:
            if self._starting is None:
                self.launch_server()
            if self.cluster.wait([self._starting], POLL_SECONDS)[0]:
                self._read_start_result()
            elif cancelled():
                raise StartCancelled
            elif time.monotonic() > self._deadline:
                self.kill()
                raise RuntimeError(
                    f"engine {self.index} did not start in time: the Ray actor that starts its server does not answer "
                    "and was killed"
                )
        return self.known_url

    def alive(self) -> bool:
        import ray

        try:
            return bool(self._call_actor("alive", self.owner))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

    def place(self) -> ProcessPlace:
        return ProcessPlace(str(self._call_actor("node")), self.slot.gpu_ids, self.pid())

    def pid(self) -> int:
        return int(self._call_actor("pid"))

    def log_tail(self, num_lines: int = 25) -> str:
        return str(self._call_actor("log_tail", num_lines))

    def exit_report(self) -> str:
        import ray

        try:
            return f"engine {self.index} {self._call_actor('exit_report')}"
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            tail = read_log_tail(Path(self._log), 25)  # empty if the actor ran on another machine
            return f"engine {self.index} died because its Ray actor died; tail of {self._log}:\n{tail}"

    def kill(self) -> None:
        """Kill the actor. The server dies with it, even if actor or server is stuck (see `launch.py`)."""
        import ray

        self.known_url = self._starting = None
        self.cluster.call_ray(ray.kill, self.actor, no_restart=True)

    def release(self) -> None:
        """Kill the server, unless another driver has adopted it."""
        if not self.cluster.owned:
            try:
                self.alive()
            except RuntimeError as error:
                logger.warning("engine %d is not stopped: %s", self.index, error)
                return
        with suppress(ClusterLost):
            self.kill()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _set_pending_start(self, starting: Any) -> None:
        self.known_url, self._starting = None, starting
        self._deadline = time.monotonic() + self.spec.start_timeout + 60

    def _read_start_result(self) -> None:
        """Read the result of the actor's finished `start` or `adopt` call, and store the server's address.

        If the server could not be adopted, start a new one. Raises RuntimeError if the server could not start.
        """
        import ray

        starting, self._starting = self._starting, None
        try:
            url = self.cluster.get(starting, timeout=CALL_TIMEOUT)
            if url is not None:
                self._log = str(self._call_actor("log_path"))
                keys.set_api_key(url, self._call_actor("key"))  # an adopted server's key is known only to its actor
        except (ray.exceptions.RayError, AttributeError) as error:  # AttributeError: the actor runs an older Penstock
            self.kill()
            if self.adopted:
                logger.warning("engine %d cannot be adopted (%s); starting a new one", self.index, error)
                self.launch_server()
                return
            if isinstance(error, ray.exceptions.RayTaskError):
                raise error.cause from None
            raise RuntimeError(f"engine {self.index} did not start, because its Ray actor died: {error}") from error
        if url is None:
            self.kill()
            self.launch_server()
            return
        self.known_url = url

    def _call_actor(self, method: str, *args: Any) -> Any:
        """Call a method of the actor and return its result."""
        import ray

        try:
            return self.cluster.get(getattr(self.actor, method).remote(*args), timeout=CALL_TIMEOUT)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


def actor_name(index: int) -> str:
    """Return the Ray name of an engine's detached actor, unique within the run's namespace."""
    return f"engine-{index}"


def kill_surplus_replicas(cluster: Cluster, index: int) -> None:
    """Kill the detached engines with this index or a higher one, which an earlier driver of this run that used more
    engines left on an external Ray cluster."""
    import ray

    while (actor := cluster.find_actor(actor_name(index))) is not None:
        cluster.call_ray(ray.kill, actor, no_restart=True)
        index += 1
