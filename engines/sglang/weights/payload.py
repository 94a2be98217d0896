"""Wire format of SGLang's weight updates: buckets of tensors as one byte tensor, and payloads with handles to it.

A payload is a pickle that may contain only classes on SGLang's allowlist. Tensor data is not sent over HTTP: the
payload has a handle (CUDA IPC on a GPU, shared memory on CPU), and the server copies the data from the memory of the
trainer rank.
"""

from __future__ import annotations

import base64
import itertools
import shutil
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from penstock.engines.weights.buckets import NamedTensor, num_bytes
from penstock.storage.errors import EngineError

DEVICE = 6  # index of the GPU's number in the arguments of torch's `rebuild_cuda_tensor`
SHARING_TIMEOUT = 60.0  # seconds for torch's shared-memory manager to answer


class UuidPickler(ForkingPickler):
    """Pickles tensors as torch does, with the UUID of a GPU in place of its number: SGLang's schedulers look for it
    among their own GPUs. SGLang's function for this would import SGLang, which takes seconds."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


class FlatBucket:
    """A bucket of tensors of any dtypes, concatenated into one byte tensor.

    Attributes:
        flat: [bytes], uint8.
        metadata: name, shape, dtype and byte range of each tensor, from which SGLang restores the tensors.
    """

    def __init__(self, bucket: list[NamedTensor]) -> None:
        self.device = bucket[0][1].device
        # SGLang creates views of the bytes, which must be aligned: widest dtypes first, so that for instance a float32
        # does not start at an odd multiple of 2 bytes after a bfloat16.
        aligned = sorted(bucket, key=lambda item: -item[1].element_size())
        parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in aligned]
        ends = list(itertools.accumulate(len(part) for part in parts))
        self.flat = torch.cat(parts)
        self._in_shared_memory = False
        # Same fields as SGLang's `FlattenedTensorMetadata`, whose import takes 3 s on CPU.
        self.metadata = [
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=end - len(part),
                end_idx=end,
                numel=len(part),
            )
            for (name, tensor), part, end in zip(aligned, parts, ends)
        ]

    def description(self) -> dict[str, Any]:
        """Return names, dtypes and shapes of the tensors in the order of their bytes, for a JSON request."""
        return {
            "names": [entry.name for entry in self.metadata],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in self.metadata],
            "shapes": [list(entry.shape) for entry in self.metadata],
        }

    def serialize(self, *, by_uuid: bool = True) -> str:
        """Return a base64-encoded pickle with a handle to the bucket, for one tensor-parallel rank of one server.

        Unpickling a payload twice would corrupt the sender's reference counts, so each receiver needs its own.

        On CPU torch's shared-memory manager must answer within a second, which a busy machine may exceed; such timeouts
        are retried for SHARING_TIMEOUT seconds.

        Args:
            by_uuid: identify the GPU by its UUID, because sender and server may number their GPUs differently;
                otherwise by its number (older_release.py).
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the server reads the tensor on another stream
        self._in_shared_memory = self.device.type == "cpu"
        pickler = UuidPickler if by_uuid else ForkingPickler
        content = {"flattened_tensor": self.flat, "metadata": self.metadata}
        # The default sharing strategy for CPU tensors passes file descriptors through a socket that is authenticated
        # with this process's secret, which crashes SGLang's scheduler. Names in /dev/shm need no secret.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        deadline = time.monotonic() + SHARING_TIMEOUT
        try:
            while True:
                try:
                    return base64.b64encode(pickler.dumps(content)).decode()
                except RuntimeError as error:
                    if "has timed out" not in str(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)

    def free(self) -> None:
        """Free the byte tensor. Call it once every receiver has opened or copied it.

        torch deletes the file in /dev/shm when the last receiver frees its tensor, which a receiver that is killed or
        was not called never does. So the name is deleted here; the receivers' mappings stay valid. The additional
        reference prevents that the last receiver fails because it cannot delete the name.
        """
        if self._in_shared_memory:
            storage = self.flat.untyped_storage()
            storage._shared_incref()
            Path(f"/dev/shm{storage._share_filename_cpu_()[1].decode()}").unlink(missing_ok=True)
        del self.flat
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def check_shared_memory(bucket: list[NamedTensor]) -> None:
    """Check that a bucket on CPU fits into /dev/shm; full shared memory would kill this process with SIGBUS."""
    if bucket[0][1].device.type != "cpu":
        return
    needed, free = num_bytes(bucket), shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise EngineError(
            f"/dev/shm has {free >> 20} MiB free, but a bucket of weights needs {needed >> 20} MiB: enlarge "
            "/dev/shm (docker run --shm-size), or give --update-weight-transport disk"
        )
