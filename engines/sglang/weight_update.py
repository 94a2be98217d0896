"""Update the weights of SGLang servers: serialize tensors and call the servers' update routes in the required order.

Only this module knows the wire format. A payload is a pickle that may contain only classes on SGLang's allowlist.
Tensor data is not sent over HTTP: the payload contains handles (CUDA IPC on a GPU, shared memory on CPU), and the
server copies the data from the trainer's memory.
"""

from __future__ import annotations

import base64
import itertools
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from penstock.engines.generation import EngineGone, WeightTransport
from penstock.engines.sglang import control
from penstock.engines.weights.buckets import NamedTensor, num_bytes, split_into_buckets
from penstock.engines.weights.hf_directory import write_weights
from penstock.storage.errors import EngineError
from penstock.storage.failpoints import failpoint

NEEDS_SESSION = (0, 5, 21)  # first SGLang release with /begin_weight_update and /end_weight_update around an update
SHARING_TIMEOUT = 60.0  # seconds within which torch's shared-memory manager must answer
logger = logging.getLogger(__name__)


def update_weights(urls: list[str], named: Iterable[NamedTensor], version: str, transport: WeightTransport) -> None:
    """Load weights into the servers at these addresses; see `EngineClient.update_weights`."""
    if transport.kind == "disk":
        if not (transport.model_path and transport.directory):
            raise EngineError(
                "the weight transport 'disk' needs WeightTransport.model_path and WeightTransport.directory: set both"
            )
    elif find_spec("sglang") is None:
        raise EngineError(
            "the weight transport 'tensor' needs SGLang in the trainer's Python environment: install it, or give "
            "--update-weight-transport disk"
        )
    failpoint("publish-before")
    if transport.kind == "disk":
        target = (Path(transport.directory) / f"weights-{uuid.uuid4().hex[:12]}").absolute()
        try:
            write_weights(target, named, Path(transport.model_path), transport.bucket_bytes)
            with WeightUpdate(urls, version) as update:
                update.load_from_disk(str(target))
        finally:
            shutil.rmtree(target, ignore_errors=True)
    else:  # memory holds at most one bucket in addition to the weights
        with WeightUpdate(urls, version) as update:
            for bucket, last in split_into_buckets(named, transport.bucket_bytes):
                update.send_bucket(bucket, last=last)
    failpoint("publish-after")


class WeightUpdate:
    """One weight update of several servers. A context manager: entering pauses the servers, leaving resumes them.

    During the update the servers report the weight version `updating:<version>`; they report `version` only after all
    weights are loaded. After an update that failed halfway they therefore report `updating:<version>`, and the
    supervisor sends the weights again.
    """

    def __init__(self, urls: list[str], version: str, timeout: float = 600) -> None:
        assert urls, "no engines to update"
        self.urls = urls
        self.version = version
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(len(urls), thread_name_prefix="weights")
        self._servers: dict[str, tuple[tuple[int, ...], int]] = {}  # URL -> (SGLang release, tensor-parallel size)
        self._in_session: list[str] = []  # URLs of servers between /begin_weight_update and /end_weight_update

    def __enter__(self) -> WeightUpdate:
        try:
            self._servers = dict(zip(self.urls, self._call_all(control.release_and_tp_size)))
            self._call_all(lambda url: control.pause(url, timeout=self.timeout))
            self._set_version(f"updating:{self.version}")
        except BaseException:
            self._resume()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._call_all(lambda url: self._post(url, "/end_weight_update", {}), self._in_session)
                self._in_session = []
                self._set_version(self.version)
        finally:
            self._resume()

    def send_bucket(self, bucket: list[NamedTensor], *, last: bool) -> None:
        """Load one bucket of full (unsharded) tensors into every server; the last bucket also flushes the prefix
        cache."""
        if bucket[0][1].device.type == "cpu":  # full shared memory would kill this process with SIGBUS
            needed, free = num_bytes(bucket), shutil.disk_usage("/dev/shm").free
            if needed > free:
                raise EngineError(
                    f"/dev/shm has {free >> 20} MiB free, but a bucket of weights needs {needed >> 20} MiB: enlarge "
                    "/dev/shm (docker run --shm-size), or give --update-weight-transport disk"
                )
        if not self._in_session:
            self._in_session = [url for url, (release, _) in self._servers.items() if release >= NEEDS_SESSION]
            self._call_all(self._begin_session, self._in_session)
        flat = FlatBucket(bucket)
        # One payload per tensor-parallel rank: unpickling a payload twice would corrupt the sender's reference counts.
        payloads = {url: [flat.serialize() for _ in range(tp_size)] for url, (_, tp_size) in self._servers.items()}
        body = {"load_format": "flattened_bucket", "flush_cache": last}
        self._call_all(
            lambda url: self._post(
                url, "/update_weights_from_tensor", body | {"serialized_named_tensors": payloads[url]}
            )
        )
        flat.free()

    def load_from_disk(self, directory: str) -> None:
        """Make every server load the weights of a Hugging Face directory, which all servers must be able to read."""
        body = {"model_path": directory, "flush_cache": True}
        self._call_all(lambda url: self._post(url, "/update_weights_from_disk", body))

    def _begin_session(self, url: str) -> None:
        """Call /begin_weight_update of one server, after ending an update that a dead trainer left open."""
        try:
            self._post(url, "/begin_weight_update", {})
        except RuntimeError as error:
            if "already open" not in str(error):
                raise
            self._post(url, "/end_weight_update", {})
            self._post(url, "/begin_weight_update", {})

    def _resume(self) -> None:
        """Resume generation on all servers, also after a failed update.

        If a server cannot resume, this is only logged, because the supervisor will restart the server.
        """

        def resume(url: str) -> None:
            try:
                if url in self._in_session:
                    self._post(url, "/end_weight_update", {})
                control.resume(url)
            except (EngineGone, RuntimeError) as error:
                logger.warning(
                    "an engine could not resume generation after a weight update (%s); the supervisor will restart it",
                    error,
                )

        self._call_all(resume)
        self._pool.shutdown()

    def _set_version(self, version: str) -> None:
        """Set the weight version that all servers report."""
        body = {"new_version": version, "abort_all_requests": False}
        self._call_all(lambda url: self._post(url, "/update_weight_version", body))

    def _post(self, url: str, path: str, body: dict[str, Any]) -> None:
        """Call a route of one server. Raises RuntimeError if the response does not report success."""
        answer = control.call_server(url, path, body, self.timeout)
        if not answer.get("success", True):
            raise RuntimeError(f"the weight update failed: {url}{path} answered {answer.get('message')!r}")

    def _call_all(self, fn: Callable[[str], Any], urls: list[str] | None = None) -> list[Any]:
        """Call `fn` for every server in parallel and return the results; wait for all calls, then raise the first
        error.

        Args:
            fn: function of a server's URL.
            urls: URLs of the servers; by default all servers of the update.
        """
        futures = [self._pool.submit(fn, url) for url in (self.urls if urls is None else urls)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


class FlatBucket:
    """A bucket of named tensors of any dtypes, concatenated into one byte tensor that is shared with SGLang.

    `content` holds the byte tensor and the metadata (name, shape, dtype, byte range) from which SGLang restores each
    tensor.
    """

    def __init__(self, bucket: list[NamedTensor]) -> None:
        self.device = bucket[0][1].device
        if self.device.type == "cuda":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            # The CUDA IPC handle then has the GPU's UUID: trainer and server may number their GPUs differently.
            monkey_patch_torch_reductions()
        # SGLang creates views of the bytes, which must be aligned: widest dtypes first, so that for instance a float32
        # does not start at an odd multiple of 2 bytes after a bfloat16.
        aligned = sorted(bucket, key=lambda item: -item[1].element_size())
        parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in aligned]
        ends = list(itertools.accumulate(len(part) for part in parts))
        self.content: dict[str, Any] = {
            "flattened_tensor": torch.cat(parts),
            # Same fields as SGLang's `FlattenedTensorMetadata`, whose import takes 3 s on CPU.
            "metadata": [
                SimpleNamespace(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    start_idx=end - len(part),
                    end_idx=end,
                    numel=len(part),
                )
                for (name, tensor), part, end in zip(aligned, parts, ends)
            ],
        }
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the server reads the tensor on another CUDA stream

    def serialize(self) -> str:
        """Return a base64-encoded pickle with a memory handle of the bucket, for one tensor-parallel rank of one
        server.

        On CPU torch's shared-memory manager must answer within a second, which a busy machine may exceed; such timeouts
        are retried for SHARING_TIMEOUT seconds.
        """
        # The default sharing strategy for CPU tensors passes file descriptors through a socket that is authenticated
        # with this process's secret, which crashes SGLang's scheduler. Names in /dev/shm need no secret.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        deadline = time.monotonic() + SHARING_TIMEOUT
        try:
            while True:
                try:
                    return base64.b64encode(ForkingPickler.dumps(self.content)).decode()
                except RuntimeError as error:
                    if "has timed out" not in str(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)

    def free(self) -> None:
        """Free the byte tensor. Call this after every server has copied the data."""
        self.content = {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
