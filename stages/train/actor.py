"""One rank of the trainer: a model on a GPU (or CPU threads), and what policy it holds. It does as told and decides nothing.

`clean` is False from before the first change to the weights until after the last, so that a step cut short is never taken for a
whole one. The group calls every method on every rank.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engines.megatron.engine import MegatronEngine
from engines.megatron.parallel import ParallelLayout, init_parallel
from engines.weights.publisher import Transport, make_publisher
from stages.train.batching import Batch
from stages.train.config import TrainConfig
from stages.train.spec import PolicyState, Trained, TrainerSpec
from stages.train.step import train_rollout
from storage.layouts import layout_for
from storage.refs import Commit
from storage.shards import read_table
from storage.store import Store


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
        config = self.spec.config
        layout = parallel_layout(config)
        init_parallel(self.rank, self.num_ranks, init_method, layout, config.seed, self.threads)
        self.engine = MegatronEngine(
            self.spec.shape,
            layout,
            dtype=config.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
            optimizer=config.model_dump(include=OPTIMIZER_FIELDS, exclude_none=True),
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
        packing = {"max_tokens_per_gpu": config.max_tokens_per_gpu, "log_probs_chunk_size": config.log_probs_chunk_size}
        return {
            **self.engine.fingerprint(),
            **packing,
            "bit_exact": config.deterministic_mode or self.engine.device.type == "cpu",
        }

    # ---- commands -------------------------------------------------------------------------------------------------------

    def load(self, base: str, checkpoint: str | None, version: int) -> None:
        """Hold policy `version`: the base model's weights and a fresh optimizer, or everything a checkpoint saved."""
        with self._becoming(version):
            if checkpoint is None or self.spec.config.use_kl_loss:
                self.engine.load_weights(base)
                self.reference = self.engine.snapshot() if self.spec.config.use_kl_loss else None
            if checkpoint is not None:
                self.engine.load(checkpoint)

    def train(self, rollout: Commit, version: int) -> Trained:
        """Train the samples of one rollout, from policy `version` to the next."""
        assert self._state.clean and self._state.version == version, f"asked to train policy {version}, but holding {self._state}"
        start = time.perf_counter()
        config = self.spec.config
        batch = Batch.from_table(read_table(self.store, rollout), graded=config.loss_type == "policy_loss")
        seconds = {"read": time.perf_counter() - start}
        with self._becoming(version + 1):
            metrics, steps, spent = train_rollout(
                self.engine, batch, config, temperature=self.spec.temperature, reference=self.reference
            )
        return Trained(
            metrics=metrics, steps=steps, seconds=seconds | spent, digest=self.digest(), fingerprint=self.fingerprint()
        )

    def save(self, directory: str) -> None:
        """Write weights, optimizer, scheduler and random states."""
        self.engine.save(directory, {"run": self.spec.run, "version": self._state.version})

    def publish(self, urls: list[str], version: str, transport: Transport, model_path: str, directory: str) -> None:
        """Send the weights under their Hugging Face names; all ranks gather, rank 0 sends."""
        assert self._state.clean and version == f"{self.spec.run}/{self._state.version}", (
            f"asked to publish {version}, but holding {self._state}"
        )
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
        layout = layout_for(self.spec.shape)
        for name, tensor in self.engine.named_weights():
            yield from layout.to_hf(name, tensor)


OPTIMIZER_FIELDS = {
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_iters",
    "lr_decay_iters",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
}


def parallel_layout(config: TrainConfig) -> ParallelLayout:
    """Megatron's flag names -> our layout."""
    return ParallelLayout(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
        virtual_pipeline=config.virtual_pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )
