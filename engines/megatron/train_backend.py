"""Megatron-core as a training engine. The driver imports this module, so torch is imported in methods."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.training import EngineBuild, TrainBackend

if TYPE_CHECKING:
    from penstock.engines.megatron.engine import MegatronEngine

USER_VARIABLES = (  # those that are set in the driver are passed on unchanged
    "NCCL_CUMEM_ENABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


class MegatronBackend(TrainBackend):
    """The implementation of `TrainBackend` for Megatron-core."""

    checkpoint_format = "torch_dist"

    def rank_environment(self, layout: ParallelLayout, threads: int) -> dict[str, str]:
        defaults = {
            # engines turn NCCL's cuMem allocations off, and both ends of a connection must agree
            "NCCL_CUMEM_ENABLE": "0",
            # threads pin the host memory for offloaded state: 10.7 GB in 1.5 instead of 3.3 s (H200)
            "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
        }
        if layout.tensor > 1:  # kernels start in the order of their launches: exchanges overlap with computation
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        given = {name: os.environ[name] for name in USER_VARIABLES if name in os.environ}
        if "PYTORCH_CUDA_ALLOC_CONF" in given:  # the older name
            del defaults["PYTORCH_ALLOC_CONF"]
        return {
            # Ray's default is one OpenMP thread per actor, and the number of threads changes the rounding of fp32 sums
            "OMP_NUM_THREADS": str(threads),
            # Inductor compiles in the rank's process; otherwise its pool of compile processes survives a killed rank
            # (seen with torch 2.11)
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **defaults,
            **given,
        }

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
        from penstock.engines.megatron.frozen_parameters import frozen_parameters

        if build.deterministic:
            use_deterministic_kernels()
        trained = {"frozen": frozen_parameters(build.shape, build.freeze, build.only_train), "lora": build.lora}
        engine = MegatronEngine(
            build.shape,
            build.layout,
            dtype=build.dtype,
            optimizer=build.optimizer | trained,
            overrides=build.options,
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
        from penstock.engines.megatron.residency import device_and_host_bytes_used

        return device_and_host_bytes_used()
