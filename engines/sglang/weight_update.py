"""Make several SGLang servers pause, load new weights and resume (`WeightUpdate`), or load LoRA adapters beside the
weights (`AdapterUpdate`, --lora-publish adapter). The wire format is here, too: the tensors of a bucket are joined into
one byte tensor, and a payload has a handle to it.

A payload is a pickle that may contain only classes on SGLang's allowlist. Tensor data is not sent over HTTP: the
payload has a handle (CUDA IPC on a GPU, shared memory on CPU), and the server copies the data from the memory of the
trainer rank.

SGLang loads adapters from shared memory or from a PEFT directory, but not from a broadcast. Generation continues while
an adapter is loaded, because requests name their adapter (`serving/endpoints.py`).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from penstock.engines.generation import EngineGone, EngineRefused, PauseMode, PublishedAdapter
from penstock.engines.serving.endpoints import BASE
from penstock.engines.sglang import control, older_release
from penstock.storage.errors import EngineError
from penstock.storage.failpoints import failpoint

GROUP_NAME = "penstock-weights"  # name of the process group over which weights are broadcast
CALL_TIMEOUT = 600.0  # seconds for a server to pause, or to load a bucket
NEVER_UPDATED = (BASE, "default")  # weight versions of servers that have loaded only their model directory
DEVICE = 6  # index of the GPU's number in the arguments of torch's `rebuild_cuda_tensor`
SHARING_TIMEOUT = 60.0  # seconds for torch's shared-memory manager to answer
NamedTensor = tuple[str, Tensor]
# Engines fuse these two MLA weights into one parameter, and drop a weight that arrives in an update call without the
# other weight. In different buckets both would be lost without an error, and the engine would keep its old weights.
FUSED = (".q_a_proj.", ".kv_a_proj_with_mqa.")
logger = logging.getLogger(__name__)


def split_into_buckets(named: Iterable[NamedTensor], max_bytes: int) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Yield (bucket, whether it is the last bucket), with buckets of at most `max_bytes` of tensor data. A larger group
    of tensors that must stay together (the FUSED ones, an fp8 weight and its scales) becomes a separate bucket."""
    bucket: list[NamedTensor] = []
    size = 0
    for group in _group_fused_tensors(named):
        group_bytes = sum(tensor.nbytes for _, tensor in group)
        if bucket and size + group_bytes > max_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.extend(group)
        size += group_bytes
    if bucket:
        yield bucket, True


def _group_fused_tensors(named: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield lists of tensors that must be in the same bucket: the two FUSED tensors of a layer, or any other tensor
    alone, each with its scales if it is quantized."""
    first, second = FUSED
    waiting: dict[str, list[NamedTensor]] = {}
    tensors = iter(named)
    for name, tensor in tensors:
        group = [(name, tensor)]
        if tensor.dtype == torch.float8_e4m3fn:
            group.append(next(tensors))  # its scales, which follow it
        partner = name.replace(second, first) if second in name else name.replace(first, second)
        if partner == name:
            yield group
        elif partner in waiting:
            yield waiting.pop(partner) + group
        else:
            waiting[name] = group
    yield from waiting.values()  # Moonlight has kv_a_proj_with_mqa, but not q_a_proj


class UuidPickler(ForkingPickler):
    """Pickle tensors as torch does, but identify a GPU by its UUID instead of its number: SGLang's schedulers look for
    the UUID among their own GPUs. SGLang has a function for this, but importing SGLang takes seconds."""

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
        # SGLang creates views of the bytes, which must be aligned: the widest dtypes come first, because after a
        # bfloat16 a float32 could start at an odd multiple of 2 bytes.
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

    def serialize(self, *, by_uuid: bool = True) -> str:
        """Return a base64-encoded pickle with a handle to the bucket, for one tensor-parallel rank of one server:
        unpickling a payload twice would corrupt the sender's reference counts. `by_uuid`: identify the GPU by its UUID,
        because sender and server may number their GPUs differently; otherwise by its number (older_release.py)."""
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
            while True:  # torch's manager has one second to answer, which a busy machine may exceed
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

        torch deletes the file in /dev/shm when the last receiver frees its tensor, which a killed receiver never does.
        So the file is deleted here; the receivers' mappings stay valid. An additional reference is counted, because the
        last receiver would otherwise try to delete the file, and fail.
        """
        if self._in_shared_memory:
            storage = self.flat.untyped_storage()
            storage._shared_incref()
            Path(f"/dev/shm{storage._share_filename_cpu_()[1].decode()}").unlink(missing_ok=True)
        del self.flat
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


class WeightUpdate:
    """One weight update of several servers, which are paused at the start of the `with` block and resumed at its end.

    During the update the servers report the weight version `updating:<version>`; they report `version` only after all
    weights are loaded. An update that fails halfway therefore leaves `updating:<version>`, and the supervisor sends the
    weights again. A server whose memory was released reports `loading:<version>` and then `loaded:<version>`, and stays
    paused.
    """

    def __init__(self, urls: list[str], version: str, in_flight: PauseMode | None = None) -> None:
        self.urls = urls
        self.version = version
        self.in_flight = in_flight
        self.facts: dict[str, tuple[tuple[int, ...], int]] = {}  # URL -> (SGLang release, tensor-parallel size)
        # One thread for each server, one to broadcast, and one to abort a broadcast.
        self.pool = ThreadPoolExecutor(len(urls) + 2, thread_name_prefix="weights")
        self._with_cache, self._without_cache = urls, list[str]()  # URLs of servers with a KV cache, or a released one
        self._flushed: list[str] = []  # URLs of servers whose prefix cache the last bucket flushes
        self._in_session: list[str] = []  # URLs with an open /begin_weight_update

    def __enter__(self) -> WeightUpdate:
        try:
            self.facts = dict(zip(self.urls, self._call_all(control.release_and_tp_size)))
            if self.in_flight:
                for url, (release, _) in self.facts.items():
                    older_release.check_release(older_release.STREAMING, release, url)
            versions = dict(zip(self.urls, self._call_all(control.weight_version)))
            self._with_cache = [url for url in self.urls if control.has_kv_cache(versions[url])]
            self._without_cache = [url for url in self.urls if url not in self._with_cache]
            # Paused requests use the prefix cache of the other servers.
            self._flushed = [] if self.in_flight == "in_place" else self._with_cache
            # With "retract" running requests return to the waiting queue, so that the KV cache can be flushed; with
            # "in_place" they keep their KV cache.
            mode = {"mode": self.in_flight or "retract"}
            self._call_all(
                lambda url: control.call_server(url, "/pause_generation", mode, CALL_TIMEOUT), self._with_cache
            )
            released = [url for url in self.urls if versions[url] == control.RELEASED]
            self._call_all(lambda url: control.resume_weights(url, self.version), released)
            self._set_versions(control.UPDATING, control.LOADING)
            if self.in_flight:
                failpoint("publish-in-flight")
        except BaseException:
            self._resume_generation()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._call_all(lambda url: self.post(url, "/end_weight_update", {}), self._in_session)
                self._in_session = []
                self._set_versions("", control.LOADED)
        finally:
            self._resume_generation()

    def load_shared(self, flat: FlatBucket, handles: dict[str, list[str]], *, last: bool) -> None:
        """Make every server copy a bucket from the trainer's memory. `handles`: URL -> for each rank of the server, a
        pickled handle to a trainer rank's copy of the bucket; other servers read this rank's copy, `flat`."""
        self._begin_sessions()
        payloads = {
            url: handles.get(url) or [flat.serialize() for _ in range(tp_size)]
            for url, (_, tp_size) in self.facts.items()
        }
        path = "/update_weights_from_tensor"
        self._call_all(
            lambda url: self.post(
                url, path, {"serialized_named_tensors": payloads[url], **self._fields(url, path, last)}
            )
        )

    def load_broadcast(self, flat: FlatBucket, *, last: bool) -> list[Future[Any]]:
        """Make every server wait for the broadcast of a bucket and load it. Pass the result to `wait_until_loaded`."""
        self._begin_sessions()
        path = "/update_weights_from_distributed"
        body = {  # the tensors are described in the order of their bytes
            "names": [entry.name for entry in flat.metadata],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in flat.metadata],
            "shapes": [list(entry.shape) for entry in flat.metadata],
            "group_name": GROUP_NAME,
        }
        return [self.pool.submit(self.post, url, path, body | self._fields(url, path, last)) for url in self.urls]

    def wait_until_loaded(self, loading: list[Future[Any]]) -> None:
        """Wait until every server has loaded the bucket; after an error, at most 5 s for the other servers. If a server
        failed, raise its error, not that of the broadcast that failed in consequence."""
        if wait(loading, return_when=FIRST_EXCEPTION).not_done:
            wait(loading, timeout=5)
        errors = [error for future in loading if future.done() and (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, (EngineGone, EngineRefused)))

    def leave_group(self) -> None:
        """Make every server leave the process group of an earlier trainer, if it is in one."""
        body = {"group_name": GROUP_NAME}
        self._call_all(lambda url: self.post(url, "/destroy_weights_update_group", body, accepted="does not exist"))

    def load_from_disk(self, directories: Mapping[str, str]) -> None:
        """Make every server load the weights of a Hugging Face directory (URL -> path that the server can read)."""
        path = "/update_weights_from_disk"
        self._call_all(
            lambda url: self.post(url, path, {"model_path": directories[url], "flush_cache": url in self._flushed})
        )

    def _fields(self, url: str, path: str, last: bool) -> dict[str, Any]:
        """Return the fields of a request that loads a bucket, but not into the draft layers of speculative decoding."""
        only_target: dict[str, Any] = {"selector": "target"}
        if self.facts[url][0] < older_release.CURRENT:  # where a broadcast never reaches the draft layers
            only_target = {"disable_draft_model": True} if path == "/update_weights_from_tensor" else {}
        return {"load_format": "flattened_bucket", "flush_cache": last and url in self._flushed, **only_target}

    def _begin_sessions(self) -> None:
        def begin(url: str) -> None:
            path, body = "/begin_weight_update", {"selector": "target"}
            if not self.post(url, path, body, accepted="already open"):
                self.post(url, "/end_weight_update", {})  # an earlier trainer died during its update
                self.post(url, path, body)

        if not self._in_session:
            self._in_session = [url for url, (release, _) in self.facts.items() if release >= older_release.CURRENT]
            self._call_all(begin, self._in_session)

    def _resume_generation(self) -> None:
        """Resume generation on all servers, also after a failed update. If a server cannot resume, only log it."""

        def resume(url: str) -> None:
            try:
                if url in self._in_session:
                    self.post(url, "/end_weight_update", {})
                if url in self._with_cache:
                    control.call_server(url, "/continue_generation", {})
            except (EngineGone, EngineRefused) as error:
                logger.warning(
                    "an engine could not resume generation after a weight update (%s); the supervisor will restart it",
                    error,
                )

        self._call_all(resume)
        self.pool.shutdown(wait=False)  # a thread of the pool may be stuck in a broadcast to a failed server

    def _set_versions(self, prefix: str, prefix_without_cache: str) -> None:
        prefixes = dict.fromkeys(self._with_cache, prefix) | dict.fromkeys(self._without_cache, prefix_without_cache)
        self._call_all(lambda url: control.set_weight_version(url, f"{prefixes[url]}{self.version}"))

    def post(self, url: str, path: str, body: dict[str, Any], accepted: str | None = None) -> bool:
        """Send one HTTP request of the weight update to a server. Return False if the server refuses it with the text
        `accepted`; any other refusal raises EngineRefused."""
        try:
            answer = control.call_server(url, path, body, CALL_TIMEOUT)
            if not answer.get("success", True):
                raise EngineRefused(f"the weight update failed: {url}{path} answered {answer.get('message')!r}")
        except EngineRefused as error:
            if accepted is None or accepted not in str(error):
                raise
            return False
        return True

    def _call_all(self, fn: Callable[[str], Any], urls: list[str] | None = None) -> list[Any]:
        """Call `fn` for every URL in parallel, wait for all calls, and return the results or raise the first error."""
        futures = [self.pool.submit(fn, url) for url in (self.urls if urls is None else urls)]
        wait(futures)
        return [future.result() for future in futures]


class AdapterUpdate(WeightUpdate):
    """One load of an adapter into several servers. A context manager like `WeightUpdate`, but generation continues.

    A server whose memory was released gets the memory of its weights back, with their values
    (`enable_weights_cpu_backup`), and stays paused until `control.resume_kv_cache`.
    """

    def __init__(self, urls: list[str], version: str, adapter: PublishedAdapter) -> None:
        super().__init__(urls, version)
        self.adapter = adapter

    def __enter__(self) -> AdapterUpdate:
        self._waiting = self.pool.submit(self._prepare)  # runs while the trainer gathers the matrices
        return self

    def _prepare(self) -> list[str]:
        """Check the servers, resume the weights of servers whose memory was released, and return the servers that have
        not loaded the adapter yet (fewer than all only after an update that failed on some servers)."""
        self.facts = dict(zip(self.urls, self._call_all(control.release_and_tp_size)))
        versions = dict(zip(self.urls, self._call_all(control.weight_version)))
        self._without_cache = [url for url in self.urls if not control.has_kv_cache(versions[url])]
        for url in self.urls:
            if url not in self._without_cache and versions[url] not in NEVER_UPDATED:
                raise EngineError(
                    f"the engine at {url} has the weights {versions[url]!r} instead of its model's own weights, "
                    "for which the adapters are trained: restart the engine, or use --lora-publish merged"
                )
        released = [url for url in self.urls if versions[url] == control.RELEASED]
        self._call_all(lambda url: control.resume_weights(url, BASE), released)
        loaded = self._call_all(control.loaded_adapters)
        return [url for url, names in zip(self.urls, loaded, strict=True) if self.adapter.name not in names]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._call_all(
                    lambda url: control.set_weight_version(url, f"{control.LOADED}{BASE}"), self._without_cache
                )
        finally:
            self.pool.shutdown(wait=False)

    def load_shared(self, flat: FlatBucket, handles: dict[str, list[str]], *, last: bool) -> None:
        """Make every server copy the matrices of the adapter from the trainer's memory."""
        assert last, "the matrices of an adapter must be in one bucket"
        checksums = {"expected_checksums": sha256_of_tensors(flat)} if self.adapter.compare else {}

        def load(url: str) -> None:
            release, size = self.facts[url]
            if release < older_release.CURRENT:
                if size > 1 or checksums:
                    older_release.check_release(older_release.ADAPTERS, release, url)
                payload: dict[str, Any] = {"serialized_tensors": flat.serialize(by_uuid=False)}
            else:
                own = handles.get(url) or [flat.serialize() for _ in range(size)]
                payload = {"serialized_named_tensors": own, **checksums}
            body = {"lora_name": self.adapter.name, "config_dict": dict(self.adapter.config)}
            self.post(url, "/load_lora_adapter_from_tensors", {**body, "load_format": "flattened_bucket", **payload})

        self._call_all(load, self._waiting.result())

    def load_from_disk(self, directories: Mapping[str, str]) -> None:
        """Make every server load the adapter from a PEFT directory (URL -> path that the server can read)."""
        name = self.adapter.name
        self._call_all(
            lambda url: self.post(url, "/load_lora_adapter", {"lora_name": name, "lora_path": directories[url]}),
            self._waiting.result(),
        )


def sha256_of_tensors(flat: FlatBucket) -> dict[str, str]:
    """Return {name: SHA-256 of the bytes} of each tensor of a bucket, as SGLang computes it."""
    data = flat.flat.to(torch.device("cpu")).numpy()
    return {
        entry.name: hashlib.sha256(data[entry.start_idx : entry.end_idx].tobytes()).hexdigest()
        for entry in flat.metadata
    }
