"""Ray: starting and ending it, who runs on which GPU, who outlives the driver, free ports and the thread budget.

By default the driver owns a Ray of its own (`ray.init` on this machine), which dies with it. An address joins a standing one, where
trainer and engines are named and detached: they outlive a killed driver, and the next one finds them and asks what they hold. Ray here
only holds processes; what is true is in the store.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

OBJECT_STORE_BYTES = 200 << 20  # refs and numbers pass through Ray; samples and weights never do
LOOK_EVERY = 0.5  # seconds between looks at our own Ray while something is awaited
HELPERS = ("start_monitor", "start_log_monitor", "start_api_server")  # of Ray's node: what starts processes that we do not need
GPU_SHARE = 0.45  # of a GPU, in Ray's accounting: a trainer rank and an engine fit on the same one, and a probe beside them


@dataclass(frozen=True)
class Slot:
    """Where one process runs."""

    options: dict[str, Any] = field(default_factory=dict)  # for `ray.remote(cls).options(**slot.options)`
    gpu_ids: tuple[str, ...] = ()  # the node's numbers of its GPUs, empty on CPU

    def with_env(self, **variables: str) -> dict[str, Any]:
        """The options, with environment variables for the process (Ray sets OMP_NUM_THREADS=1 unless told)."""
        return {**self.options, "runtime_env": {"env_vars": variables}}


class ClusterLost(ConnectionError):
    """The driver's own Ray is gone, and everything in it; a new one must be started."""


class Cluster:
    """A connection to Ray. Make one with `Cluster.start`; `stop` ends every process it placed."""

    def __init__(self, owned: bool, namespace: str = "penstock") -> None:
        self.owned = owned
        self.namespace = namespace
        self._gpus: list[tuple[Any, int, str]] = []  # (placement group, bundle, the GPU's number on its node), in order
        self._groups: list[Any] = []

    @classmethod
    def start(
        cls, address: str | None = None, namespace: str = "penstock", num_cpus: int | None = None, num_gpus: int | None = None
    ) -> Cluster:
        """Start a Ray that ends with this process, or join the one at `address` ("auto", "host:port", "ray://...").

        Raises:
            ValueError: nothing answers at `address`.
        """
        # The other users of this machine reach its loopback: a token of our own keeps them out.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        import ray

        assert not ray.is_initialized(), "this process has a Ray already: stop the other Cluster first"
        quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise ValueError(
                    f"no Ray answers at {address!r} ({error}): start one with `ray start --head` and give this process the same "
                    "RAY_AUTH_MODE and token, or leave the address out to get a Ray that ends with this process"
                ) from error
            _keep_signals()
            return cls(owned=False, namespace=namespace)
        with _without_helpers(), _on_loopback():
            ray.init(
                address="local",
                num_cpus=num_cpus or cpu_count(),
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        _keep_signals()
        return cls(owned=True, namespace=namespace)

    def stop(self) -> None:
        """End what was placed and leave Ray, ending it if it is ours. Safe to call twice."""
        import ray

        if ray.is_initialized():
            if self.alive():
                for group in self._groups:
                    ray.util.remove_placement_group(group)
            ray.shutdown()
        self._groups, self._gpus = [], []

    def alive(self) -> bool:
        """Whether our own Ray's processes run. Of a standing Ray only the calls themselves can tell."""
        import ray

        if not self.owned:
            return True
        node = ray._private.worker._global_node
        return node is not None and not node.dead_processes()

    def lasting(self, name: str) -> dict[str, Any]:
        """Options for an actor of this run that is to outlive the driver: none on our own Ray, where nothing can."""
        return {} if self.owned else {"name": name, "lifetime": "detached"}

    def find(self, name: str) -> Any | None:
        """The lasting actor of that name that an earlier driver of this run has left; None on our own Ray."""
        import ray

        if self.owned:
            return None
        try:
            return ray.get_actor(name)
        except ValueError:  # Ray's word for "no such actor"
            return None

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """`ray.wait` for one of the calls: those done (none if time is up) and those still running.

        Raises:
            ClusterLost: our Ray has died meanwhile. Ray itself would notice after a minute, and end this process.
        """
        import ray

        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            done, waiting = ray.wait(list(calls), num_returns=1, timeout=max(0.0, min(left, LOOK_EVERY)))
            if done or left <= LOOK_EVERY:
                return done, waiting
            if not self.alive():
                raise ClusterLost("the run's own Ray has died, and the trainer and the engines with it; they are started anew")

    def get(self, call: Any, timeout: float | None = None) -> Any:
        """`ray.get` of one call, which also notices that our Ray has died.

        Raises:
            ray.exceptions.GetTimeoutError: time is up.
            ClusterLost: see `wait`.
        """
        import ray

        self.wait([call], timeout)
        return ray.get(call, timeout=0)

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def place(self, count: int, gpus_each: int = 1, offset: int = 0) -> list[Slot]:
        """Slots for `count` processes, on the GPUs `offset`, `offset + 1`, ... of this cluster's order.

        Roles placed at the same offset share GPUs (colocated); a role placed behind another has its own. Without any GPU in the
        cluster, or with `gpus_each=0`, a slot is just a process: the thread budget is the caller's.

        Raises:
            ValueError: the cluster has fewer GPUs, or the GPUs of one slot lie on two nodes.
        """
        if gpus_each == 0 or self.num_gpus == 0:
            return [Slot({"num_cpus": 0}) for _ in range(count)]
        self._reserve(offset + count * gpus_each)
        starts = range(offset, offset + count * gpus_each, gpus_each)
        return [self._slot(self._gpus[start : start + gpus_each]) for start in starts]

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        num_gpus: float = 0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> T:
        """Call `fn` once in a process of its own; its exception is raised here as it is.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the process is killed.
        """
        import ray

        remote: Any = ray.remote
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "max_calls": 1}
        if env:
            options["runtime_env"] = {"env_vars": env}
        reference = remote(**options)(fn).remote(*args, **kwargs)
        try:
            return self.get(reference, timeout)
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(reference, force=True)
            raise TimeoutError(
                f"{fn.__name__} took longer than {timeout:.0f} s and was killed: raise its time limit or give it less to do"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def _slot(self, gpus: list[tuple[Any, int, str]]) -> Slot:
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = {placement_group_table(group)["bundles_to_node_id"][bundle] for group, bundle, _ in gpus}
        if len(nodes) > 1:
            raise ValueError(f"one process was to use {len(gpus)} GPUs, which lie on {len(nodes)} nodes: use fewer GPUs each")
        group, bundle, _ = gpus[0]
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 0, "num_gpus": GPU_SHARE, "scheduling_strategy": strategy}
        return Slot(options, tuple(number for _, _, number in gpus))

    def _reserve(self, needed: int) -> None:
        """Hold the first `needed` GPUs, in the order of nodes and numbers; on a standing Ray first those an earlier driver holds."""
        for name in self._left_behind():
            self._hold(name, 0)
        missing = needed - len(self._gpus)
        if missing <= 0:
            return
        if needed > self.num_gpus:
            raise ValueError(
                f"the cluster has {self.num_gpus} GPUs, {needed} are needed: use fewer, or colocate trainer and engines"
            )
        self._hold(f"{self.namespace}-gpus-{len(self._groups):03d}", missing)

    def _left_behind(self) -> list[str]:
        """Names of placement groups of this run that this driver does not hold yet, in the order they were made."""
        from ray.util.placement_group import placement_group_table

        if self.owned:
            return []
        prefix, first = f"{self.namespace}-gpus-", len(self._groups)
        table = placement_group_table().values()
        names = {group["name"] for group in table if group["name"].startswith(prefix) and group["state"] != "REMOVED"}
        return sorted(names)[first:]

    def _hold(self, name: str, missing: int) -> None:
        """Hold `missing` more GPUs in a placement group of that name, or with 0 the group that is there."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if missing:
            lasting = {} if self.owned else {"name": name, "lifetime": "detached"}
            group = placement_group([{"GPU": 1}] * missing, strategy="PACK", **lasting)
        else:
            group = ray.util.get_placement_group(name)
            missing = group.bundle_count
        self._groups.append(group)
        try:
            ray.get(group.ready(), timeout=60)
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(
                f"{missing} more GPUs are needed, but other processes of this Ray hold them: wait or use fewer"
            ) from error
        probes = [
            ray.remote(_where_am_i)
            .options(num_cpus=0, num_gpus=0.05, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))
            .remote()
            for bundle in range(missing)
        ]
        found = ray.get(probes, timeout=120)
        order = sorted(range(missing), key=lambda bundle: (found[bundle][0], len(found[bundle][1]), found[bundle][1]))
        self._gpus += [(group, bundle, found[bundle][1]) for bundle in order]


@contextmanager
def _without_helpers() -> Iterator[None]:
    """In this block `ray.init` leaves out three processes of no use to one driver on one machine: the autoscaler's monitor, the one that
    sends logs to drivers, and the dashboard's server, which Ray 2.60 starts without a dashboard too. It has no options for that; they took
    2.4 s of processor time, and 4 s of a start on 2 cores.
    """
    from ray._private.node import Node

    starters = {name: starter for name in HELPERS if (starter := getattr(Node, name, None))}
    for name in starters:
        setattr(Node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, starter in starters.items():
            setattr(Node, name, starter)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """In this block `ray.init` takes the address 127.0.0.1 as it is given; all processes of the node then listen there alone. Ray 2.60 replaces
    it by the machine's own address otherwise, and its processes listen on all interfaces.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve


def _keep_signals() -> None:
    """Python's handler of SIGTERM in its place again: `ray.init` puts one of its own there, which prints a stack and ends the process."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)


def _where_am_i() -> tuple[str, str]:
    """The node and the number of the GPU this task was given."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def free_port(highest: int = 65_535) -> int:
    """A TCP port of this machine up to `highest` that nobody listens on right now."""
    ports = [0] if highest >= 65_535 else random.sample(range(20_000, highest + 1), 50)  # 0: the system chooses
    for port in ports:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue  # taken
            return int(sock.getsockname()[1])
    raise RuntimeError(f"50 ports between 20000 and {highest} were tried and none is free: what holds them?")


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_threads(configured: int | None, sharers: int = 1) -> int:
    """Threads for one of `sharers` processes that compute at the same time: as configured, else an even share of the cores.

    The number is part of a run's numerics: floating-point sums depend on how many threads make them.
    """
    return configured or max(1, cpu_count() // sharers)
