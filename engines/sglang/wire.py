"""The weight-update wire of SGLang: how tensors become its payloads, and the order of calls of one update.

The only place that knows the wire format: SGLang unpickles nothing but its own bucket class. Tensors do not travel through HTTP:
the payload carries handles (CUDA IPC on a GPU, shared memory on CPU) and the server copies from where they lie. Which tensors go,
in buckets of what size, is the publisher's business (`engines/weights`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from engines.sglang import control

NEEDS_SESSION = (0, 5, 21)  # from here on tensor updates stand between /begin_weight_update and /end_weight_update
Named = tuple[str, Tensor]
logger = logging.getLogger(__name__)


class WeightUpdate:
    """One update of all engines, as a context: they pause, take buckets, and go on.

    Until the last bucket has arrived the engines call their weights `updating:<version>`. So an update that broke off halfway can
    never pass for a version; whoever sees the name publishes again.
    """

    def __init__(self, urls: list[str], version: str, timeout: float = 600) -> None:
        assert urls, "no engines to update"
        self.urls = urls
        self.version = version
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(len(urls), thread_name_prefix="weights")
        self._facts: dict[str, tuple[tuple[int, ...], int]] = {}
        self._in_session: list[str] = []

    def __enter__(self) -> WeightUpdate:
        try:
            self._facts = dict(zip(self.urls, self._on_all(control.server_facts)))
            self._on_all(lambda url: control.pause(url, timeout=self.timeout))
            self._on_all(lambda url: self._name_version(url, f"updating:{self.version}"))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._end_session()
                self._on_all(lambda url: self._name_version(url, self.version))
        finally:
            self._release()

    def send(self, bucket: list[Named], *, last: bool) -> None:
        """Load one bucket of full tensors into every engine. The last one also flushes the cache of the old weights."""
        self._begin_session()
        flat = FlatBucket(bucket)
        # Each rank of each engine gets a payload of its own: unpickling one twice would break the sender's reference counts.
        payloads = {url: [flat.payload() for _ in range(tp_size)] for url, (_, tp_size) in self._facts.items()}
        self._on_all(
            lambda url: self._checked(
                url,
                "/update_weights_from_tensor",
                {"serialized_named_tensors": payloads[url], "load_format": "flattened_bucket", "flush_cache": last},
            )
        )
        flat.free()

    def load_from_disk(self, directory: str) -> None:
        """Load every engine from a Hugging Face directory that it can read."""
        self._on_all(lambda url: self._checked(url, "/update_weights_from_disk", {"model_path": directory, "flush_cache": True}))

    def _begin_session(self) -> None:
        if self._in_session:
            return
        self._in_session = [url for url, (release, _) in self._facts.items() if release >= NEEDS_SESSION]
        self._on_all(self._begin, self._in_session)

    def _begin(self, url: str) -> None:
        try:
            self._checked(url, "/begin_weight_update", {})
        except RuntimeError as error:
            if "already open" not in str(error):
                raise
            self._checked(url, "/end_weight_update", {})  # left open by an update whose sender died
            self._checked(url, "/begin_weight_update", {})

    def _end_session(self) -> None:
        self._on_all(lambda url: self._checked(url, "/end_weight_update", {}), self._in_session)
        self._in_session = []

    def _release(self) -> None:
        """Let the engines go on, whatever happened. One that cannot is the pool's to replace."""

        def release(url: str) -> None:
            try:
                if url in self._in_session:
                    self._checked(url, "/end_weight_update", {})
                control.go_on(url)
            except (control.ServerGone, RuntimeError) as error:
                logger.warning("after a weight update: %s", error)

        self._on_all(release)
        self._pool.shutdown()

    def _name_version(self, url: str, version: str) -> None:
        self._checked(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _checked(self, url: str, path: str, body: dict[str, Any]) -> None:
        answer = control.call(url, path, body, self.timeout)
        if not answer.get("success", True):
            raise RuntimeError(f"{url}{path} refused: {answer.get('message')}")

    def _on_all(self, fn: Callable[[str], Any], urls: list[str] | None = None) -> list[Any]:
        """`fn` on every engine at once; waits for all, then raises the first error."""
        futures = [self._pool.submit(fn, url) for url in (self.urls if urls is None else urls)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]


class FlatBucket:
    """Tensors of any dtypes laid end to end in one flat tensor, with SGLang's description of what lies where."""

    def __init__(self, bucket: list[Named]) -> None:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self.device = bucket[0][1].device
        if self.device.type == "cuda":
            monkey_patch_torch_reductions()  # names the GPU by its UUID: sender and server may number them differently
        # SGLang views the bytes where they lie: wide types first, or a float32 could begin at an odd offset behind a bfloat16.
        aligned = sorted(bucket, key=lambda item: -item[1].element_size())
        packed = FlattenedTensorBucket(named_tensors=[(name, tensor.detach().contiguous()) for name, tensor in aligned])
        self._content = {"flattened_tensor": packed.get_flattened_tensor(), "metadata": packed.get_metadata()}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the server reads on a stream of its own

    def payload(self) -> str:
        """One receiver's handle on the bucket."""
        from sglang.srt.utils import MultiprocessingSerializer

        if self.device.type == "cuda":
            return MultiprocessingSerializer.serialize(self._content, output_str=True)
        # The default strategy passes file descriptors through a socket that needs this process's secret, and crashes SGLang's
        # scheduler; names in /dev/shm need none.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return MultiprocessingSerializer.serialize(self._content, output_str=True)
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)

    def free(self) -> None:
        """Give the flat tensor back; to be called when every receiver has answered."""
        self._content = {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def buckets(named: Iterable[Named], max_bytes: int) -> Iterator[tuple[list[Named], bool]]:
    """Cut a stream of tensors into buckets of at most `max_bytes`, each with whether it is the last.

    A larger tensor is a bucket of its own.
    """
    bucket: list[Named] = []
    size = 0
    for name, tensor in named:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + tensor_bytes > max_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor_bytes
    if bucket:
        yield bucket, True


def shared_memory_bytes() -> int:
    """Free bytes of the shared memory through which CPU tensors go."""
    return shutil.disk_usage("/dev/shm").free
