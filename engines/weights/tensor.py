"""Weights from memory to memory: engines on the trainer's own GPU, or on the same machine's CPU."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from engines.sglang.wire import WeightUpdate, buckets, shared_memory_bytes
from engines.weights.publisher import BUCKET_BYTES
from storage.errors import EngineError
from storage.faults import reach


class TensorPublisher:
    """Sends flat buckets; never holds more than one beside the weights themselves."""

    def __init__(self, urls: list[str], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.urls = urls
        self.bucket_bytes = bucket_bytes

    def publish(self, named: Iterable[tuple[str, Tensor]], version: str) -> None:
        """See `WeightPublisher`."""
        reach("publish-before")
        with WeightUpdate(self.urls, version) as update:
            for bucket, last in buckets(named, self.bucket_bytes):
                if bucket[0][1].device.type == "cpu":
                    _check_shared_memory(bucket)
                update.send(bucket, last=last)
        reach("publish-after")


def _check_shared_memory(bucket: list[tuple[str, Tensor]]) -> None:
    """Shared memory that runs full kills the writer with SIGBUS instead of an error."""
    needed, free = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket), shared_memory_bytes()
    if needed > free:
        found = f"/dev/shm has {free >> 20} MiB free, a bucket of weights needs {needed >> 20} MiB"
        raise EngineError(f"{found}: enlarge it (docker run --shm-size) or publish over disk")
