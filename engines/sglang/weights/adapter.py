"""Load a LoRA adapter into SGLang servers (`--lora-publish adapter`), beside the adapters that requests in flight use.

SGLang has routes for tensors in shared memory (CUDA IPC on a GPU) and for PEFT directories, but none for broadcasts.
Generation continues during the update: requests name their adapter (`serving/adapters.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import TracebackType

import torch

from penstock.engines.generation import PublishedAdapter
from penstock.engines.serving.adapters import BASE
from penstock.engines.sglang import control, memory, older_release
from penstock.engines.sglang.weights.payload import FlatBucket
from penstock.engines.sglang.weights.update import WeightUpdate
from penstock.storage.errors import EngineError

NEVER_UPDATED = (BASE, "default")  # weight versions of servers that have the weights of their model directory


class AdapterUpdate(WeightUpdate):
    """One load of an adapter into several servers. A context manager, as `WeightUpdate`, which does not pause.

    A server whose memory was released gets the memory of its weights back, with their values
    (`enable_weights_cpu_backup`), and stays paused until `memory.resume_kv_cache`.
    """

    def __init__(self, urls: list[str], version: str, adapter: PublishedAdapter) -> None:
        super().__init__(urls, version)
        self.adapter = adapter

    def __enter__(self) -> AdapterUpdate:
        self._waiting = self._pool.submit(self._prepare)  # while the trainer gathers the matrices
        return self

    def _prepare(self) -> list[str]:
        """Check the servers, resume the weights of those whose memory was released, and return the servers that have
        not loaded the adapter yet (all, except after an update that failed on another server)."""
        self.facts = dict(zip(self.urls, self._call_all(control.release_and_tp_size)))
        versions = dict(zip(self.urls, self._call_all(control.weight_version)))
        self._without_cache = [url for url in self.urls if not memory.has_kv_cache(versions[url])]
        for url in self._urls_with_kv_cache:
            if versions[url] not in NEVER_UPDATED:
                raise EngineError(
                    f"the engine at {url} has the weights {versions[url]!r} instead of those of its model, on "
                    "which the adapters are trained: restart it, or use --lora-publish merged"
                )
        released = [url for url in self.urls if versions[url] == memory.RELEASED]
        self._call_all(lambda url: memory.resume_weights(url, BASE), released)
        loaded = self._call_all(control.loaded_adapters)
        return [url for url, names in zip(self.urls, loaded, strict=True) if self.adapter.name not in names]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._call_all(
                    lambda url: control.set_weight_version(url, f"{memory.LOADED}{BASE}"), self._without_cache
                )
        finally:
            self._pool.shutdown(wait=False)

    def load_shared(self, flat: FlatBucket, handles: dict[str, list[str]], *, last: bool) -> None:
        """Make every server copy the matrices of the adapter from the trainer's memory; arguments as in
        `WeightUpdate.load_shared`."""
        assert last, "the matrices of an adapter must be in one bucket"
        checksums = {"expected_checksums": sha256_of_tensors(flat)} if self.adapter.compare else {}

        def load(url: str) -> None:
            release, size = self.facts[url]
            if older_release.is_older(release):
                payload = older_release.adapter_payload(url, release, size, flat, checksums)
            else:
                own = handles.get(url) or [flat.serialize() for _ in range(size)]
                payload = {"serialized_named_tensors": own, **checksums}
            body = {"lora_name": self.adapter.name, "config_dict": dict(self.adapter.config)}
            self.post(url, "/load_lora_adapter_from_tensors", {**body, "load_format": "flattened_bucket", **payload})

        self._call_all(load, self._waiting.result())

    def load_from_disk(self, directories: Mapping[str, str]) -> None:
        """Make every server load the adapter from a PEFT directory; arguments as in `WeightUpdate.load_from_disk`."""

        def load(url: str) -> None:
            self.post(url, "/load_lora_adapter", {"lora_name": self.adapter.name, "lora_path": directories[url]})

        self._call_all(load, self._waiting.result())


def sha256_of_tensors(flat: FlatBucket) -> dict[str, str]:
    """Return the name of each tensor of a bucket -> SHA-256 of its bytes, as SGLang computes it."""
    data = flat.flat.to(torch.device("cpu")).numpy()
    return {
        entry.name: hashlib.sha256(data[entry.start_idx : entry.end_idx].tobytes()).hexdigest()
        for entry in flat.metadata
    }
