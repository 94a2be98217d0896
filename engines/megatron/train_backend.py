"""Megatron-core as a training engine. The driver imports this module, so torch is imported in methods."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.training import EngineBuild, TrainBackend

if TYPE_CHECKING:
    from penstock.engines.megatron.engine import MegatronEngine

USER_VARIABLES = (  # environment variables that trainer ranks inherit unchanged if the driver has them
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
            # SGLang turns NCCL's cuMem allocations off, and both ends of a connection must have the same setting
            "NCCL_CUMEM_ENABLE": "0",
            # Several threads pin the host memory for offloaded state: 10.7 GB in 1.5 s instead of 3.3 s (H200).
            "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
        }
        if layout.tensor > 1:  # kernels then start in the order of their launches, and communication overlaps with them
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
        from penstock.engines.megatron.engine import MegatronEngine

        return MegatronEngine(build)

    def is_written_by_rank(self, rank: int, name: str) -> bool:
        # `name` may include a subdirectory; rank 0 writes all files without a rank in their name.
        owner = re.fullmatch(r"(?:.+/)?__(\d+)_\d+\.distcp", name)
        return rank == (int(owner[1]) if owner else 0)

    def bytes_used(self) -> tuple[int, int]:
        from penstock.engines.megatron.residency import device_and_host_bytes_used

        return device_and_host_bytes_used()
