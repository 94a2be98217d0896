"""The weight-update wire of SGLang: how tensors become its payloads, and the order of calls of one update.

The only place that knows the wire format: SGLang unpickles nothing but a short list of plain classes and its own. Tensors do not
travel through HTTP: the payload carries handles (CUDA IPC on a GPU, shared memory on CPU) and the server copies from where they
lie. Which tensors go, in buckets of what size, is the publisher's business (`engines/weights`).
"""

from __future__ import annotations

import base64
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor

from engines.sglang import control

NEEDS_SESSION = (0, 5, 21)  # from here on tensor updates stand between /begin_weight_update and /end_weight_update
# SGLang makes one parameter of these two (MLA), and forgets the one that came alone when the call ends: in different buckets both
# would be lost without a word, and the engine would go on with the old ones.
FUSED = (".q_a_proj.", ".kv_a_proj_with_mqa.")
SHARING_PATIENCE = 60.0  # seconds
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
    """Tensors of any dtypes laid end to end in one flat tensor, and the description by which SGLang finds them (`content`)."""

    def __init__(self, bucket: list[Named]) -> None:
        self.device = bucket[0][1].device
        if self.device.type == "cuda":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # names the GPU by its UUID: sender and server may number them differently
        # SGLang views the bytes where they lie: wide types first, or a float32 could begin at an odd offset behind a bfloat16.
        aligned = sorted(bucket, key=lambda item: -item[1].element_size())
        parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in aligned]
        ends = list(itertools.accumulate(len(part) for part in parts))
        self.content: dict[str, Any] = {
            "flattened_tensor": torch.cat(parts),
            # Namespaces with the fields of SGLang's own class: importing SGLang for its sake would cost a trainer 3 s on CPU.
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
            torch.cuda.synchronize(self.device)  # the server reads on a stream of its own

    def payload(self) -> str:
        """One receiver's handle on the bucket."""
        # The default strategy for CPU tensors passes file descriptors through a socket that needs this process's secret, and
        # crashes SGLang's scheduler; names in /dev/shm need none.
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return base64.b64encode(_pickled(self.content)).decode()
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)

    def free(self) -> None:
        """Give the flat tensor back; to be called when every receiver has answered."""
        self.content = {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def _pickled(content: dict[str, Any]) -> memoryview:
    """The content with its memory shared. On CPU torch's daemon for that has a second to answer, which a busy machine may need longer."""
    deadline = time.monotonic() + SHARING_PATIENCE
    while True:
        try:
            return ForkingPickler.dumps(content)
        except RuntimeError as error:
            if "has timed out" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def buckets(named: Iterable[Named], max_bytes: int) -> Iterator[tuple[list[Named], bool]]:
    """Cut a stream of tensors into buckets of at most `max_bytes`, each with whether it is the last.

    A larger tensor, or pair of tensors that belong together, is a bucket of its own.
    """
    bucket: list[Named] = []
    size = 0
    for group in _together(named):
        group_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in group)
        if bucket and size + group_bytes > max_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.extend(group)
        size += group_bytes
    if bucket:
        yield bucket, True


def _together(named: Iterable[Named]) -> Iterator[list[Named]]:
    """The tensors one by one, but the two of FUSED of one layer as a pair, when the second has come."""
    first, second = FUSED
    waiting: dict[str, Named] = {}
    for item in named:
        name = item[0]
        partner = name.replace(second, first) if second in name else name.replace(first, second)
        if partner == name:
            yield [item]
        elif partner in waiting:
            yield [waiting.pop(partner), item]
        else:
            waiting[name] = item
    yield from ([item] for item in waiting.values())  # Moonlight has only the second


def shared_memory_bytes() -> int:
    """Free bytes of the shared memory through which CPU tensors go."""
    return shutil.disk_usage("/dev/shm").free
