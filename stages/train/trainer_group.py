"""The trainer's group of Ray actors, one per rank, called together under one deadline.

If a call fails or times out on one rank, the whole group is killed: ranks that wait in a collective for a dead rank
cannot continue, and an interrupted step leaves unusable weights. `restore.py` restores the policy in a new group.

On an external (long-running) Ray cluster the ranks survive a killed driver as named actors. The run's next driver takes
them over if their build (`spec.Build`) is the same, and otherwise kills them. A rank accepts only calls of the driver
that took it over last (`TrainActor.call`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from penstock.engines.cluster import Cluster, ClusterLost, cpu_threads_per_process
from penstock.engines.generation import OVER_MEMORY, WeightTransport
from penstock.engines.network import socket_environment
from penstock.engines.serving.endpoints import known_api_keys
from penstock.engines.training import MemorySwitch, StateKind, train_backend
from penstock.engines.weights.transfer import ProcessPlace
from penstock.stages.train.spec import (
    FREES_ENGINES_MEMORY,
    AuxiliaryModel,
    Build,
    FencedError,
    PolicyState,
    RankDied,
    RankInfo,
    SaveResult,
    TrainerSpec,
    TrainResult,
)
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError
from penstock.storage.store import Store

QUERY_TIMEOUT = 60.0  # seconds for a query that does not touch the weights
FAILURE_QUERY_TIMEOUT = 2.0  # seconds for the queries after a failure: which driver owns the ranks, which rank died
LOG_LINES = 20  # number of lines of a dead rank's log in the error


class TrainerGroup:
    """The Ray actors of the trainer. `ensure_started` starts them; they may be killed and restarted at any time.

    Two threads may use the group (one saves a checkpoint during the next rollout): `lock` serializes the calls, and the
    caller may hold it for several calls. `kill` does not wait for the lock.

    Args:
        cluster: Ray cluster on which the actors run.
        spec: models and options of the ranks.
        before_onload: frees the device memory of other processes on the same devices. Called, with `lock` held, before
            ranks build models or run a method of `FREES_ENGINES_MEMORY`.
        offloads: whether `offload` will be called. New ranks then allocate the host memory for it while they load
            weights, so that the first offload does not wait for the allocation.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: TrainerSpec,
        before_onload: Callable[[], None] = lambda: None,
        offloads: bool = False,
    ) -> None:
        self.cluster = cluster
        self.spec = spec
        self.lock = threading.RLock()
        self.before_onload, self.offloads = before_onload, offloads
        self._owner = uuid.uuid4().hex
        self._actors: list[Any] = []
        self._built = False  # whether the ranks in `_actors` have models
        self._ranks: list[RankInfo] = []
        self._fenced: FencedError | None = None  # set when another driver has taken over; never reset

    # ---- start and end -----------------------------------------------------------------------------------------------

    def start_processes(self) -> None:
        """Make sure that ranks are running: keep the ranks of this driver, else take over ranks of the run's previous
        driver that are still running, else start processes without models, which use no device memory. New processes
        import torch and the engine after this method has returned."""
        with self.lock:
            if self._actors or self._take_over_ranks():
                return
            import ray

            from penstock.stages.train.actor import TrainActor

            build, incarnation = current_build(self.spec), uuid.uuid4().hex[:12]
            actor = ray.remote(TrainActor)
            actors: list[Any] = []
            for rank, slot in enumerate(self.cluster.place_when_nodes_are_back(build.num_ranks)):
                variables = train_backend().rank_environment(self.spec.config.parallel_layout, build.threads)
                variables |= socket_environment(self.spec.network_interface)
                options = actor.options(
                    **slot.options,
                    runtime_env={"env_vars": variables},
                    max_restarts=0,
                    **self.cluster.detached_options(f"trainer-{rank}"),
                )
                actors.append(self.cluster.call_ray(options.remote, build, rank, incarnation, self._owner))
                actors[-1].call.remote(self._owner, "import_libraries")
            self._actors, self._built = actors, False

    def ensure_started(self) -> None:
        """Make sure that ranks with models are running: call `start_processes`, and let new ranks build models with
        random weights."""
        with self.lock:
            self.start_processes()
            if self._built:
                return
            self._ranks = self._call("adopt", self._owner)
            store = Store(self.spec.store, self.spec.store_options, probe=False)
            nodes = [rank.node for rank in self._ranks]
            check_store_is_shared(store, lambda path: self._call("path_exists", path), nodes)
            self.before_onload()
            [rendezvous] = self._call("open_rendezvous", len(set(nodes)) == 1, ranks=1)
            self._call("connect_and_build", rendezvous, self.offloads)
            self._built = True

    def kill(self, actors: list[Any] | None = None) -> None:
        """Kill every rank, or only `actors`, immediately, unless another driver owns them. A call for which another
        thread is waiting fails. `actors` are the ranks that a failed call used: if the group has been restarted since,
        its new ranks are not killed."""
        import ray

        actors = self._actors if actors is None else actors
        if self._actors is actors:
            self._actors = []
        # only on an external Ray cluster can another driver own the ranks
        if actors and (self.cluster.owned or not _is_fenced(actors[0], self._owner)):
            with suppress(ClusterLost):  # the ranks ended with the cluster
                for actor in actors:
                    self.cluster.call_ray(ray.kill, actor)

    def _take_over_ranks(self) -> bool:
        """Take over the ranks of the run's previous driver if all of them answer and have this driver's options, size
        and code (`Build`); otherwise kill them. Return whether they were taken over. Raises FencedError if another
        driver has taken over this driver's ranks."""
        import ray

        if self._fenced is not None:
            raise self._fenced
        existing = _find_actors(self.cluster, self.spec)
        alive = [actor for actor in existing if actor is not None]
        if not alive:
            return False
        build = current_build(self.spec)
        try:
            ranks: list[RankInfo] = ray.get([actor.adopt.remote(self._owner) for actor in alive], timeout=QUERY_TIMEOUT)
        except (ray.exceptions.RayError, TimeoutError):
            ranks = []
        states = {(rank.build, rank.joined, rank.incarnation) for rank in ranks}
        complete = len(ranks) == len(existing) == build.num_ranks
        if complete and len(states) == 1 and states.pop()[:2] == (build.hash, True):
            self._actors, self._ranks, self._built = alive, ranks, True
            return True
        for actor in alive:
            self.cluster.call_ray(ray.kill, actor)
        deadline = time.monotonic() + QUERY_TIMEOUT
        while any(_find_actors(self.cluster, self.spec)):  # Ray frees a name only after it has noticed the death
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"trainer ranks of an earlier driver of run {self.spec.run!r} were killed but did not exit within "
                    f"{QUERY_TIMEOUT:g} s: find them with `ray list actors`, end their processes, and resume"
                )
            time.sleep(0.05)
        return False

    # ---- queries -----------------------------------------------------------------------------------------------------

    def policy_state(self) -> PolicyState | None:
        """Return the policy version that all ranks hold, or None if no ranks have models. If a rank does not answer, or
        the ranks hold different states, kill the group and return None. Raises FencedError if another driver has taken
        over the ranks."""
        import ray

        with self.lock:
            if not self._has_models() and (self._actors or not self._take_over_ranks()):
                return None
            try:
                first, *others = self._call("state", timeout=QUERY_TIMEOUT)
            except (ray.exceptions.RayError, RankDied, TimeoutError):
                return None
            if any(other != first for other in others):
                self.kill()
                return None
            return first

    def digest(self) -> dict[str, str]:
        """Return the hash of every parameter shard of all ranks: shard name -> hash."""
        return _merge_digests(self._call("digest"))

    def optimizer_digest(self) -> dict[str, str]:
        """Return the hashes of optimizer, scheduler and RNG states of all ranks: name -> hash."""
        return _merge_digests(self._call("optimizer_digest"))

    def fingerprint(self) -> dict[str, Any]:
        """Return rank 0's description of everything, except weights and data, that determines the result of a training
        step bit for bit: hardware, libraries, parallel layout, packing options."""
        return self._call("fingerprint")[0]

    # ---- commands ----------------------------------------------------------------------------------------------------

    def load(
        self, version: int, base: Commit | None, checkpoint: Commit | None, auxiliary: dict[AuxiliaryModel, Commit]
    ) -> None:
        """Load policy `version` on all ranks from the files of the given commits; see `TrainActor.load`."""
        self._call("load", version, base, checkpoint, auxiliary)

    def train(
        self, rollout: Commit, version: int, attempt: str | None = None, earlier: Sequence[Commit] = ()
    ) -> TrainResult:
        """Train policy `version` on one committed rollout, and on groups of `earlier` ones (--replay-share), which
        gives policy `version + 1`. If `attempt` is given, the log-prob and advantage of every trained token are written
        under this key of the store."""
        results = self._call("train", rollout, version, attempt, earlier)
        return results[0].model_copy(update={"digest": _merge_digests([result.digest for result in results])})

    def objective_of_samples(
        self, rollout: Commit, evaluations: Sequence[Commit], contrast: Sequence[float], sign: int
    ) -> list[float]:
        """Return the objective of every sample of `rollout` after optimizer steps on the samples of `evaluations`; see
        `TrainActor.objective_of_samples`. Afterwards the ranks do not hold a policy version."""
        result: list[float] = self._call("objective_of_samples", rollout, evaluations, contrast, sign)[0]
        return result

    def save(self, attempt: str) -> SaveResult:
        """Write weights, optimizer, learning-rate scheduler and RNG states of all ranks under the key `attempt`. The
        files are durable, but not committed yet."""
        results: list[SaveResult] = self._call("save", attempt)
        return SaveResult(
            files=sorted((file for result in results for file in result.files), key=lambda file: file.path),
            digest=_merge_digests([result.digest for result in results]),
            optimizer_digest=_merge_digests([result.optimizer_digest for result in results]),
        )

    def export(
        self, version: int, directory: Path, write: Callable[..., Commit], timeout: float | None = None
    ) -> Commit | None:
        """Call `write(weights=...)` on rank 0 with the weights of policy `version`, and return its result. Return None
        if this driver's ranks do not hold this version, or if `directory`, which `write` reads, is not on rank 0's
        machine."""
        with self.lock:
            state = self.policy_state() if self._actors else None
            if state is None or (state.run, state.version, state.clean) != (self.spec.run, version, True):
                return None
            if not self._call("path_exists", directory, ranks=1)[0]:
                return None
            return self._call("export", write, timeout=timeout)[0]

    def publish(self, urls: list[str], version: str, transport: WeightTransport = OVER_MEMORY) -> None:
        """Send the policy's weights to the engines at `urls`, which then report `version` (`<run>/<policy version>`).

        Raises:
            EngineGone, EngineRefused: an engine failed; the ranks continue to run.
        """
        errors = [error for error in self._call("publish", urls, version, transport, known_api_keys(urls)) if error]
        if errors:
            raise errors[0]

    def offload(self, keep: tuple[StateKind, ...] = ()) -> None:
        """If ranks have models, move weights and optimizer state of policy and critic to host memory, and discard their
        gradients. `keep`: kinds of the policy's state that stay where they are. Later calls move the state that they
        need back."""
        with self.lock:
            if self._has_models():
                self._call("offload", keep)

    def memory_use(self) -> tuple[int, int]:
        """Return the bytes used on the device of rank 0, by all processes, and by rank 0 in host memory; zeros if no
        ranks have models."""
        with self.lock:
            return self._call("memory_use", ranks=1)[0] if self._has_models() else (0, 0)

    def take_memory_switches(self) -> list[MemorySwitch]:
        """Return time and memory use of each offload and onload since the last call of this method, on the rank that
        used the most device memory; [] if no ranks have models."""
        with self.lock:
            ranks: list[list[MemorySwitch]] = self._call("take_memory_switches") if self._has_models() else [[]]
        return max(ranks, key=lambda switches: max((switch.device_bytes_before for switch in switches), default=0))

    def places(self) -> list[ProcessPlace]:
        """Return the Ray node, GPU ids and process id of each rank."""
        return [ProcessPlace(rank.node, rank.gpu_ids, rank.pid) for rank in self._ranks]

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _has_models(self) -> bool:
        """Return whether ranks are running and have models."""
        return bool(self._actors) and self._built

    def _call(self, method: str, *args: Any, timeout: float | None = None, ranks: int | None = None) -> list[Any]:
        """Call a method on all ranks, or on the first `ranks` ranks, and return the results by rank. If a rank fails or
        the timeout expires, kill the group and raise the error."""
        import ray

        with self.lock:
            actors = self._actors
            if not actors:  # another thread has killed the ranks since the caller started them
                raise RankDied(f"cannot call {method!r}: the trainer's ranks were killed after an earlier error")
            if method in FREES_ENGINES_MEMORY:
                self.before_onload()
            seconds = timeout or self.spec.config.train_timeout
            deadline = time.monotonic() + seconds
            calls = [actor.call.remote(self._owner, method, *args) for actor in actors[:ranks]]
            waiting = calls
            try:
                while waiting:
                    done, waiting = self.cluster.wait(waiting, deadline - time.monotonic())
                    if not done:
                        flag = "--convert-timeout" if method == "export" else "--train-timeout"
                        raise TimeoutError(
                            f"{len(waiting)} of {len(calls)} trainer ranks did not finish {method!r} in {seconds:g} s; "
                            f"all ranks were killed: raise {flag} if the ranks are slow, not stuck"
                        )
                    self.cluster.get(done[0])  # raises this rank's error; other ranks may be waiting in a collective
                return [self.cluster.get(call) for call in calls]
            except ray.exceptions.RayError as error:
                failure = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                if isinstance(failure, FencedError):
                    self._fenced, self._actors = failure, []
                else:
                    dead = _find_dead_rank(self.cluster, calls)
                    self.kill(actors)
                    if dead is not None:
                        failure = RankDied(_death_message(self._ranks, dead, method, error))
                raise failure from error
            except BaseException:
                self.kill(actors)
                raise


def _find_actors(cluster: Cluster, spec: TrainerSpec) -> list[Any]:
    """Return the running actor of each rank, or None for a rank that is not running. The list may be longer than
    `num_ranks`, because an earlier driver may have started more ranks."""
    actors: list[Any] = []
    while (actor := cluster.find_actor(f"trainer-{len(actors)}")) is not None or len(actors) < spec.config.num_ranks:
        actors.append(actor)
    return actors


def _is_fenced(actor: Any, owner: str) -> bool:
    """Return whether the rank `actor` is known to refuse calls of the driver with the token `owner`, because another
    driver has taken it over."""
    import ray

    try:
        ray.get(actor.call.remote(owner, "state"), timeout=FAILURE_QUERY_TIMEOUT)
    except ray.exceptions.RayTaskError as error:
        return isinstance(error.cause, FencedError)
    except (ray.exceptions.RayError, TimeoutError):
        return False  # dead or busy
    return False


def current_build(spec: TrainerSpec) -> Build:
    """Return the build of ranks that this driver would start."""
    config = spec.config
    threads = cpu_threads_per_process(config.trainer_threads, num_processes=config.actor_num_gpus_per_node)
    return Build(spec=spec, num_ranks=config.num_ranks, threads=threads, code=_source_hash())


@cache
def _source_hash() -> str:
    """Return a hash of the source files that a rank runs; running ranks are not taken over if it has changed."""
    root = Path(__file__).parents[2]
    digest = xxhash.xxh3_64()
    for package in ("engines", "stages/convert", "stages/train", "storage"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _merge_digests(digests: list[dict[str, str]]) -> dict[str, str]:
    """Merge the digests (name -> hash) of all ranks. Raises RuntimeError if replicas of a shard differ."""
    merged: dict[str, str] = {}
    for digest in digests:
        for name, value in digest.items():
            if merged.setdefault(name, value) != value:
                raise RuntimeError(
                    f"replicas of {name} differ between ranks, so the ranks did not compute the same training step: "
                    "check for faulty hardware or nondeterministic kernels"
                )
    return merged


def _find_dead_rank(cluster: Cluster, calls: list[Any]) -> int | None:
    """Return the first rank whose process has died, or None. Another rank often reports the death first, as a
    broken connection."""
    import ray

    deadline, waiting = time.monotonic() + FAILURE_QUERY_TIMEOUT, calls
    while waiting and time.monotonic() < deadline:
        waiting = cluster.wait(waiting, deadline - time.monotonic())[1]
    for rank, call in enumerate(calls):
        try:
            cluster.get(call, timeout=0)
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
            return rank
        except ClusterLost:
            raise
        except Exception:  # it raised, or is still running: alive in either case
            continue
    return None


def _death_message(ranks: list[RankInfo], rank: int, method: str, error: Exception) -> str:
    """Return the error message for the dead rank `rank`, with the tail of its log."""
    if rank >= len(ranks):  # it died before it sent its RankInfo
        return f"trainer rank {rank} died while starting: {error}"
    info = ranks[rank]
    message = f"trainer rank {rank} (process {info.pid}) died in {method!r}"
    log = Path(info.log)
    if not log.is_file():
        return f"{message}; its log is {info.log} on Ray's node {info.node}"
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"{message}; the tail of its log {info.log}:", *(lines or ["(empty)"])])


def check_store_is_shared(store: Store, exists: Callable[[str], Sequence[bool]], nodes: Sequence[str]) -> None:
    """Check that a store in a directory is visible at the same path on every rank's node; skip object stores. `exists`
    returns for each rank whether a path exists on its machine; `nodes` are Ray's ids of their nodes."""
    if not store.is_local:
        return
    probe = Path(store.root) / f".shared-{uuid.uuid4().hex}"
    probe.touch()
    try:
        missing = sorted({node for node, seen in zip(nodes, exists(str(probe)), strict=True) if not seen})
    finally:
        probe.unlink()
    if missing:
        raise OptionError(
            f"--store {store.root} is a directory that is not shared with {len(missing)} of {len(set(nodes))} nodes "
            f"(for instance Ray's node {missing[0]}): a run on several nodes needs an object store, or a file system "
            "that all nodes mount at this path"
        )
