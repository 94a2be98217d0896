"""One update of several SGLang servers: of their weights (`WeightUpdate`: pause them, make them load, resume them), or
of the LoRA adapters beside them (`AdapterUpdate`, --lora-publish adapter).

For adapters SGLang has routes for tensors in shared memory (CUDA IPC on a GPU) and for PEFT directories, but none for
broadcasts. Generation continues during the update: requests name their adapter (`serving/adapter_requests.py`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch

from penstock.engines.generation import EngineGone, EngineRefused, PauseMode, PublishedAdapter
from penstock.engines.serving.adapter_requests import BASE
from penstock.engines.sglang import control, older_release
from penstock.engines.sglang.weights.payload import FlatBucket
from penstock.storage.errors import EngineError
from penstock.storage.failpoints import failpoint

GROUP_NAME = "penstock-weights"  # of the process group over which weights are broadcast
CALL_TIMEOUT = 600.0  # seconds for a server to pause, or to load a bucket
logger = logging.getLogger(__name__)


class WeightUpdate:
    """One weight update of several servers. A context manager: entering pauses the servers, leaving resumes them.

    During the update the servers report the weight version `updating:<version>`; they report `version` only after all
    weights are loaded. An update that fails halfway therefore leaves `updating:<version>`, and the supervisor sends the
    weights again. A server whose memory was released reports the versions of `control.py` and stays paused.
    """

    def __init__(self, urls: list[str], version: str, in_flight: PauseMode | None = None) -> None:
        self.urls = urls
        self.version = version
        self.in_flight = in_flight
        self.facts: dict[str, tuple[tuple[int, ...], int]] = {}  # URL -> (SGLang release, tensor-parallel size)
        self._pool = ThreadPoolExecutor(len(urls) + 2, thread_name_prefix="weights")  # servers, broadcast, abort
        self._without_cache: list[str] = []  # URLs of servers whose KV cache is released (`control.py`)
        self._in_session: list[str] = []  # URLs with an open /begin_weight_update

    def __enter__(self) -> WeightUpdate:
        try:
            self.facts = dict(zip(self.urls, self._call_all(control.release_and_tp_size)))
            if self.in_flight:
                for url, (release, _) in self.facts.items():
                    older_release.check_update_in_flight(url, release)
            versions = dict(zip(self.urls, self._call_all(control.weight_version)))
            self._without_cache = [url for url, version in versions.items() if not control.has_kv_cache(version)]
            self._call_all(
                lambda url: control.pause_generation(url, CALL_TIMEOUT, self.in_flight or "retract"),
                self._urls_with_kv_cache,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._call_all(lambda url: self.post(url, "/end_weight_update", {}), self._in_session)
                self._in_session = []
                self._set_versions("", control.LOADED)
        finally:
            self._resume_generation()

    def load_shared(self, flat: FlatBucket, handles: dict[str, list[str]], *, last: bool) -> None:
        """Make every server copy a bucket from the trainer's memory; the last bucket also flushes the prefix cache.

        Args:
            flat: this rank's copy of the bucket.
            handles: URL -> one pickled memory handle per rank of the server, to the bucket's copy of a trainer rank;
                servers that are missing here read this rank's copy.
            last: whether this is the last bucket.
        """
        self._begin_sessions()
        payloads = {
            url: handles.get(url) or [flat.serialize() for _ in range(tp_size)]
            for url, (_, tp_size) in self.facts.items()
        }
        self._call_all(
            lambda url: self.post(
                url,
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": payloads[url],
                    "load_format": "flattened_bucket",
                    "flush_cache": self._flushes_prefix_cache(url, last),
                    **self._only_target_model(url, "/update_weights_from_tensor"),
                },
            )
        )

    def load_broadcast(self, flat: FlatBucket, *, last: bool) -> list[Future[Any]]:
        """Make every server wait for the broadcast of a bucket and load it. Pass the result to `wait_until_loaded`."""
        self._begin_sessions()
        body = {**flat.description(), "group_name": GROUP_NAME, "load_format": "flattened_bucket"}
        return [
            self.run_in_thread(
                self.post,
                url,
                "/update_weights_from_distributed",
                body
                | {"flush_cache": self._flushes_prefix_cache(url, last)}
                | self._only_target_model(url, "/update_weights_from_distributed"),
            )
            for url in self.urls
        ]

    def wait_until_loaded(self, loading: list[Future[Any]]) -> None:
        """Wait until every server has loaded the bucket. After an error, wait at most 5 s for the other servers,
        because they may never receive it. Raise a server's error rather than the broadcast's, which follows from it."""
        if wait(loading, return_when=FIRST_EXCEPTION).not_done:
            wait(loading, timeout=5)
        errors = [error for future in loading if future.done() and (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, (EngineGone, EngineRefused)))

    def leave_group(self) -> None:
        """Make every server leave the process group of an earlier trainer, if it is in one."""

        def leave(url: str) -> None:
            try:
                self.post(url, "/destroy_weights_update_group", {"group_name": GROUP_NAME})
            except EngineRefused as error:
                if "does not exist" not in str(error):
                    raise

        self._call_all(leave)

    def load_from_disk(self, directories: Mapping[str, str]) -> None:
        """Make every server load the weights of a Hugging Face directory (URL -> path that the server can read)."""

        def load(url: str) -> None:
            self.post(
                url,
                "/update_weights_from_disk",
                {"model_path": directories[url], "flush_cache": self._flushes_prefix_cache(url, last=True)},
            )

        self._call_all(load)

    def _flushes_prefix_cache(self, url: str, last: bool) -> bool:
        """Return whether loading a bucket must also flush the server's prefix cache: only the last bucket, and
        not if the KV cache is released (it has been flushed then) or paused requests use it."""
        return last and url not in self._without_cache and self.in_flight != "in_place"

    def _only_target_model(self, url: str, path: str) -> dict[str, Any]:
        """Return the fields of a request to `path` that leave the draft layers of speculative decoding as they are."""
        if older_release.is_older(self.facts[url][0]):
            return older_release.update_fields(path)
        return {"selector": "target"}

    def _begin_sessions(self) -> None:
        if not self._in_session:
            self._in_session = [url for url, (release, _) in self.facts.items() if not older_release.is_older(release)]
            self._call_all(self._begin_session, self._in_session)

    def _begin_session(self, url: str) -> None:
        try:
            self.post(url, "/begin_weight_update", {"selector": "target"})
        except EngineRefused as error:
            if "already open" not in str(error):
                raise
            self.post(url, "/end_weight_update", {})  # an earlier trainer died during its update
            self.post(url, "/begin_weight_update", {"selector": "target"})

    def _resume_generation(self) -> None:
        """Resume generation on all servers, also after a failed update.

        A server that cannot resume is only logged; the supervisor will restart it.
        """

        def resume(url: str) -> None:
            try:
                if url in self._in_session:
                    self.post(url, "/end_weight_update", {})
                if url in self._urls_with_kv_cache:
                    control.resume_generation(url)
            except (EngineGone, EngineRefused) as error:
                logger.warning(
                    "an engine could not resume generation after a weight update (%s); the supervisor will restart it",
                    error,
                )

        self._call_all(resume)
        self._pool.shutdown(wait=False)  # a broadcast to a failed server may be stuck in one of its threads

    @property
    def _urls_with_kv_cache(self) -> list[str]:
        return [url for url in self.urls if url not in self._without_cache]

    def _set_versions(self, prefix: str, prefix_without_cache: str) -> None:
        self._call_all(lambda url: control.set_weight_version(url, f"{prefix}{self.version}"), self._urls_with_kv_cache)
        self._call_all(
            lambda url: control.set_weight_version(url, f"{prefix_without_cache}{self.version}"), self._without_cache
        )

    def run_in_thread(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `fn(*args)` in a thread of this update; return the future."""
        return self._pool.submit(fn, *args)

    def post(self, url: str, path: str, body: dict[str, Any]) -> None:
        """Send one HTTP request of the weight update to a server."""
        answer = control.call_server(url, path, body, CALL_TIMEOUT)
        if not answer.get("success", True):
            raise EngineRefused(f"the weight update failed: {url}{path} answered {answer.get('message')!r}")

    def _call_all(self, fn: Callable[[str], Any], urls: list[str] | None = None) -> list[Any]:
        """Call `fn` for every URL in parallel, wait for all calls, and return the results or raise the first error."""
        futures = [self._pool.submit(fn, url) for url in (self.urls if urls is None else urls)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


NEVER_UPDATED = (BASE, "default")  # weight versions of servers that have the weights of their model directory


class AdapterUpdate(WeightUpdate):
    """One load of an adapter into several servers. A context manager, as `WeightUpdate`, which does not pause.

    A server whose memory was released gets the memory of its weights back, with their values
    (`enable_weights_cpu_backup`), and stays paused until `control.resume_kv_cache`.
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
        self._without_cache = [url for url in self.urls if not control.has_kv_cache(versions[url])]
        for url in self._urls_with_kv_cache:
            if versions[url] not in NEVER_UPDATED:
                raise EngineError(
                    f"the engine at {url} has the weights {versions[url]!r} instead of those of its model, on "
                    "which the adapters are trained: restart it, or use --lora-publish merged"
                )
        released = [url for url in self.urls if versions[url] == control.RELEASED]
        self._call_all(lambda url: control.resume_weights(url, BASE), released)
        loaded = self._call_all(control.loaded_adapters)
        return [url for url, names in zip(self.urls, loaded, strict=True) if self.adapter.name not in names]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._call_all(
                    lambda url: control.set_weight_version(url, f"{control.LOADED}{BASE}"), self._without_cache
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
