"""The trainer as one thing: a group of actors, one per rank, called together under one deadline.

A call either comes back from every rank, or the whole group is killed: ranks that wait in a collective for one that is gone
cannot be saved, and a step that was cut short leaves weights that nobody should trust. What to do then is decided in `policy.py`.

On a standing Ray the ranks outlive a killed driver, under names of the run. The next driver takes them over if it would build the
same, and otherwise ends them. Whoever takes over leads alone: calls of the driver before are refused (`TrainActor.call`).
"""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from engines.cluster import Cluster, ClusterLost, cpu_threads
from stages.train.spec import Beside, Build, Fenced, PolicyState, RankDied, RankInfo, Saved, Trained, TrainerSpec
from storage.refs import Commit

if TYPE_CHECKING:
    from engines.weights.publisher import Transport

SHORT_CALL = 60.0  # seconds for a question that touches no weights
LEADER_CALL = 2.0  # seconds for the question who leads, before ranks are killed that others may have taken over
LOG_LINES = 20  # of a dead rank, in the error


class TrainerGroup:
    """Its actors start at first use, and may be killed and started again at any time.

    Two threads may use it (a checkpoint is saved beside the next rollout): each call, and whatever is done holding `alone`, is done
    alone. Only `kill` waits for nobody.

    Args:
        cluster: where they run.
        spec: what they are.
    """

    def __init__(self, cluster: Cluster, spec: TrainerSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self.alone = threading.RLock()
        self._owner = uuid.uuid4().hex
        self._actors: list[Any] = []
        self._ranks: list[RankInfo] = []
        self._fenced: Fenced | None = None  # for good: taking the ranks back would only have two drivers fight
        self._meeting_file: Path | None = None

    # ---- life -----------------------------------------------------------------------------------------------------------

    def ensure_started(self) -> None:
        """Have ranks: those that are running, those an earlier driver has left, or new ones with random weights."""
        with self.alone:
            if self._actors or self._taken_over():
                return
            import ray

            from stages.train.actor import TrainActor

            build, incarnation = self._build(), uuid.uuid4().hex[:12]
            actor = ray.remote(TrainActor)
            actors: list[Any] = []
            for rank, slot in enumerate(self.cluster.place(build.num_ranks)):
                # Ray gives an actor one OpenMP thread unless told otherwise, and the number of threads changes fp32 sums. Inductor's
                # pool of compile processes outlives a killed rank (seen with torch 2.11): one thread compiles in the rank itself.
                environment = slot.with_env(OMP_NUM_THREADS=str(build.threads), TORCHINDUCTOR_COMPILE_THREADS="1")
                options = actor.options(**environment, max_restarts=0, **self.cluster.lasting(_name(rank)))
                actors.append(self.cluster.call(options.remote, build, rank, incarnation, self._owner))
            self._actors = actors
            self._ranks = self._call("info")
            self._call("join", self._meeting_place())

    def kill(self) -> None:
        """End every rank at once, without waiting for a call that another thread is making; that call fails."""
        self._drop(self._actors)

    def _drop(self, actors: list[Any]) -> None:
        """End these ranks, and forget them if they are still the group's (a new life may have begun meanwhile)."""
        if self._actors is actors:
            self._actors = []
        if self._meeting_file is not None:
            self._meeting_file.unlink(missing_ok=True)
        if actors and not self._led_by_another(actors[0]):
            with suppress(ClusterLost):  # they have ended with it
                self._end(actors)

    def _led_by_another(self, actor: Any) -> bool:
        """On a standing Ray another driver may lead these ranks by now: they are not ours to kill."""
        import ray

        if self.cluster.owned:
            return False
        try:
            ray.get(actor.call.remote(self._owner, "state"), timeout=LEADER_CALL)
        except ray.exceptions.RayTaskError as error:
            return isinstance(error.cause, Fenced)
        except (ray.exceptions.RayError, TimeoutError):
            return False  # dead or busy
        return False

    def _taken_over(self) -> bool:
        """Take over the ranks that an earlier driver has left, if they are all there, equal to what we would build, and answer."""
        import ray

        if self._fenced is not None:
            raise self._fenced
        found = self._left_behind()
        alive = [actor for actor in found if actor is not None]
        if not alive:
            return False
        build = self._build()
        try:
            ranks: list[RankInfo] = ray.get([actor.adopt.remote(self._owner) for actor in alive], timeout=SHORT_CALL)
        except (ray.exceptions.RayError, TimeoutError):
            ranks = []
        alike = {(rank.build, rank.joined, rank.incarnation) for rank in ranks}
        if len(ranks) == len(found) == build.num_ranks and len(alike) == 1 and alike.pop()[:2] == (build.hash, True):
            self._actors, self._ranks = alive, ranks
            return True
        self._end(alive)
        deadline = time.monotonic() + SHORT_CALL
        while any(self._left_behind()):  # a name is free again when Ray has noticed the death
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"trainer ranks of an earlier driver of run {self.spec.run!r} do not end: look at `ray list actors`"
                )
            time.sleep(0.05)
        return False

    def _left_behind(self) -> list[Any]:
        """By rank, what has the rank's name; None where nothing has. More ranks than ours if the group before was larger."""
        found: list[Any] = []
        while (actor := self.cluster.find(_name(len(found)))) is not None or len(found) < self.spec.config.num_ranks:
            found.append(actor)
        return found

    def _build(self) -> Build:
        config = self.spec.config
        threads = cpu_threads(config.trainer_threads, sharers=config.actor_num_gpus_per_node)
        return Build(spec=self.spec, num_ranks=config.num_ranks, threads=threads, code=_code())

    def _meeting_place(self) -> str:
        """A file on one machine, so that no port is opened; an address of rank 0 on several."""
        if self.spec.config.actor_num_nodes == 1:
            self._meeting_file = Path(tempfile.gettempdir()) / f"penstock-{uuid.uuid4().hex}"
            return f"file://{self._meeting_file}"
        return self._call("address", ranks=1)[0]

    # ---- questions ------------------------------------------------------------------------------------------------------

    def state(self) -> PolicyState | None:
        """What all ranks agree to hold. None, and no ranks any more, if one does not answer or they disagree.

        Raises:
            Fenced: another driver leads them.
        """
        import ray

        with self.alone:
            if not self._actors and not self._taken_over():
                return None
            try:
                first, *others = self._call("state", timeout=SHORT_CALL)
            except (ray.exceptions.RayError, RankDied, TimeoutError):
                return None
            if any(other != first for other in others):
                self.kill()
                return None
            return first

    def digest(self) -> dict[str, str]:
        """Hashes of all ranks' parameter shards."""
        return _joined(self._call("digest"))

    def optimizer_digest(self) -> dict[str, str]:
        """Hashes of everything else that a checkpoint holds, rank by rank."""
        return _joined(self._call("optimizer_digest"))

    def fingerprint(self) -> dict[str, Any]:
        """What the bits of a step depend on, besides weights and data."""
        return self._call("fingerprint")[0]

    # ---- commands -------------------------------------------------------------------------------------------------------

    def load(self, version: int, base: Commit | None, checkpoint: Commit | None, beside: dict[Beside, Commit]) -> None:
        """Hold policy `version`, read from these commits' files; see `TrainActor.load`."""
        self._call("load", version, base, checkpoint, beside)

    def train(self, rollout: Commit, version: int) -> Trained:
        """Train one committed rollout, from policy `version` to the next."""
        results = self._call("train", rollout, version)
        return results[0].model_copy(update={"digest": _joined([result.digest for result in results])})

    def save(self, attempt: str) -> Saved:
        """Write weights, optimizer, schedule and random states of all ranks; every file is durable then, none is committed."""
        results: list[Saved] = self._call("save", attempt)
        return Saved(
            files=sorted((file for result in results for file in result.files), key=lambda file: file.path),
            digest=_joined([result.digest for result in results]),
            optimizer_digest=_joined([result.optimizer_digest for result in results]),
        )

    def publish(
        self, urls: list[str], version: str, *, transport: Transport = "tensor", model_path: str = "", directory: str = ""
    ) -> None:
        """Send the weights to engines, which then report `version` (`<run>/<number>`). For the rest see `make_publisher`."""
        from engines.sglang.control import keys_of

        self._call("publish", urls, version, transport, model_path, directory, keys_of(urls))

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any, timeout: float | None = None, ranks: int | None = None) -> list[Any]:
        """Call all ranks, or the first `ranks`; their answers by rank. The first failure, or the deadline, kills the group and is raised."""
        import ray

        with self.alone:
            actors = self._actors
            if not actors:  # another thread has killed them since the caller saw to it that they run
                raise RankDied(f"the trainer's ranks have died before {method!r}")
            deadline = time.monotonic() + (timeout or self.spec.config.train_timeout)
            calls = [actor.call.remote(self._owner, method, *args) for actor in actors[:ranks]]
            waiting = calls
            try:
                while waiting:
                    done, waiting = self.cluster.wait(waiting, deadline - time.monotonic())
                    if not done:
                        raise TimeoutError(
                            f"{len(waiting)} of {len(calls)} trainer ranks gave no answer to {method!r} in time and are killed: "
                            "raise --train-timeout if the work is only slow"
                        )
                    self.cluster.get(done[0])  # raises at once what this rank raised; the others may be stuck in a collective
                return [self.cluster.get(call) for call in calls]
            except ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), Fenced):
                    self._fenced, self._actors = cause, []
                    raise cause from error
                dead = self._dead(calls)
                self._drop(actors)
                if dead is not None:
                    raise RankDied(self._obituary(dead, method, error)) from error
                raise (error.cause if isinstance(error, ray.exceptions.RayTaskError) else error) from error
            except BaseException:
                self._drop(actors)
                raise

    def _end(self, actors: list[Any]) -> None:
        import ray

        for actor in actors:
            self.cluster.call(ray.kill, actor)

    def _dead(self, calls: list[Any]) -> int | None:
        """The rank whose process has gone, if one has. A death often shows first as a broken connection in another rank."""
        import ray

        deadline, waiting = time.monotonic() + LEADER_CALL, calls
        while waiting and time.monotonic() < deadline:
            waiting = self.cluster.wait(waiting, deadline - time.monotonic())[1]
        for rank, call in enumerate(calls):
            try:
                self.cluster.get(call, timeout=0)
            except ray.exceptions.RayActorError:
                return rank
            except ClusterLost:
                raise
            except Exception:  # what it raised, or no answer yet: alive in either case
                continue
        return None

    def _obituary(self, rank: int, method: str, error: Exception) -> str:
        """Who died, and what its log said last."""
        if rank >= len(self._ranks):  # it died before it could say who it is
            return f"trainer rank {rank} died at its start: {error}"
        info = self._ranks[rank]
        said = f"trainer rank {rank} (process {info.pid}) died in {method!r}"
        log = Path(info.log)
        if not log.is_file():
            return f"{said}; its log is {info.log} on Ray's node {info.node}"
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{said}; the end of its log {info.log}:", *(lines or ["(empty)"])])


def _name(rank: int) -> str:
    return f"trainer-{rank}"


@cache
def _code() -> str:
    """Hash of the sources that a rank runs: ranks of other code are not taken over."""
    root = Path(__file__).parents[2]
    digest = xxhash.xxh3_64()
    for package in ("engines", "stages/train", "storage"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _joined(digests: list[dict[str, str]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for digest in digests:
        for name, value in digest.items():
            if joined.setdefault(name, value) != value:
                raise RuntimeError(
                    f"replicas of {name} hold different weights on different ranks: the training step is not the same everywhere"
                )
    return joined
