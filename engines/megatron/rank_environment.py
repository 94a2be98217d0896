"""Environment variables of the trainer's processes. Does not import torch, because the driver uses this module."""

from __future__ import annotations

import os

from penstock.engines.parallel_layout import ParallelLayout

USER_VARIABLES = (
    "NCCL_CUMEM_ENABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def rank_environment(layout: ParallelLayout, threads: int) -> dict[str, str]:
    """Return the environment variables with which a rank must be started. Those of USER_VARIABLES that are set in this
    process, the driver, are passed on unchanged.

    Args:
        layout: parallel sizes of the model.
        threads: CPU threads of the rank.
    """
    defaults = {
        # engines turn NCCL's cuMem allocations off, and both ends of a connection must agree
        "NCCL_CUMEM_ENABLE": "0",
        # threads pin the host memory for offloaded state: 10.7 GB in 1.5 instead of 3.3 s (H200)
        "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
    }
    if layout.tensor > 1:  # kernels start in the order of their launches: Megatron overlaps exchanges with computation
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    given = {name: os.environ[name] for name in USER_VARIABLES if name in os.environ}
    if "PYTORCH_CUDA_ALLOC_CONF" in given:  # the older name
        del defaults["PYTORCH_ALLOC_CONF"]
    return {
        # Ray's default is one OpenMP thread per actor, and the number of threads changes the rounding of fp32 sums
        "OMP_NUM_THREADS": str(threads),
        # Inductor compiles in the rank's process; otherwise its pool of compile processes survives a killed rank (seen
        # with torch 2.11)
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **defaults,
        **given,
    }
