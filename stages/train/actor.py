"""One rank of the trainer: a model on a GPU (or CPU threads), and what policy it holds. It does as told and decides nothing.

`clean` is False from before the first change to the weights until after the last, so that a step cut short is never taken for a
whole one. The group calls every method on every rank. The driver imports this file to name the class, hence the late imports: torch
and Megatron are loaded by the ranks alone, all at the same time.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stages.train.spec import PolicyState, Trained, TrainerSpec
from storage.refs import Commit
from storage.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from engines.weights.publisher import Transport


class TrainActor:
    """A plain class; `group.py` makes a Ray actor of it.

    Args:
        spec: what to build.
        rank: of this process among all trainer ranks.
        num_ranks: of the group.
        incarnation: name of this life of the group.
        threads: CPU threads to compute with.
    """

    def __init__(self, spec: TrainerSpec, rank: int, num_ranks: int, incarnation: str, threads: int) -> None:
        self.spec, self.rank, self.num_ranks, self.threads = spec, rank, num_ranks, threads
        self.store = Store(spec.store, spec.store_options, probe=False)
        self.reference: Any = None  # a snapshot of the base weights, for the KL
        self._state = PolicyState(run=spec.run, incarnation=incarnation, version=0, clean=False)

    def join(self, init_method: str) -> None:
        """Meet the other ranks and build the model, with random weights."""
        import torch

        from engines.megatron.engine import MegatronEngine
        from engines.megatron.parallel import ParallelLayout, init_parallel

        config = self.spec.config
        layout = ParallelLayout(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
            virtual_pipeline=config.virtual_pipeline_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
        )
        init_parallel(self.rank, self.num_ranks, init_method, layout, config.seed, self.threads)
        self.engine = MegatronEngine(
            self.spec.shape,
            layout,
            dtype=config.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
            optimizer=config.optimizer_options,
            overrides=config.megatron,
            seed=config.seed,
            deterministic=config.deterministic_mode,
        )

    # ---- questions ------------------------------------------------------------------------------------------------------

    def state(self) -> PolicyState:
        """What this rank holds."""
        return self._state

    def address(self) -> str:
        """Where the other ranks can meet this one."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{socket.gethostbyname(socket.gethostname())}:{probe.getsockname()[1]}"

    def digest(self) -> dict[str, str]:
        """Hashes of this rank's parameter shards."""
        return self.engine.digest()

    def fingerprint(self) -> dict[str, Any]:
        """What the bits of a step depend on, besides weights and data: the engine's numerics, and how samples are packed."""
        config = self.spec.config
        return {
            **self.engine.fingerprint(),
            "max_tokens_per_gpu": config.max_tokens_per_gpu,
            "log_probs_chunk_size": config.log_probs_chunk_size,
            "bit_exact": config.deterministic_mode or self.engine.device.type == "cpu",
        }

    # ---- commands -------------------------------------------------------------------------------------------------------

    def load(self, base: str | None, checkpoint: str | None, version: int) -> None:
        """Hold policy `version`: the base model's weights and a fresh optimizer, or everything that a checkpoint saved.

        Args:
            base: directory of the base model; needed for version 0 and for the reference of the KL.
            checkpoint: directory of the checkpoint; None = begin at the base.
            version: what comes of it.
        """
        with self._becoming(version):
            if base is not None:
                self.engine.load_weights(base)
                self.reference = self.engine.snapshot() if self.spec.config.use_kl_loss else None
            if checkpoint is not None:
                saved = self.engine.load(checkpoint)
                assert saved["version"] == version, f"{checkpoint} holds {saved}, not policy {version}"

    def train(self, rollout: Commit, version: int) -> Trained:
        """Train the samples of one rollout, from policy `version` to the next."""
        from stages.train.batching import Batch
        from stages.train.step import train_rollout
        from storage.shards import read_table

        assert self._state.clean and self._state.version == version, f"asked to train policy {version}, but holding {self._state}"
        config, seconds = self.spec.config, {}
        start = time.perf_counter()
        batch = Batch.from_table(read_table(self.store, rollout), graded=config.loss_type == "policy_loss")
        seconds["read"] = time.perf_counter() - start
        with self._becoming(version + 1):
            trained = train_rollout(self.engine, batch, config, temperature=self.spec.temperature, reference=self.reference)
        metrics, steps, spent = trained
        start = time.perf_counter()
        digest = self.digest()
        seconds |= spent | {"digest": time.perf_counter() - start}
        return Trained(metrics=metrics, steps=steps, seconds=seconds, digest=digest, fingerprint=self.fingerprint())

    def save(self, directory: str) -> None:
        """Write weights, optimizer, schedule and random states."""
        self.engine.save(directory, {"run": self.spec.run, "version": self._state.version})

    def publish(self, urls: list[str], version: str, transport: Transport, model_path: str, directory: str) -> None:
        """Send the weights under their Hugging Face names; all ranks gather, rank 0 sends."""
        from engines.weights.publisher import make_publisher

        held = f"{self.spec.run}/{self._state.version}"
        assert self._state.clean and version == held, f"asked to publish {version}, but holding {self._state}"
        if self.rank == 0:
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
        for name, tensor in self.engine.named_weights():
            yield from layout.to_hf(name, tensor)
