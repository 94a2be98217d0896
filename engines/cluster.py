"""Ray: starting and ending it, who runs on which GPU, who outlives the driver, and the thread budget.

By default the driver owns a Ray of its own (`ray.init` on this machine), which dies with it. An address joins a standing one, where
trainer and engines are named and detached: they outlive a killed driver, and the next one finds them and asks what they hold. Ray here
only holds processes; what is true is in the store.

Every wait for Ray goes through `wait`, `get` or `call`, which look twice a second whether our own Ray lives: Ray itself would wait for
a dead one, or end this process after a minute.
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

from engines.local_ray import ClusterLost, import_ray, keep_signals, start_ray
from engines.scratch import kept, own_directory
from storage.errors import EngineError, LayoutError

T = TypeVar("T")

LOOK_EVERY = 0.5  # seconds between looks at our own Ray while something is awaited
GPU_SHARE = 0.45  # of a GPU, in Ray's accounting: a trainer rank and an engine fit on the same one, and a probe beside them


@dataclass(frozen=True)
class Slot:
    """Where one process runs."""

    options: dict[str, Any] = field(default_factory=dict)  # for `ray.remote(cls).options(**slot.options)`
    gpu_ids: tuple[str, ...] = ()  # the node's numbers of its GPUs, empty on CPU

    def with_env(self, **variables: str) -> dict[str, Any]:
        """The options, with environment variables for the process (Ray sets OMP_NUM_THREADS=1 unless told)."""
        return {**self.options, "runtime_env": {"env_vars": variables}}


class Cluster:
    """A connection to Ray. Make one with `Cluster.start`; `stop` ends every process it placed."""

    def __init__(self, namespace: str = "penstock", node: Any | None = None) -> None:
        self.owned = node is not None
        self.namespace = namespace
        self._node = node  # Ray's record of the processes that it has started for us; None of a standing Ray
        self._lost = threading.Event()  # for good: a later Ray of this process does not revive what was placed on this one
        self._stopped = False
        self._idle = threading.Condition()
        self._num_calls = 0  # into Ray, right now
        self._gpus: list[tuple[Any, int, str]] = []  # (placement group, bundle, the GPU's number on its node), in order
        self._groups: list[Any] = []

    @classmethod
    def start(
        cls, address: str | None = None, namespace: str = "penstock", num_cpus: int | None = None, num_gpus: int | None = None
    ) -> Cluster:
        """Start a Ray that ends with this process, or join the one at `address` ("auto", "host:port", "ray://...").

        Raises:
            EngineError: nothing answers at `address`.
            ClusterLost: no Ray could be started here, in START_TRIES tries.
        """
        # The other users of this machine reach its loopback: a token of our own keeps them out.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if address is None:
            own_directory()  # before anything that inherits TMPDIR
            import_ray()
        import ray

        assert not ray.is_initialized(), "this process has a Ray already: stop the other Cluster first"
        quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise EngineError(
                    f"no Ray answers at {address!r} ({error}): start one with `ray start --head` and give this process the same "
                    "RAY_AUTH_MODE and token, or leave --ray-address out to get a Ray that ends with this process"
                ) from error
            keep_signals()
            return cls(namespace)
        start_ray(num_cpus=num_cpus or cpu_count(), num_gpus=num_gpus, **quiet)
        keep_signals()
        return cls(namespace, ray._private.worker._global_node)

    def stop(self) -> None:
        """End what was placed and leave Ray, ending it if it is ours. Safe to call twice. Threads that still wait get ClusterLost."""
        import ray

        if self._stopped:
            return
        self._stopped = True
        with suppress(ClusterLost):
            for group in self._groups:
                self.call(ray.util.remove_placement_group, group)
        self._lost.set()
        with self._idle:  # Ray ends the process if it is shut down under a call
            self._idle.wait_for(lambda: self._num_calls == 0, timeout=2 * LOOK_EVERY)
        ray.shutdown()
        if self._node is not None and not kept():
            shutil.rmtree(self._node.get_session_dir_path(), ignore_errors=True)
        self._groups, self._gpus = [], []

    def alive(self) -> bool:
        """Whether our own Ray's processes run. Of a standing Ray only the calls themselves can tell."""
        if self._node is not None and not self._lost.is_set() and self._node.dead_processes():
            self._lost.set()
        return not self._lost.is_set()

    def check(self) -> None:
        """Raise ClusterLost if our own Ray has died."""
        if not self.alive():
            raise ClusterLost("the run's own Ray has died with the trainer and the engines: they are restarted")

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
            ClusterLost: our Ray has died meanwhile.
        """
        import ray

        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            with self._in_ray():
                done, waiting = ray.wait(list(calls), num_returns=1, timeout=max(0.0, min(left, LOOK_EVERY)))
            if done:
                return done, waiting
            self.check()  # before the deadline: callers that poll with short time limits must learn of it as well
            if left <= LOOK_EVERY:
                return done, waiting

    def get(self, call: Any, timeout: float | None = None) -> Any:
        """`ray.get` of one call.

        Raises:
            ray.exceptions.GetTimeoutError: time is up.
            ClusterLost: see `wait`.
        """
        import ray

        self.wait([call], timeout)
        with self._in_ray():
            return ray.get(call, timeout=0)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call something of Ray's that has no time limit of its own (placing an actor, killing one, counting GPUs).

        It runs in a thread, which is abandoned if our Ray dies meanwhile.

        Raises:
            ClusterLost: see `wait`.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                with self._in_ray():
                    result.set_result(function(*args, **kwargs))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="ray-call", daemon=True).start()
        while True:
            try:
                return result.result(LOOK_EVERY)
            except TimeoutError:
                if result.done():  # its own
                    raise
                self.check()

    @contextmanager
    def _in_ray(self) -> Iterator[None]:
        """Count a call into Ray, and refuse it if our Ray has died."""
        with self._idle:
            self.check()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        import ray

        return int(self.call(ray.cluster_resources).get("GPU", 0))

    def place(self, count: int, gpus_each: int = 1, offset: int = 0) -> list[Slot]:
        """Slots for `count` processes, on the GPUs `offset`, `offset + 1`, ... of this cluster's order.

        Roles placed at the same offset share GPUs (colocated); a role placed behind another has its own. Without any GPU in the
        cluster, or with `gpus_each=0`, a slot is just a process: the thread budget is the caller's.

        Raises:
            LayoutError: the cluster has fewer GPUs, or the GPUs of one slot lie on two nodes.
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
        reference = self.call(remote(**options)(fn).remote, *args, **kwargs)
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

        nodes = {self.call(placement_group_table, group)["bundles_to_node_id"][bundle] for group, bundle, _ in gpus}
        if len(nodes) > 1:
            raise LayoutError(f"one process was to use {len(gpus)} GPUs, which lie on {len(nodes)} nodes: use fewer GPUs each")
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
            raise LayoutError(
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
            group = self.call(placement_group, [{"GPU": 1}] * missing, strategy="PACK", **lasting)
        else:
            group = ray.util.get_placement_group(name)
            missing = group.bundle_count
        self._groups.append(group)
        try:
            self.get(self.call(group.ready), timeout=60)
        except ray.exceptions.GetTimeoutError as error:
            raise LayoutError(
                f"{missing} more GPUs are needed, but other processes of this Ray hold them: wait or use fewer"
            ) from error
        probes = [
            ray.remote(_where_am_i)
            .options(num_cpus=0, num_gpus=0.05, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))
            .remote()
            for bundle in range(missing)
        ]
        found = [self.get(probe, timeout=120) for probe in probes]
        order = sorted(range(missing), key=lambda bundle: (found[bundle][0], len(found[bundle][1]), found[bundle][1]))
        self._gpus += [(group, bundle, found[bundle][1]) for bundle in order]


def _where_am_i() -> tuple[str, str]:
    """The node and the number of the GPU this task was given."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_threads(configured: int | None, sharers: int = 1) -> int:
    """Threads for one of `sharers` processes that compute at the same time: as configured, else an even share of the cores.

    The number is part of a run's numerics: floating-point sums depend on how many threads make them.
    """
    return configured or max(1, cpu_count() // sharers)
