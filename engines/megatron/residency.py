"""Move a rank's weights, gradients and optimizer state between the device and host memory (`--offload-train`).

An offload copies the storages to host memory and resizes them to 0 bytes, so all views of them (parameters, gradient
shards, communication buckets) stay valid: a reload resizes the storages again and copies the content back. Reading a
view while its storage is empty crashes the process; callers check with `require_on_device`.

On a CPU the same code runs with ordinary host memory, so its effects can be tested there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from penstock.engines.megatron.optimizer import inner_optimizers, on_stream, optimizer_tensors_on_device
from penstock.engines.training import STATE_KINDS, MemorySwitch, StateKind

BUFFER_BYTES = 2**28  # size of a host buffer: torch rounds pinned allocations up to a power of two


class DeviceMemory:
    """Offload and reload the state of one model. Call the methods only while no operation on the state is pending on
    another stream, for instance a parameter all-gather."""

    def __init__(self, name: str, wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        # frozen parameters are not in Megatron's parameter buffers, which have only trained parameters
        self._frozen = [param for chunk in wrapped for param in chunk.parameters() if not param.requires_grad]
        self._host: dict[StateKind, list[Tensor]] = {}  # buffers, uint8: kept from the first offload on
        self._allocations: dict[StateKind, Future[list[Tensor]]] = {}  # buffers that `start_allocation` allocates
        self._offloaded: dict[StateKind, list[tuple[UntypedStorage, int]]] = {}  # (emptied storage, its size in bytes)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def start_allocation(self) -> None:
        """Allocate the host memory for `offload` in a thread, and return at once: pinning gigabytes takes seconds, for
        which torch releases the GIL. The first offload waits for the thread, and raises its error if it failed. A
        process that ends meanwhile waits for the thread, too."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="allocate host memory")
        kinds: tuple[StateKind, ...] = ("optimizer", "weights")  # in the order of their first offload
        for kind in kinds:
            num_bytes = sum(storage.nbytes() for storage in self._storages(kind))
            self._allocations[kind] = executor.submit(_allocate_buffers, num_bytes)
        executor.shutdown(wait=False)

    def offload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state to host memory; the content of gradients is discarded. Return the duration and
        memory use of the move, or None if all these kinds were offloaded before."""
        moved = [kind for kind in STATE_KINDS if kind in kinds and kind not in self._offloaded]
        if not moved:
            return None
        start, before = time.perf_counter(), device_and_host_bytes_used()
        storages = {kind: [(storage, storage.nbytes()) for storage in self._storages(kind)] for kind in moved}
        with on_stream(self._stream):
            for kind in moved:
                if kind != "gradients":
                    for on_device, on_host in self._device_and_host_bytes(kind, storages[kind]):
                        on_host.copy_(on_device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        for storage, _ in (entry for entries in storages.values() for entry in entries):
            storage.resize_(0)
        self._offloaded |= storages
        torch.cuda.empty_cache()
        return self._describe_switch("offload", moved, start, before)

    def onload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state back to the device; gradients are zero afterwards. Return the duration and memory
        use of the move, or None if none of these kinds was offloaded."""
        moved = [kind for kind in STATE_KINDS if kind in kinds and kind in self._offloaded]
        if not moved:
            return None
        start, before = time.perf_counter(), device_and_host_bytes_used()
        storages = {kind: self._offloaded[kind] for kind in moved}
        for storage, num_bytes in (entry for entries in storages.values() for entry in entries):
            storage.resize_(num_bytes)
        with on_stream(self._stream):
            for kind in moved:
                if kind == "gradients":
                    for storage, _ in storages[kind]:
                        _view_as_bytes(storage).zero_()
                else:
                    for on_device, on_host in self._device_and_host_bytes(kind, storages[kind]):
                        on_device.copy_(on_host, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        for kind in moved:
            del self._offloaded[kind]
        return self._describe_switch("onload", moved, start, before)

    def require_on_device(self, *kinds: StateKind) -> None:
        """Check that these kinds of state are on the device."""
        missing = [kind for kind in kinds if kind in self._offloaded]
        assert not missing, f"{', '.join(missing)} of the {self._name} model are offloaded: call `onload` first"

    def _describe_switch(
        self, action: str, kinds: list[StateKind], start: float, before: tuple[int, int]
    ) -> MemorySwitch:
        """Return the duration and memory use of a move that began at `start`, with `before` bytes in use."""
        seconds, (device_after, host_after) = time.perf_counter() - start, device_and_host_bytes_used()
        return MemorySwitch(
            name=f"{self._name}: {action} {', '.join(kinds)}",
            seconds=seconds,
            device_bytes_before=before[0],
            device_bytes_after=device_after,
            host_bytes_before=before[1],
            host_bytes_after=host_after,
        )

    def _storages(self, kind: StateKind) -> list[UntypedStorage]:
        """Return the nonempty storages of a kind of state, each once; the optimizer's without those of model
        weights."""
        weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in self._buffers}
        if kind == "weights":
            tensors = [buffer.param_data for buffer in self._buffers] + self._frozen
        elif kind == "gradients":
            tensors = [buffer.grad_data for buffer in self._buffers]
        else:
            tensors = [
                tensor
                for inner in inner_optimizers(self._optimizer)
                for tensor in optimizer_tensors_on_device(inner)
                # The optimizer of an fp32 model trains views of the weights themselves.
                if tensor.untyped_storage().data_ptr() not in weights
            ]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())

    def _device_and_host_bytes(
        self, kind: StateKind, storages: list[tuple[UntypedStorage, int]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of the storages, in order, paired with the host memory to which they are copied: (device,
        host), both uint8 [n]. A storage may span several host buffers and is then yielded in pieces."""
        num_bytes, offset = sum(size for _, size in storages), 0
        if (allocation := self._allocations.pop(kind, None)) is not None:
            self._host[kind] = allocation.result()
        if sum(map(len, self._host.setdefault(kind, []))) != num_bytes:
            self._host[kind] = _allocate_buffers(num_bytes)
        for storage, _ in storages:
            rest = _view_as_bytes(storage)
            while len(rest):
                place = self._host[kind][offset // BUFFER_BYTES][offset % BUFFER_BYTES :]
                count = min(len(place), len(rest))
                yield rest[:count], place[:count]
                rest, offset = rest[count:], offset + count


def _allocate_buffers(num_bytes: int) -> list[Tensor]:
    """Return buffers of `num_bytes` in total in host memory, uint8, pinned if there is a GPU."""
    pinned = torch.cuda.is_available()
    return [
        torch.empty(min(BUFFER_BYTES, num_bytes - start), dtype=torch.uint8, pin_memory=pinned)
        for start in range(0, num_bytes, BUFFER_BYTES)
    ]


def _view_as_bytes(storage: UntypedStorage) -> Tensor:
    """Return the storage as a uint8 tensor, [size in bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_and_host_bytes_used() -> tuple[int, int]:
    """Return the used bytes of the whole device (0 without CUDA), and the resident set size of this process."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free, psutil.Process().memory_info().rss
