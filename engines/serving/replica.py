"""One inference engine of the pool (`Replica`): start, adopt, check and kill its server process.

`supervisor.py` decides when a replica is restarted and which weights it serves.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.engines.backends import EngineBackend
from penstock.engines.cluster import Cluster, ClusterLost
from penstock.engines.generation import EngineClient, EngineGone
from penstock.engines.network import accepts_connections
from penstock.engines.placement import NodeLost, Slot
from penstock.engines.serving import endpoints
from penstock.engines.serving.endpoints import engine_url
from penstock.engines.serving.server import ServerInfo, ServerSpec, read_log_tail
from penstock.engines.weights.transfer import ProcessPlace

POLL_SECONDS = 0.5  # interval at which a wait for a starting server checks whether it was cancelled
CALL_TIMEOUT = 30.0  # seconds for a call to an idle actor
NAME_TIMEOUT = 30.0  # seconds within which Ray frees the name of a killed actor
logger = logging.getLogger(__name__)


class StartCancelled(Exception):
    """Raised by `Replica.wait_for_url` when `cancelled` returned True before the server had started."""


class Replica(ABC):
    """One inference engine, as seen by `EnginePool` and `Supervisor`."""

    _slots: Sequence[Slot] = ()  # placement of each process, by node rank; () if external
    adopted = False  # True if an earlier driver started the server
    known_url: str | None = None  # address of the server; None while it is starting, always known of an external engine

    def __init__(self, spec: ServerSpec, index: int, backend: EngineBackend) -> None:
        self.spec = spec
        self.index = index  # position in the pool
        self.label = f"{spec.role} {index}"  # name in messages
        self.backend = backend
        # Only methods of the client that take an engine's address are called, so it needs no list of engines.
        self.client: EngineClient = backend.connect(lambda: [])

    @abstractmethod
    def launch_server(self) -> None:
        """Start a new server without waiting until it is ready."""

    def finish_adoption(self) -> None:  # noqa: B027
        """Wait until a server of an earlier driver is adopted, or start a new server if the earlier server is dead or
        was started with another `ServerSpec`. Does nothing without a server to adopt."""

    @abstractmethod
    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Wait until the server has started and return its address. Raises RuntimeError with the tail of the log if the
        start failed; the next call starts the server again. Raises StartCancelled if `cancelled` returned True while
        waiting; the server continues to start."""

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the server's process is running. Takes about a millisecond and sends no request to the server.
        Raises RuntimeError if another driver of the run has taken over the server."""

    @abstractmethod
    def place(self) -> ProcessPlace:
        """Return where the server runs."""

    def gpus(self) -> list[tuple[str, str]]:
        """Return (Ray node id, GPU id) of every GPU of the engine; [] on CPU, and if it is external."""
        return [(slot.node, gpu) for slot in self._slots for gpu in slot.gpu_ids]

    def answers_requests(self) -> bool:
        """Return whether the server runs and answers a request for its weight version. A server that answers may still
        be unable to generate: only `generates_tokens` detects a stuck scheduler."""
        if not self.alive():
            return False
        try:
            self.client.weight_version(self.known_url or self.wait_for_url())
        except (EngineGone, RuntimeError):
            return False
        return True

    def generates_tokens(self, timeout: float) -> bool:
        """Return whether the server runs and generates tokens within `timeout` seconds."""
        return self.alive() and self.client.generates_tokens(self.known_url or self.wait_for_url(), timeout)

    def weight_version(self) -> str:
        """Return the weight version that the server reports."""
        return self.client.weight_version(self.wait_for_url())

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
    """An engine whose server processes, one on each of its nodes, are started by Ray actors.

    The constructor starts the processes without waiting, or adopts the processes with this index that an earlier driver
    of the run has started on an external Ray cluster. If one of the processes dies, all of them are restarted.

    `place` returns the placement of each process, by node rank. It is called before each start, because Ray may move
    the processes to other GPUs when a node dies, and may raise NodeLost. `owner` is the id of the `EnginePool`, which
    stops using a server that another pool takes over, and does not kill it.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ServerSpec,
        index: int,
        place: Callable[[], Sequence[Slot]],
        owner: str,
        backend: EngineBackend,
    ) -> None:
        super().__init__(spec, index, backend)
        self.cluster = cluster
        self.owner = owner
        self._place = place
        self._log = ""
        self._starts: list[Any] = []  # object references of the actors' `start` or `adopt` calls, until all have ended
        self._deadline = 0.0
        self._lost: NodeLost | None = None  # set while the start waits for a node that died
        names = [actor_name(index, rank, spec.role) for rank in range(spec.num_nodes)]
        # Handles of the Ray actors, by node rank.
        self.actors: list[Any] = [actor for name in names if (actor := cluster.find_actor(name)) is not None]
        if len(self.actors) == spec.num_nodes:
            self._slots = place()
            calls = [
                actor.adopt.remote(owner, spec.digest(slot.gpu_ids))
                for actor, slot in zip(self.actors, self._slots, strict=True)
            ]
            self._set_pending_start(calls)
            self.adopted = True
        else:
            self.kill()
            self.launch_server()

    def launch_server(self) -> None:
        """Start a new server without waiting. If its node has died, `wait_for_url` starts it when the node is back."""
        self.adopted = False
        try:
            self._slots = self._place()
        except NodeLost as error:
            if self._lost is None:
                timeout = self.cluster.node_timeout
                self._deadline = time.monotonic() + timeout
                logger.warning(
                    "%s cannot start (%s); waiting up to %.0f s for the node (--node-timeout)",
                    self.label,
                    error,
                    timeout,
                )
            self._lost = error
            return
        self._lost = None
        self.actors = [self._new_actor(rank, slot) for rank, slot in enumerate(self._slots)]
        if len(self.actors) == 1:
            calls = [self.actors[0].start.remote()]
        else:
            rendezvous = self.actors[0].choose_rendezvous.remote()  # Ray passes its result to the calls
            calls = [actor.start.remote(rendezvous) for actor in self.actors]
        self._set_pending_start(calls)

    def _new_actor(self, rank: int, slot: Slot) -> Any:
        """Return a new actor for the server process with a node rank."""
        remote_class = self.cluster.ray.remote(self.backend.server_class)
        options = {**slot.options, **self.cluster.detached_options(actor_name(self.index, rank, self.spec.role))}
        deadline = time.monotonic() + NAME_TIMEOUT
        while True:
            try:
                new_actor = remote_class.options(**options).remote
                return self.cluster.call_ray(new_actor, self.spec, self.index, slot.gpu_ids, self.owner, rank)
            except ValueError as error:
                if "name" not in options:
                    raise
                if time.monotonic() > deadline:  # Ray would have freed a killed actor's name by now
                    raise RuntimeError(
                        "another driver has started engines for this run: start only one driver per run"
                    ) from error
                time.sleep(0.1)

    def finish_adoption(self) -> None:
        # Without a result after 10 s, the earlier driver's server is still starting: `wait_for_url` waits for it.
        deadline = time.monotonic() + 10
        while self.adopted and self.known_url is None and self._starts and time.monotonic() < deadline:
            self._read_start_results()

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        while self.known_url is None:
            if not self._starts:
                self.launch_server()
            if self._starts:
                self._read_start_results()
            else:
                time.sleep(POLL_SECONDS)
            if self.known_url is not None:
                break
            if cancelled():
                raise StartCancelled
            if time.monotonic() > self._deadline:
                lost, self._lost = self._lost, None
                self.kill()
                raise lost or RuntimeError(
                    f"{self.label} did not start within {self.spec.start_timeout + 60:.0f} s, because a Ray actor that "
                    "starts its server does not answer; the actor was killed: see Ray's logs on the engine's nodes"
                )
        return self.known_url

    def alive(self) -> bool:
        try:
            return bool(self.actors) and all(self._call_actors("alive", self.owner))
        except self.cluster.ray.exceptions.RayError:
            return False

    def place(self) -> ProcessPlace:
        servers: list[ServerInfo] = self._call_actors("info")
        gpu_ids = tuple(gpu for slot in self._slots for gpu in slot.gpu_ids)
        nodes = [info.node for info, slot in zip(servers, self._slots, strict=True) for _ in slot.gpu_ids or ("cpu",)]
        return ProcessPlace(servers[0].node, gpu_ids, servers[0].pid, tuple(nodes) if len(servers) > 1 else ())

    def exit_report(self) -> str:
        try:
            reports: list[str] = self._call_actors("exit_report")
        except self.cluster.ray.exceptions.RayError:
            tail = read_log_tail(Path(self._log), 25)  # empty if the actor ran on another machine
            return f"{self.label} died because its Ray actor died; tail of {self._log}:\n{tail}"
        dead = [report for report in reports if report.startswith("died")]
        return f"{self.label} {[*dead, *reports][0]}" if reports else f"{self.label} waits for a dead node to return"

    def kill(self) -> None:
        """Kill the actors. The server dies with them, even if actor or server is stuck (see `launch.py`)."""
        self.known_url, self._starts = None, []
        for actor in self.actors:
            self.cluster.call_ray(self.cluster.ray.kill, actor, no_restart=True)

    def release(self) -> None:
        """Kill the server, unless another driver has adopted it."""
        if not self.cluster.owned:
            try:
                self.alive()
            except RuntimeError as error:
                logger.warning("%s is not stopped: %s", self.label, error)
                return
        with suppress(ClusterLost):
            self.kill()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _set_pending_start(self, calls: list[Any]) -> None:
        self.known_url, self._starts = None, calls
        self._deadline = time.monotonic() + self.spec.start_timeout + 60

    def _read_start_results(self) -> None:
        """Wait up to POLL_SECONDS for the actors' `start` or `adopt` calls, and read the results of finished calls.
        When all have finished, store the server's address. Start a new server if the earlier one could not be adopted,
        or if Ray has moved the GPUs to another node."""
        waiting, finished, timeout = list(self._starts), list[Any](), POLL_SECONDS
        while waiting and (done := self.cluster.wait(waiting, timeout))[0]:
            finished += done[0]
            waiting, timeout = done[1], 0.0
        finished.sort(key=self._starts.index)  # by node rank
        try:
            urls = [self.cluster.get(call, timeout=CALL_TIMEOUT) for call in finished]
            if None not in urls and len(urls) < len(self._starts):
                return
            url = urls[0]
            # Ray may have run an actor on a node other than the planned one; the planned GPU ids are then wrong.
            servers: list[ServerInfo] = self._call_actors("info")
            at_slots = all(slot.node in ("", info.node) for slot, info in zip(self._slots, servers, strict=True))
            if url is not None and None not in urls and at_slots:
                self._log = servers[0].log
                endpoints.set_api_key(url, servers[0].key)  # an adopted server's key is known only to its actor
                self.known_url, self._starts = url, []
                return
        except self.cluster.ray.exceptions.RayError as error:
            self.kill()
            if self.adopted:
                logger.warning("%s cannot be adopted (%s); starting a new one", self.label, error)
                self.launch_server()
                return
            if isinstance(error, self.cluster.ray.exceptions.RayTaskError):
                raise error.cause from None
            raise RuntimeError(f"{self.label} did not start, because its Ray actor died: {error}") from error
        self.kill()
        self.launch_server()

    def _call_actors(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the actor of each node rank and return the results."""
        try:
            return [
                self.cluster.get(getattr(actor, method).remote(*args), timeout=CALL_TIMEOUT) for actor in self.actors
            ]
        except self.cluster.ray.exceptions.RayTaskError as error:
            raise error.cause from None


def actor_name(index: int, node_rank: int = 0, role: str = "engine") -> str:
    """Return the Ray name of an engine's detached actor, unique within the run's namespace."""
    return f"{role}-{index}" if node_rank == 0 else f"{role}-{index}-node-{node_rank}"


def kill_surplus_replicas(cluster: Cluster, index: int, num_nodes: int = 1, role: str = "engine") -> None:
    """Kill the detached actors of this `role` that an earlier driver with more engines or nodes left on an external Ray
    cluster: of engines from number `index` on, and with node rank `num_nodes` or higher."""
    for engine in count():
        first = num_nodes if engine < index else 0
        names = (actor_name(engine, rank, role) for rank in count(first))
        surplus = list(takewhile(bool, map(cluster.find_actor, names)))
        for actor in surplus:
            cluster.call_ray(cluster.ray.kill, actor, no_restart=True)
        if engine >= index and not surplus:
            return


class ExternalReplica(Replica):
    """A `Replica` for an engine that Penstock does not start or stop."""

    def __init__(self, address: str, spec: ServerSpec, index: int, backend: EngineBackend) -> None:
        super().__init__(spec, index, backend)
        self.address = address
        self.known_url = self._url = engine_url(address)
        if key := spec.args.get("api_key"):
            endpoints.set_api_key(self._url, key)
        self._checked = False
        self.launch_server()

    def launch_server(self) -> None:
        self._deadline = time.monotonic() + self.spec.start_timeout

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        while not self._checked:
            if self.client.generates_tokens(self._url):
                self.backend.check_external_server(self._url, self.spec.model_path, self.spec.args)
                self._checked = True
            elif cancelled():
                raise StartCancelled
            elif time.monotonic() > self._deadline:
                raise ConnectionError(
                    f"{self.exit_report()} (waited {self.spec.start_timeout:.0f} s): restart it, or remove it from "
                    "--rollout-external-engine-addrs"
                )
            else:
                time.sleep(POLL_SECONDS)
        return self._url

    def alive(self) -> bool:
        # A busy server counts as alive, because the kernel accepts connections for it.
        parts = urlsplit(self._url)
        return accepts_connections(parts.hostname or "", parts.port or 80, timeout=5)

    def place(self) -> ProcessPlace:
        return ProcessPlace("")  # unknown

    def exit_report(self) -> str:
        return f"the external engine at {self.address} does not generate tokens"

    def kill(self) -> None:
        """Make the next `wait_for_url` call check the engine again. The process continues: the run did not
        start it."""
        self._checked = False

    def release(self) -> None:
        pass  # the engine keeps running, with the weights that were sent last
