"""Connect to Ray, keep actors alive across driver restarts, and divide CPU threads. Placement is in placement.py.

By default the driver starts its own local Ray (`ray.init` on this machine), which ends when the driver ends. With an
address the driver joins an external (long-running) Ray cluster, where trainer and engines are named, detached actors:
they survive a killed driver, and the next driver finds them by name and reuses them if they match its configuration.
Ray only holds processes; the state of a run is in the store.

Every blocking Ray call goes through `Cluster.wait`, `get` or `call_ray`, which check twice a second that the local Ray
is alive. Ray's own functions would wait forever for a dead Ray, or end this process after a minute.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

from penstock.engines.local_ray import (
    ClusterLost,
    connect_to_ray,
    import_ray,
    kill_processes,
    local_ray_processes,
    log_ray_messages,
    start_ray,
)
from penstock.engines.placement import NodeLost, Placement, PlacementOptions, Slot
from penstock.engines.scratch import is_temp_directory_kept_at_exit, own_temp_directory
from penstock.storage.errors import EngineError

T = TypeVar("T")

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 30.0  # how long to wait for an answer; Ray's control service answers at once on an idle machine
SETTINGS = b"\x04"  # 4th byte of an HTTP/2 connection in both directions: the type of its first frame
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)  # preface and empty SETTINGS
POLL_SECONDS = 0.5  # interval at which a blocking Ray call checks that the local Ray is alive


class Cluster:
    """A connection to Ray, created with `Cluster.start`. `stop` kills the processes placed through this connection."""

    def __init__(
        self, namespace: str = "penstock", node: Any | None = None, options: PlacementOptions | None = None
    ) -> None:
        self.owned = node is not None
        self.namespace = namespace
        self._node = node  # ray._private.node.Node of the local Ray; None for an external Ray cluster
        self._lost = threading.Event()  # set when the local Ray died or was stopped; never cleared
        self._stopped = False
        self.ended = threading.Event()  # set when `stop` has stopped everything
        self._idle = threading.Condition()
        self._num_calls = 0  # running calls into Ray
        options = options or PlacementOptions()
        self.node_timeout = options.node_timeout  # seconds to wait until a node that died is back (--node-timeout)
        self._placement = Placement(self, options)
        self._placing = threading.Lock()

    @classmethod
    def start(
        cls,
        address: str | None = None,
        namespace: str = "penstock",
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        options: PlacementOptions | None = None,
    ) -> Cluster:
        """Start a local Ray that ends with this process, or connect to the external Ray cluster at `address` ("auto",
        "host:port" or "ray://..."). `num_cpus` and `num_gpus` are the resources of a local Ray; by default the cores
        that this process may use, and all GPUs that Ray finds."""
        import_ray_with_settings(is_local=address is None)
        import ray

        assert not ray.is_initialized(), "this process is already connected to Ray: stop the other Cluster first"
        log_ray_messages()
        quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
        if address is not None:
            with translate_ray_errors(address):
                check_ray_answers(address)
                connect_to_ray(address=address, **quiet)
            return cls(namespace, options=options)
        start_ray(num_cpus=num_cpus or cpu_count(), num_gpus=num_gpus, **quiet)
        return cls(namespace, ray._private.worker._global_node, options)

    def stop(self) -> None:
        """Remove the placement groups, which kills the processes in them, and disconnect from Ray; a local Ray is
        stopped. Safe to call twice. Threads that are waiting in `wait`, `get` or `call_ray` get ClusterLost."""
        if self._stopped:
            return
        self._stopped = True
        with suppress(ClusterLost):
            self._placement.release()
        self._lost.set()
        with self._idle:  # `ray.shutdown` during a running Ray call would end this process
            self._idle.wait_for(lambda: self._num_calls == 0, timeout=2 * POLL_SECONDS)
        processes = local_ray_processes() if self.owned else []
        self.ray.shutdown()
        kill_processes(processes)  # a worker that is still starting would outlive its raylet for a while
        if self._node is not None and not is_temp_directory_kept_at_exit():
            shutil.rmtree(self._node.get_session_dir_path(), ignore_errors=True)
        self.ended.set()

    @property
    def ray(self) -> Any:
        """Return the module `ray`, which reads its settings when it is imported (`import_ray_with_settings`)."""
        import ray

        return ray

    def alive(self) -> bool:
        """Return whether the daemons of the local Ray (GCS, raylet) are running. True for an external cluster, whose
        failure only becomes visible as an error of the next Ray call."""
        if self._node is not None and not self._lost.is_set() and self._node.dead_processes():
            self._lost.set()
        return not self._lost.is_set()

    def check_alive(self) -> None:
        """Raise ClusterLost if the local Ray has died."""
        if not self.alive():
            raise ClusterLost(
                "the run's local Ray died, and with it the trainer and the engines; restarting all of them"
            )

    def detached_options(self, name: str) -> dict[str, Any]:
        """Return the Ray options of a named, detached actor, which outlives the driver; {} on a local Ray."""
        return {} if self.owned else {"name": name, "lifetime": "detached"}

    def find_actor(self, name: str) -> Any | None:
        """Return the detached actor with this name of an earlier driver of this run, or None; always None on a local
        Ray."""
        if self.owned:
            return None
        try:
            return self.ray.get_actor(name)
        except ValueError:  # the actor does not exist
            return None

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Wait until one of the object references `calls` is ready or `timeout` seconds have passed (`ray.wait`).
        Return the ready ones (none after a timeout) and the pending ones. Raises ClusterLost if the local Ray died."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            with self._track_running_call():
                done, waiting = self.ray.wait(list(calls), num_returns=1, timeout=max(0.0, min(left, POLL_SECONDS)))
            if done:
                return done, waiting
            self.check_alive()  # also after the timeout: a caller that polls with short timeouts must notice, too
            if left <= POLL_SECONDS:
                return done, waiting

    def get(self, call: Any, timeout: float | None = None) -> Any:
        """Wait for the object reference `call` and return its result (`ray.get`)."""
        self.wait([call], timeout)
        with self._track_running_call():
            return self.ray.get(call, timeout=0)

    def call_ray(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a Ray function that may block forever (create or kill an actor, count GPUs), and return its result. The
        function runs in a thread, which is abandoned if the local Ray dies first."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                with self._track_running_call():
                    result.set_result(function(*args, **kwargs))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="ray-call", daemon=True).start()
        while True:
            try:
                return result.result(POLL_SECONDS)
            except TimeoutError:
                if result.done():  # `function` raised the TimeoutError
                    raise
                self.check_alive()

    @contextmanager
    def _track_running_call(self) -> Iterator[None]:
        """Count the block as a running Ray call, for which `stop` waits. Raises ClusterLost if the local Ray died."""
        with self._idle:
            self.check_alive()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of the whole Ray cluster."""
        return self._placement.num_gpus

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs that the run uses on each node."""
        return self._placement.gpus_per_node

    @property
    def spans_nodes(self) -> bool:
        """Return whether processes of the run, this driver included, may be on different nodes. On an external cluster
        this reserves the run's GPUs, because their nodes are unknown before."""
        with self._placing:
            return self._placement.spans_nodes

    def place_processes(self, num_processes: int, gpus_per_process: int = 1, first_gpu: int = 0) -> list[Slot]:
        """Return placements for processes, on consecutive GPUs of the run that begin with GPU number `first_gpu`.

        Trainer and engines placed at the same first GPU share GPUs (colocated). A process whose GPUs would be on two
        nodes gets the first GPUs of the second node instead. Without GPUs in the cluster, or with `gpus_per_process=0`,
        a placement reserves no resources, and the caller divides the CPU threads (`cpu_threads_per_process`). On an
        external cluster such processes are distributed over its nodes in order.
        Raises NodeLost if a node that the run used has died and is not back; try again later.
        """
        with self._placing:
            return self._placement.place(num_processes, gpus_per_process, first_gpu)

    def place_when_nodes_are_back(self, num_processes: int) -> list[Slot]:
        """Return placements for processes of one GPU each, as `place_processes`; if a node has died, wait for
        it up to `node_timeout` seconds, then raise NodeLost."""
        deadline, told = time.monotonic() + self.node_timeout, False
        while True:
            try:
                return self.place_processes(num_processes)
            except NodeLost as error:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    logger.warning("%s; waiting up to %.0f s for it (--node-timeout)", error, self.node_timeout)
                told = True
            time.sleep(POLL_SECONDS)

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        num_gpus: float = 0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> T:
        """Call `fn` once in another process and return its result; an exception of `fn` is re-raised unchanged. After
        `timeout` seconds the process is killed, and TimeoutError is raised."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "max_calls": 1}
        if env:
            options["runtime_env"] = {"env_vars": env}
        reference = self.call_ray(self.ray.remote(**options)(fn).remote, *args, **kwargs)
        try:
            return self.get(reference, timeout)
        except self.ray.exceptions.GetTimeoutError as error:
            self.ray.cancel(reference, force=True)
            raise TimeoutError(
                f"{fn.__name__} took longer than {timeout:.0f} s and was killed: raise its time limit or reduce the "
                "size of its input"
            ) from error
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error


def import_ray_with_settings(*, is_local: bool) -> None:
    """Set Ray's environment variables, which it reads when it is imported, and import it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_local:
        os.environ.setdefault("RAY_enable_metrics_collection", "0")  # other users could read the port of the metrics
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves trainer and engines on a busy machine
        if "RAY_AUTH_MODE" not in os.environ:
            # Other users of this machine can connect to Ray's loopback ports: a random token keeps them out.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        own_temp_directory()  # sets TMPDIR, which the processes of a local Ray inherit
        import_ray()


class ClusterStart:
    """Start a local Ray in a thread, because the start takes seconds in which this process can do other work.

    The kernel kills Ray's daemons when the thread that started them ends, so the thread lives until Ray is stopped.
    """

    def __init__(self, namespace: str, options: PlacementOptions) -> None:
        import_ray_with_settings(is_local=True)  # before the thread starts: imports in two threads at once can fail
        self._cluster: Future[Cluster] = Future()
        self._taken = False
        self._thread = threading.Thread(target=self._run, args=(namespace, options), name="ray-start", daemon=True)

    def start(self) -> Self:
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def _run(self, namespace: str, options: PlacementOptions) -> None:
        try:
            cluster = Cluster.start(namespace=namespace, options=options)
            with suppress(Exception):  # the stage that needs the GPUs fails with the same error
                cluster.place_processes(1)  # reserves the GPUs of the run
        except BaseException as error:
            self._cluster.set_exception(error)
            return
        self._cluster.set_result(cluster)
        cluster.ended.wait()

    def take(self) -> Cluster | None:
        """Wait for the start and return the cluster; None if Ray did not start, or if an earlier call returned it."""
        if self._taken:
            return None
        self._taken = True
        error = self._cluster.exception()
        if error is not None:
            logger.warning("Ray did not start in advance (%s); starting it again", error)
            return None
        return self._cluster.result()


@contextmanager
def translate_ray_errors(address: str) -> Iterator[None]:
    """Turn the errors of a connection to the Ray cluster at `address` into an EngineError."""
    import ray

    try:
        yield
    except EngineError:
        raise
    except (OSError, ValueError, ray.exceptions.RayError) as error:
        raise EngineError(
            f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head` and set the same "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN for this process, or omit --ray-address to start a local Ray that ends "
            "with this process"
        ) from error


def check_ray_answers(address: str) -> None:
    """Check that the control service (GCS) of a Ray cluster answers at `address` and accepts this process's token: Ray
    2.60 would try for 40 s. An address "ray://..." is not checked: Ray's client has a timeout."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address, parse_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    if address.startswith("ray://") or os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        return
    service = canonicalize_bootstrap_address(address)  # as `ray.init`: "auto" is the address of a Ray on this machine
    if service is None:  # "local": `ray.init` starts a Ray
        return
    host, port = parse_address(service)
    check_speaks_http2(host, int(port))
    try:
        GcsClient(address=service)
    except ray.exceptions.AuthenticationError as error:
        mode = os.environ.get("RAY_AUTH_MODE", "disabled")
        raise EngineError(
            f"the Ray cluster at {service} does not accept the token of this process (RAY_AUTH_MODE={mode}): set "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN to those of the cluster, give the address of another cluster as "
            "--ray-address HOST:PORT, or omit --ray-address to start a local Ray that ends with this process"
        ) from error


def check_speaks_http2(host: str, port: int) -> None:
    """Raise ConnectionError if no HTTP/2 server (gRPC) listens at host:port, or with RAY_USE_TLS no server at all."""
    place, problem = f"{host}:{port}", ""
    try:
        with socket.create_connection((host, port), ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(HTTP2_HELLO)
            if connection.recv(4, socket.MSG_WAITALL)[3:] != SETTINGS:
                problem = f"what listens at {place} is not a Ray cluster"
    except TimeoutError:
        problem = f"{place} does not answer in {ANSWER_SECONDS:g} s"
    except OSError as error:
        problem = f"{place}: {error.strerror or error}"
    if problem:
        raise ConnectionError(problem)


def cpu_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_threads_per_process(configured: int | None, num_processes: int = 1) -> int:
    """Return the number of CPU threads for one of `num_processes` processes that compute at the same time:
    `configured`, or an equal share of the cores. It changes the order of floating-point sums, and thus a run's bits."""
    return configured or max(1, cpu_count() // num_processes)
