"""How one model lies over many ranks: the layout people choose, and the process groups that Megatron-core makes of it.

Who starts the ranks and where they run is for `stages/train/group.py` and `engines/cluster.py`.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from engines.megatron.door import open_door
from storage.errors import LayoutError


class ParallelLayout(BaseModel):
    """Sizes of the parallel groups. What is left of the world is data parallelism."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    expert_tensor: int | None = None
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False

    def data_parallel(self, world_size: int) -> int:
        """Number of data-parallel replicas in a world of that size.

        Raises:
            LayoutError: the world size is not a multiple of one replica, of the experts or of the rest.
        """
        ranks = self.tensor * self.pipeline * self.context
        if world_size % ranks:
            raise LayoutError(
                f"{world_size} trainer ranks do not divide into replicas of {ranks} (tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context}): use a multiple of {ranks} ranks, or smaller parallel sizes"
            )
        experts = (self.expert_tensor or self.tensor) * self.expert * self.pipeline
        if world_size % experts:
            raise LayoutError(
                f"{world_size} trainer ranks do not divide into replicas of {experts} for the experts (expert tensor "
                f"{self.expert_tensor or self.tensor} x expert {self.expert} x pipeline {self.pipeline}): use a multiple of {experts} "
                "ranks, or smaller parallel sizes"
            )
        return world_size // ranks


def init_parallel(
    rank: int,
    world_size: int,
    init_method: str,
    layout: ParallelLayout | None = None,
    seed: int = 1234,
    threads: int = 1,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    listener: socket.socket | None = None,
) -> None:
    """Join the world and build Megatron's process groups. Once per process.

    Args:
        rank: of this process.
        world_size: number of processes.
        init_method: torch.distributed URL (`tcp://127.0.0.1:1234`, `file:///...`).
        layout: parallel sizes; all 1 if none is given.
        seed: of Megatron's random number trackers and of weight initialisation.
        threads: CPU threads of this process; fp32 sums on a CPU depend on it.
        backend: "nccl" or "gloo"; by default whichever fits the machine.
        timeout: of collectives.
        listener: of rank 0, with a `tcp://` address: a socket that listens there (`listen_at`). torch's own would listen on all interfaces.
    """
    open_door()
    from megatron.core import parallel_state, tensor_parallel

    layout = layout or ParallelLayout()
    layout.data_parallel(world_size)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # a Ray actor sees only its own device: number 0
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "gloo" and (layout.expert_tensor or 0) > layout.tensor:
        raise LayoutError(
            f"--expert-tensor-parallel-size {layout.expert_tensor} is above --tensor-model-parallel-size {layout.tensor}, which needs GPUs: "
            "without NCCL parts of unequal length cannot be gathered; make it smaller"
        )
    if urlsplit(init_method).scheme == "file":  # all ranks are on this machine, so gloo's connections need no other interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = None if listener is None else _store_at(listener, world_size, timeout)
    meeting = {"init_method": init_method} if store is None else {"store": store}
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **meeting)  # type: ignore[arg-type]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens on one address of this machine, on a port that the kernel chooses and no other process can take."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _store_at(listener: socket.socket, world_size: int, timeout: timedelta) -> dist.Store:
    """Rank 0's store, served on the given socket, which it closes; the other ranks find it by its address."""
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    server = dist.TCPStore(
        host, port, world_size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )
    return dist.PrefixStore("default_pg", server)  # as torch's own rendezvous does


def shutdown_parallel() -> None:
    """Leave the world; `init_parallel` may be called again afterwards."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
