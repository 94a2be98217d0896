"""Set up torch.distributed and Megatron-core's process groups for the parallel sizes of a model (`ParallelLayout`).

`stages/train/trainer_group.py` starts the ranks, `engines/cluster.py` places them on GPUs.
"""

from __future__ import annotations

import os
import platform
import socket
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from penstock.engines.megatron.compat import import_megatron
from penstock.engines.network import serve_store
from penstock.engines.parallel_layout import ParallelLayout
from penstock.storage.errors import LayoutError

import_megatron()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

DEFAULT_SEED = 1234


def init_parallel(
    rank: int,
    world_size: int,
    rendezvous: str | socket.socket,
    layout: ParallelLayout | None = None,
    threads: int = 1,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Initialize torch.distributed and create Megatron's process groups. Call it once per process. Random number
    generators are seeded with DEFAULT_SEED; `MegatronEngine` seeds them again.

    Args:
        rendezvous: torch.distributed URL (`tcp://127.0.0.1:1234`, `file:///...`). For a `tcp://` URL rank 0 may instead
            pass the socket that listens at this address (from `listen_at`), because a socket created by torch would
            listen on all interfaces.
        threads: CPU threads of this process; on a CPU the results of fp32 sums depend on this number.
        backend: "nccl" or "gloo"; by default nccl on machines with CUDA, otherwise gloo.
        timeout: timeout of collectives.
    """
    layout = layout or ParallelLayout()
    layout.data_parallel_size(world_size)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # a Ray actor sees only one GPU, as device 0
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "gloo" and (layout.expert_tensor or 0) > layout.tensor:
        raise LayoutError(
            f"--expert-tensor-parallel-size {layout.expert_tensor} above --tensor-model-parallel-size {layout.tensor} "
            "needs GPUs, because gloo, which is used on a CPU, cannot gather shards of unequal length: reduce the "
            "expert tensor-parallel size"
        )
    if isinstance(rendezvous, socket.socket):
        # torch adds the same prefix to a store that it creates itself
        store = dist.PrefixStore("default_pg", serve_store(rendezvous, world_size, timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        if urlsplit(rendezvous).scheme == "file":  # all ranks are on this machine, so gloo can use loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(DEFAULT_SEED)


def shutdown_parallel() -> None:
    """Destroy the process groups; `init_parallel` may be called again afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def device_name() -> str:
    """Return the name of this rank's GPU; on a machine without CUDA the CPU's model name and vector extensions, which
    determine the kernels that math libraries choose."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def device() -> torch.device:
    """Return the torch device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# For model FLOPs utilization (Chowdhery et al. 2022, appendix B): dense bf16 FLOP/s per GPU from the vendors' data
# sheets. The first key that is a substring of the GPU's name is used.
BF16_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(dtype: str) -> float | None:
    """Return the peak FLOP/s of this process's GPU; None for other dtypes than bf16, and if it is not in BF16_PEAKS."""
    if dtype != "bf16" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in BF16_PEAKS.items() if known in name), None)
