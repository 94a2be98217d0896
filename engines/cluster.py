"""Connect to Ray, place processes on GPUs, keep actors alive across driver restarts, and divide CPU threads.

By default the driver starts its own local Ray (`ray.init` on this machine), which ends when the driver ends. With an
address the driver joins an external (long-running) Ray cluster, where trainer and engines are named, detached actors:
they survive a killed driver, and the next driver finds them by name and reuses them if they match its configuration.
Ray only holds processes; the state of a run is in the store.

Every blocking Ray call goes through `Cluster.wait`, `get` or `call_ray`, which check twice a second that the local Ray
is alive. Ray's own functions would wait forever for a dead Ray, or end this process after a minute.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.engines.local_ray import ClusterLost, import_ray, preserve_sigterm_handler, start_ray
from penstock.engines.scratch import is_temp_directory_kept_at_exit, own_temp_directory
from penstock.storage.errors import EngineError, LayoutError

T = TypeVar("T")

POLL_SECONDS = 0.5  # interval at which a blocking Ray call checks that the local Ray is alive
GPU_SHARE = 0.45  # Ray's `num_gpus` of one process: a trainer rank, an engine and a probe (0.05) fit on one GPU


@dataclass(frozen=True)
class Slot:
    """Placement of one process: Ray options and GPU ids."""

    options: dict[str, Any] = field(default_factory=dict)  # for `ray.remote(cls).options(**slot.options)`
    gpu_ids: tuple[str, ...] = ()  # GPU ids on the node, for CUDA_VISIBLE_DEVICES; empty on CPU

    def actor_options_with_env(self, **variables: str) -> dict[str, Any]:
        """Return Ray actor options: `options` plus these environment variables (Ray sets OMP_NUM_THREADS=1 by
        default)."""
        return {**self.options, "runtime_env": {"env_vars": variables}}


class Cluster:
    """A connection to Ray, created with `Cluster.start`. `stop` kills the processes placed through this connection."""

    def __init__(self, namespace: str = "penstock", node: Any | None = None) -> None:
        self.owned = node is not None
        self.namespace = namespace
        self._node = node  # ray._private.node.Node of the local Ray; None for an external Ray cluster
        self._lost = threading.Event()  # set when the local Ray died or was stopped; never cleared
        self._stopped = False
        self._idle = threading.Condition()
        self._num_calls = 0  # running calls into Ray
        self._gpus: list[tuple[Any, int, str]] = []  # (placement group, bundle index, GPU id), sorted by node and id
        self._groups: list[Any] = []

    @classmethod
    def start(
        cls,
        address: str | None = None,
        namespace: str = "penstock",
        num_cpus: int | None = None,
        num_gpus: int | None = None,
    ) -> Cluster:
        """Start a local Ray that ends with this process, or connect to the external Ray cluster at `address`.

        Args:
            address: "auto", "host:port" or "ray://..."; None starts a local Ray.
            namespace: Ray namespace of the run's named actors.
            num_cpus: CPUs of a local Ray; by default the cores that this process may use.
            num_gpus: GPUs of a local Ray; detected by Ray by default.

        Raises:
            EngineError: no Ray cluster answers at `address`.
            ClusterLost: the local Ray did not start in START_TRIES tries.
        """
        # Other users of this machine can connect to its loopback ports: a random token keeps them out.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if address is None:
            own_temp_directory()  # sets TMPDIR, which the processes started below inherit
            import_ray()
        import ray

        assert not ray.is_initialized(), "this process is already connected to Ray: stop the other Cluster first"
        quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
        if address is not None:
            try:
                with preserve_sigterm_handler():
                    ray.init(address=address, **quiet)
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise EngineError(
                    f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head` and set the "
                    "same RAY_AUTH_MODE and RAY_AUTH_TOKEN for this process, or omit --ray-address to start a local "
                    "Ray that ends with this process"
                ) from error
            return cls(namespace)
        with preserve_sigterm_handler():
            start_ray(num_cpus=num_cpus or cpu_count(), num_gpus=num_gpus, **quiet)
        return cls(namespace, ray._private.worker._global_node)

    def stop(self) -> None:
        """Remove the placement groups, which kills the processes in them, and disconnect from Ray; a local Ray is
        stopped.

        Safe to call twice. Threads that are waiting in `wait`, `get` or `call_ray` get ClusterLost.
        """
        import ray

        if self._stopped:
            return
        self._stopped = True
        with suppress(ClusterLost):
            for group in self._groups:
                self.call_ray(ray.util.remove_placement_group, group)
        self._lost.set()
        with self._idle:  # `ray.shutdown` during a running Ray call would end this process
            self._idle.wait_for(lambda: self._num_calls == 0, timeout=2 * POLL_SECONDS)
        ray.shutdown()
        if self._node is not None and not is_temp_directory_kept_at_exit():
            shutil.rmtree(self._node.get_session_dir_path(), ignore_errors=True)
        self._groups, self._gpus = [], []

    def alive(self) -> bool:
        """Return whether the daemons of the local Ray (GCS, raylet) are running.

        Always True for an external Ray cluster, whose failure only becomes visible as an error of the next Ray call.
        """
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
        """Return the Ray options that make an actor named and detached, so that it outlives the driver; {} on a local
        Ray, which ends with the driver."""
        return {} if self.owned else {"name": name, "lifetime": "detached"}

    def find_actor(self, name: str) -> Any | None:
        """Return the detached actor with this name, created by an earlier driver of this run; None if it does not
        exist.

        Always None on a local Ray.
        """
        import ray

        if self.owned:
            return None
        try:
            return ray.get_actor(name)
        except ValueError:  # the actor does not exist
            return None

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Wait until one of the object references `calls` is ready or `timeout` seconds have passed (`ray.wait`).

        Returns:
            The ready object references (empty after a timeout), and the pending ones.

        Raises:
            ClusterLost: the local Ray died while waiting.
        """
        import ray

        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            with self._track_running_call():
                done, waiting = ray.wait(list(calls), num_returns=1, timeout=max(0.0, min(left, POLL_SECONDS)))
            if done:
                return done, waiting
            self.check_alive()  # also if the timeout is over, for callers that poll with short timeouts
            if left <= POLL_SECONDS:
                return done, waiting

    def get(self, call: Any, timeout: float | None = None) -> Any:
        """Wait for the object reference `call` and return its result (`ray.get`).

        Raises:
            ray.exceptions.GetTimeoutError: the result does not arrive within `timeout` seconds.
            ClusterLost: see `wait`.
        """
        import ray

        self.wait([call], timeout)
        with self._track_running_call():
            return ray.get(call, timeout=0)

    def call_ray(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a Ray function that may block forever (create or kill an actor, count GPUs), and return its result.

        The function runs in a thread; if the local Ray dies before it returns, the thread is abandoned.

        Raises:
            ClusterLost: see `wait`.
        """
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
        """Count the block as a running Ray call; `stop` waits for running calls. Raises ClusterLost if the local Ray
        died."""
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
        import ray

        return int(self.call_ray(ray.cluster_resources).get("GPU", 0))

    def place_processes(self, num_processes: int, gpus_per_process: int = 1, first_gpu: int = 0) -> list[Slot]:
        """Return placements for processes, on consecutive GPUs from GPU number `first_gpu` of the cluster on.

        Trainer and engines placed at the same first GPU share GPUs (colocated). Without GPUs in the cluster, or with
        `gpus_per_process=0`, a placement reserves no resources, and the caller divides the CPU threads
        (`cpu_threads_per_process`).

        Args:
            num_processes: number of placements.
            gpus_per_process: number of GPUs of one process.
            first_gpu: index of the first GPU; GPUs are ordered by node, then by GPU id.

        Raises:
            LayoutError: the cluster has too few GPUs, or the GPUs of one process would be on different nodes.
        """
        if gpus_per_process == 0 or self.num_gpus == 0:
            return [Slot({"num_cpus": 0}) for _ in range(num_processes)]
        self._reserve_gpus(first_gpu + num_processes * gpus_per_process)
        starts = range(first_gpu, first_gpu + num_processes * gpus_per_process, gpus_per_process)
        return [self._make_slot(self._gpus[start : start + gpus_per_process]) for start in starts]

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        num_gpus: float = 0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> T:
        """Call `fn` once in another process and return its result; an exception of `fn` is re-raised unchanged.

        Raises:
            TimeoutError: `fn` took longer than `timeout` seconds; its process was killed.
        """
        import ray

        remote: Any = ray.remote
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "max_calls": 1}
        if env:
            options["runtime_env"] = {"env_vars": env}
        reference = self.call_ray(remote(**options)(fn).remote, *args, **kwargs)
        try:
            return self.get(reference, timeout)
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(reference, force=True)
            raise TimeoutError(
                f"{fn.__name__} took longer than {timeout:.0f} s and was killed: raise its time limit or reduce the "
                "size of its input"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def _make_slot(self, gpus: list[tuple[Any, int, str]]) -> Slot:
        """Return the placement of one process on these GPUs: (placement group, bundle index, GPU id) of each."""
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = {self.call_ray(placement_group_table, group)["bundles_to_node_id"][bundle] for group, bundle, _ in gpus}
        if len(nodes) > 1:
            raise LayoutError(
                f"the {len(gpus)} GPUs of one process are on {len(nodes)} nodes, but must be on one: use fewer GPUs "
                "per process"
            )
        group, bundle, _ = gpus[0]
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 0, "num_gpus": GPU_SHARE, "scheduling_strategy": strategy}
        return Slot(options, tuple(gpu_id for _, _, gpu_id in gpus))

    def _reserve_gpus(self, needed: int) -> None:
        """Reserve GPUs with placement groups until `needed` are reserved in total. On an external Ray cluster the
        placement groups of an earlier driver of this run are reused first."""
        for name in self._unclaimed_placement_group_names():
            self._add_placement_group(name, 0)
        missing = needed - len(self._gpus)
        if missing <= 0:
            return
        if needed > self.num_gpus:
            raise LayoutError(
                f"the cluster has {self.num_gpus} GPUs, but {needed} are needed: use fewer GPUs, or colocate trainer "
                "and engines"
            )
        self._add_placement_group(f"{self.namespace}-gpus-{len(self._groups):03d}", missing)

    def _unclaimed_placement_group_names(self) -> list[str]:
        """Return the names of the placement groups that earlier drivers of this run left on the external Ray cluster
        and that this driver has not taken over yet, oldest first."""
        from ray.util.placement_group import placement_group_table

        if self.owned:
            return []
        prefix, first = f"{self.namespace}-gpus-", len(self._groups)
        table = placement_group_table().values()
        names = {group["name"] for group in table if group["name"].startswith(prefix) and group["state"] != "REMOVED"}
        return sorted(names)[first:]

    def _add_placement_group(self, name: str, num_gpus: int) -> None:
        """Reserve `num_gpus` GPUs in a new placement group named `name`; with `num_gpus=0` reuse the existing group."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if num_gpus:
            options = self.detached_options(name)
            group = self.call_ray(placement_group, [{"GPU": 1}] * num_gpus, strategy="PACK", **options)
        else:
            group = ray.util.get_placement_group(name)
            num_gpus = group.bundle_count
        self._groups.append(group)
        try:
            self.get(self.call_ray(group.ready), timeout=60)
        except ray.exceptions.GetTimeoutError as error:
            raise LayoutError(
                f"could not reserve {num_gpus} GPUs within 60 s, because other processes of this Ray cluster use them: "
                "wait until they end, or use fewer GPUs"
            ) from error
        probes = [
            ray.remote(_assigned_node_and_gpu_ids)
            .options(num_cpus=0, num_gpus=0.05, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))
            .remote()
            for bundle in range(num_gpus)
        ]
        locations = [self.get(probe, timeout=120) for probe in probes]  # (node id, GPU id) of each bundle
        order = sorted(
            range(num_gpus), key=lambda bundle: (locations[bundle][0], len(locations[bundle][1]), locations[bundle][1])
        )
        self._gpus += [(group, bundle, locations[bundle][1]) for bundle in order]


def _assigned_node_and_gpu_ids() -> tuple[str, str]:
    """Return the node id and the GPU id that Ray assigned to this task."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def cpu_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_threads_per_process(configured: int | None, num_processes: int = 1) -> int:
    """Return the number of CPU threads for one of `num_processes` processes that compute at the same time:
    `configured`, or an equal share of the cores.

    The thread count affects a run's numerics, because it changes the order of floating-point sums.
    """
    return configured or max(1, cpu_count() // num_processes)
