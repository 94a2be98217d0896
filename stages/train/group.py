"""The trainer as one thing: a group of actors, one per rank, called together under one deadline.

A call either comes back from every rank, or the whole group is killed: ranks that wait in a collective for one that is gone
cannot be saved, and a step that was cut short leaves weights that nobody should trust. What to do then is decided in `policy.py`.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.train.spec import PolicyState, Trained, TrainerSpec
from storage.refs import Commit

if TYPE_CHECKING:
    from engines.cluster import Cluster
    from engines.weights.publisher import Transport

SHORT_CALL = 60.0  # seconds for a question that touches no weights


class TrainerGroup:
    """Its actors start at first use, and may be killed and started again at any time.

    Args:
        cluster: where they run.
        spec: what they are.
    """

    def __init__(self, cluster: Cluster, spec: TrainerSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self._actors: list[Any] = []

    # ---- life -----------------------------------------------------------------------------------------------------------

    def ensure_started(self) -> None:
        """Start the actors and build the model with random weights, unless they are running."""
        if self._actors:
            return
        import ray

        from engines.cluster import cpu_threads
        from stages.train.actor import TrainActor

        num_ranks, incarnation = self.spec.config.num_ranks, uuid.uuid4().hex[:12]
        threads = cpu_threads(self.spec.config.trainer_threads, sharers=self.spec.config.actor_num_gpus_per_node)
        actor = ray.remote(TrainActor)
        self._actors = [
            # Ray gives an actor one OpenMP thread unless told otherwise, and the number of threads changes fp32 sums
            actor.options(**slot.with_env(OMP_NUM_THREADS=str(threads)), max_restarts=0).remote(
                self.spec, rank, num_ranks, incarnation, threads
            )
            for rank, slot in enumerate(self.cluster.place(num_ranks))
        ]
        self._call("join", self._meeting_place())

    def kill(self) -> None:
        """End every rank at once."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _meeting_place(self) -> str:
        """A file on one machine, so that no port is opened; an address of rank 0 on several."""
        if self.spec.config.actor_num_nodes == 1:
            return f"file://{Path(tempfile.gettempdir()) / f'penstock-{uuid.uuid4().hex}'}"
        import ray

        return ray.get(self._actors[0].address.remote(), timeout=SHORT_CALL)

    # ---- questions ------------------------------------------------------------------------------------------------------

    def state(self) -> PolicyState | None:
        """What all ranks agree to hold. None, and no ranks any more, if one does not answer or they disagree."""
        import ray

        if not self._actors:
            return None
        try:
            first, *others = self._call("state", timeout=SHORT_CALL)
        except (ray.exceptions.RayError, TimeoutError):
            return None
        if any(other != first for other in others):
            self.kill()
            return None
        return first

    def digest(self) -> dict[str, str]:
        """Hashes of all ranks' parameter shards."""
        return _joined(self._call("digest"))

    def fingerprint(self) -> dict[str, Any]:
        """What the bits of a step depend on, besides weights and data."""
        return self._call("fingerprint")[0]

    # ---- commands -------------------------------------------------------------------------------------------------------

    def load(self, base: str | None, checkpoint: str | None, version: int) -> None:
        """Hold policy `version`, read from these directories; see `TrainActor.load`."""
        self._call("load", base, checkpoint, version)

    def train(self, rollout: Commit, version: int) -> Trained:
        """Train one committed rollout, from policy `version` to the next."""
        results = self._call("train", rollout, version)
        return results[0].model_copy(update={"digest": _joined([result.digest for result in results])})

    def save(self, directory: str) -> None:
        """Write weights, optimizer, schedule and random states of all ranks."""
        self._call("save", directory)

    def publish(
        self, urls: list[str], version: str, *, transport: Transport = "tensor", model_path: str = "", directory: str = ""
    ) -> None:
        """Send the weights to engines, which then report `version` (`<run>/<number>`). For the rest see `make_publisher`."""
        self._call("publish", urls, version, transport, model_path, directory)

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call all ranks; their answers by rank. The first failure, or the deadline, kills the group and is raised."""
        import ray

        assert self._actors, f"{method} before ensure_started"
        deadline = time.monotonic() + (timeout or self.spec.config.train_timeout)
        calls = [getattr(actor, method).remote(*args) for actor in self._actors]
        waiting = calls
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
                if not done:
                    raise TimeoutError(
                        f"{len(waiting)} of {len(calls)} trainer ranks gave no answer to {method!r} in time and are killed: "
                        "raise --train-timeout if the work is only slow"
                    )
                ray.get(done)  # raises at once what this rank raised; the others may be stuck in a collective
            return ray.get(calls)
        except ray.exceptions.RayTaskError as error:
            self.kill()
            raise error.cause from error
        except BaseException:
            self.kill()
            raise


def _joined(digests: list[dict[str, str]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for digest in digests:
        for name, value in digest.items():
            if joined.setdefault(name, value) != value:
                raise RuntimeError(
                    f"replicas of {name} hold different weights on different ranks: the training step is not the same everywhere"
                )
    return joined
