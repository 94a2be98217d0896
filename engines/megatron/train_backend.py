"""Megatron-core as a training engine. The driver imports this module, so torch is imported in methods."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.engines.megatron.rank_environment import rank_environment
from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.training import EngineBuild, TrainBackend

if TYPE_CHECKING:
    from penstock.engines.megatron.engine import MegatronEngine


class MegatronBackend(TrainBackend):
    """The implementation of `TrainBackend` for Megatron-core."""

    checkpoint_format = "torch_dist"

    def rank_environment(self, layout: ParallelLayout, threads: int) -> dict[str, str]:
        return rank_environment(layout, threads)

    def import_libraries(self) -> None:

        import penstock.engines.megatron.engine  # noqa: F401

    def init_ranks(
        self,
        rank: int,
        num_ranks: int,
        rendezvous: str | socket.socket,
        layout: ParallelLayout,
        threads: int,
        timeout: timedelta,
    ) -> None:
        from penstock.engines.megatron.parallel import init_parallel

        init_parallel(rank, num_ranks, rendezvous, layout, threads, timeout=timeout)

    def build(self, build: EngineBuild) -> MegatronEngine:
        from penstock.engines.megatron.engine import MegatronEngine, use_deterministic_kernels
        from penstock.engines.megatron.options.frozen import frozen_parameters
        from penstock.engines.megatron.options.values import effective_options

        if build.deterministic:
            use_deterministic_kernels()
        trained = {"frozen": frozen_parameters(build.shape, build.freeze, build.only_train), "lora": build.lora}
        engine = MegatronEngine(
            build.shape,
            build.layout,
            dtype=build.dtype,
            optimizer=build.optimizer | trained,
            overrides=effective_options(build.options),
            seed=build.seed,
            role=build.role,
        )
        for chunk in engine.chunks:
            chunk.fp32_head = build.fp32_head
        return engine

    def is_written_by_rank(self, rank: int, name: str) -> bool:
        from penstock.engines.megatron.checkpoints.torch_dist import is_written_by_rank

        return is_written_by_rank(rank, name)

    def bytes_used(self) -> tuple[int, int]:
        from penstock.engines.megatron.memory.residency import device_and_host_bytes_used

        return device_and_host_bytes_used()
