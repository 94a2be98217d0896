"""One rank of the trainer: a model on a GPU (or CPU threads), and what policy it holds. It does as told and decides nothing.

`clean` is False from before the first change to the weights until after the last, so that a step cut short is never taken for a
whole one. The group calls every method on every rank, through `call`: a rank obeys one driver, the last that took it over, so that a
driver which was given up but lives on can change nothing. The driver imports this file to name the class, hence the late imports:
torch and Megatron are loaded by the ranks alone, all at the same time.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from stages.train.spec import Beside, Build, Fenced, PolicyState, RankInfo, Saved, Trained
from storage.refs import Commit
from storage.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from engines.weights.publisher import Transport
    from stages.train.step import Models


class TrainActor:
    """A plain class; `group.py` makes a Ray actor of it.

    Args:
        build: what to build.
        rank: of this process among all trainer ranks.
        incarnation: name of this life of the group.
        owner: token of the driver's group that leads this rank.
    """

    def __init__(self, build: Build, rank: int, incarnation: str, owner: str) -> None:
        self.build, self.spec, self.rank = build, build.spec, rank
        self.store = Store(self.spec.store, self.spec.store_options, probe=False)
        self._owner = owner
        self._joined = False
        self._listener: socket.socket | None = None  # where the other ranks meet this one
        self._state = PolicyState(run=self.spec.run, incarnation=incarnation, version=0, clean=False)

    # ---- who leads ------------------------------------------------------------------------------------------------------

    def call(self, owner: str, method: str, *args: Any) -> Any:
        """Do as the leading driver says.

        Raises:
            Fenced: `owner` does not lead any more.
        """
        if owner != self._owner:
            raise Fenced(
                f"another driver has taken over the trainer of run {self.spec.run!r}, and only one may lead: this one stops, and "
                "what it has committed stands. Look for the other one if it is not yours"
            )
        return getattr(self, method)(*args)

    def adopt(self, owner: str) -> RankInfo:
        """From now on `owner` leads."""
        self._owner = owner
        return self.info()

    def join(self, init_method: str) -> None:
        """Meet the other ranks and build the model, with random weights."""
        from engines.megatron.parallel import init_parallel
        from stages.train.build import build_models, layout_of

        config = self.spec.config
        patience = timedelta(seconds=config.train_timeout)  # one rank may fetch gigabytes while the others wait for it
        ranks = (self.rank, self.build.num_ranks)
        listener, self._listener = self._listener, None
        layout = layout_of(config)
        init_parallel(*ranks, init_method, layout, config.seed, self.build.threads, timeout=patience, listener=listener)
        self.models: Models = build_models(self.spec)
        self._joined = True

    # ---- questions ------------------------------------------------------------------------------------------------------

    def state(self) -> PolicyState:
        """What this rank holds."""
        return self._state

    def info(self) -> RankInfo:
        """Who this rank is."""
        import ray

        return RankInfo(
            rank=self.rank,
            build=self.build.hash,
            incarnation=self._state.incarnation,
            joined=self._joined,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            log=os.path.realpath("/proc/self/fd/2"),  # Ray has redirected it to a file
        )

    def address(self) -> str:
        """Where the other ranks can meet this one: it listens there from now on, on that address alone."""
        import ray

        from engines.megatron.parallel import listen_at

        self._listener = listen_at(ray.util.get_node_ip_address())
        host, port = self._listener.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def digest(self) -> dict[str, str]:
        """Hashes of this rank's parameter shards, the critic's included."""
        return self.models.digest()

    def optimizer_digest(self) -> dict[str, str]:
        """Hashes of everything else that a checkpoint holds: optimizer states, schedules, random states, a refreshed reference."""
        return self.models.state_digest()

    def fingerprint(self) -> dict[str, Any]:
        """What the bits of a step depend on, besides weights and data: the engine's numerics, and how samples are packed."""
        config = self.spec.config
        packing = {
            name: getattr(config, name)
            for name in ("max_tokens_per_gpu", "micro_batch_size", "balance_data", "log_probs_chunk_size")
        }
        bit_exact = config.deterministic_mode or self.models.policy.device.type == "cpu"
        return {**self.models.policy.fingerprint(), **packing, "by_tokens": config.fills_by_tokens, "bit_exact": bit_exact}

    # ---- commands -------------------------------------------------------------------------------------------------------

    def load(self, version: int, base: Commit | None, checkpoint: Commit | None, beside: dict[Beside, Commit]) -> None:
        """Hold policy `version`: the base model's weights and fresh optimizers, or everything that a checkpoint saved.

        Args:
            version: what comes of it.
            base: where policy and critic begin; None if there is a checkpoint.
            checkpoint: None = begin at the base.
            beside: models that are not trained ("reference", "teacher"); a checkpoint brings a refreshed reference itself.
        """
        import ray

        from stages.train.build import begin, go_on, hold
        from stages.train.files import opened

        machine = ray.get_runtime_context().get_node_id()
        with self._becoming(version):
            for name, model in beside.items():
                with opened(self.store, model, machine) as directory:
                    hold(self.models, name, directory)
            if checkpoint is not None:
                with opened(self.store, checkpoint, machine) as directory:
                    saved = go_on(self.models, directory)
                assert saved["version"] == version, f"{checkpoint.attempt} holds {saved}, not policy {version}"
            else:
                assert base is not None, "neither a checkpoint nor a model to begin with"
                with opened(self.store, base, machine) as directory:
                    begin(self.models, directory)

    def train(self, rollout: Commit, version: int) -> Trained:
        """Train the samples of one rollout, from policy `version` to the next."""
        from stages.train.batching import Batch
        from stages.train.routing import EngineChoices
        from stages.train.step import train_rollout
        from storage.shards import read_table

        assert self._state.clean and self._state.version == version, f"asked to train policy {version}, but holding {self._state}"
        config, seconds = self.spec.config, {}
        start = time.perf_counter()
        table = read_table(self.store, rollout)
        batch = Batch.from_table(table, graded=config.loss_type != "sft_loss")
        if config.use_rollout_routing_replay:
            batch = replace(batch, engine_choices=EngineChoices.from_table(table, self.spec.shape))
        seconds["read"] = time.perf_counter() - start
        critic_only = version < config.num_critic_only_steps
        with self._becoming(version + 1):
            trained = train_rollout(self.models, batch, config, temperature=self.spec.temperature, critic_only=critic_only)
            if config.refreshes_reference_at(version + 1):
                self.models.refresh_reference()
        start = time.perf_counter()
        digest = self.digest()
        seconds |= trained.seconds | {"digest": time.perf_counter() - start}
        return Trained(
            metrics=trained.metrics, steps=trained.steps, seconds=seconds, digest=digest, fingerprint=self.fingerprint()
        )

    def save(self, attempt: str) -> Saved:
        """Write everything that the next round depends on under the key `attempt`; this rank's files are durable then."""
        from engines.megatron.checkpoint import written_by
        from stages.train.build import save

        assert self._state.clean, f"asked to save, but holding {self._state}"
        with self.store.writing(attempt, mine=partial(written_by, self.rank)) as out:
            save(self.models, out.path, {"run": self.spec.run, "version": self._state.version})
        return Saved(files=out.files, digest=self.digest(), optimizer_digest=self.optimizer_digest())

    def publish(
        self, urls: list[str], version: str, transport: Transport, model_path: str, directory: str, keys: dict[str, str]
    ) -> None:
        """Send the weights under their Hugging Face names; all ranks gather, rank 0 sends. `keys` are those of the engines."""
        from engines.sglang.control import use_keys
        from engines.weights.publisher import make_publisher

        held = f"{self.spec.run}/{self._state.version}"
        assert self._state.clean and version == held, f"asked to publish {version}, but holding {self._state}"
        if self.rank == 0:
            use_keys(keys)
            publisher = make_publisher(urls, transport, model_path=model_path, directory=directory)
            publisher.publish(self._named_weights(), version)
        else:
            deque(self._named_weights(), maxlen=0)

    # ---- inside ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _becoming(self, version: int) -> Iterator[None]:
        """Unclean while the block runs and after it fails; clean and at `version` when it is done."""
        self._state = self._state.model_copy(update={"clean": False})
        yield
        self._state = self._state.model_copy(update={"version": version, "clean": True})

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        from storage.layouts import layout_for

        layout = layout_for(self.spec.shape)
        for name, tensor in self.models.policy.named_weights():
            yield from layout.to_hf(name, tensor)
