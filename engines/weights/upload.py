"""Weights for engines that share no file system with the trainer: uploaded to the store, downloaded where they run.

Engines load new weights from local directories only, so the Ray actor
of each engine, which runs on the engine's machine, downloads the directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engines.generation import EngineGone, WeightTransport, WeightUpload
from penstock.engines.weights.routes import ProcessPlace
from penstock.storage.errors import EngineError
from penstock.storage.refs import Commit
from penstock.storage.store import Store

TIMEOUT = 3600.0  # seconds for the download of a model


def add_upload(
    transport: WeightTransport, engines: Mapping[str, ProcessPlace], trainer_node: str, upload: WeightUpload
) -> WeightTransport:
    """Return the transport with `upload` if it is "disk" and an engine does not run on the trainer's machine.

    Args:
        transport: transport whose directory only processes on the trainer's machine can read.
        engines: URL -> place of the engines that get the weights.
        trainer_node: node of trainer rank 0, which writes the directory.
        upload: where to upload; without actors (external engines) the transport is returned as it is.

    Raises:
        EngineError: an engine runs on several nodes, and its actor downloads on one of them only.
    """
    on_one_machine = {place.node for place in engines.values()} == {trainer_node}
    if transport.kind != "disk" or on_one_machine or not upload.actors:
        return transport
    if any(len(set(place.rank_nodes)) > 1 for place in engines.values()):
        raise EngineError(
            "--update-weight-transport disk cannot reach an engine over several nodes through an object store: "
            "name a directory that all nodes share with --update-weight-disk-dir, or use "
            "--update-weight-transport nccl"
        )
    return replace(transport, upload=upload)


@contextmanager
def upload_weights(write: Callable[[Path], None], upload: WeightUpload) -> Iterator[Mapping[str, str]]:
    """Upload a directory and let the actor of every engine download it. Yield URL -> directory on the engine's machine.
    All copies are removed after the block.

    Args:
        write: writes the weights into an empty local directory.
        upload: where to upload, and the engines' actors.

    Raises:
        EngineGone: an actor died, or did not finish the download in time.
        StoreError: the store failed, or a downloaded file differs from the uploaded one.
    """
    options = dict(upload.store_options)
    store = Store(upload.store, options, probe=False)
    key = f"{upload.prefix}/weights-{uuid.uuid4().hex[:12]}"
    try:
        with store.writing(key) as out:
            write(out.path)
        commit = Commit(kind="model", attempt=key, files=out.files)  # lists sizes and hashes; never published
        try:
            yield _call_actors(upload, "download", upload.store, options, commit)
        finally:
            _call_actors(upload, "remove_download")
    finally:
        store.delete([file.key for file in store.walk(key)])


def _call_actors(upload: WeightUpload, method: str, *args: Any) -> dict[str, Any]:
    """Call a method of every engine's actor; return URL -> result after all calls have ended."""
    import ray

    calls = {url: getattr(actor, method).remote(*args) for url, actor in upload.actors.items()}
    results: dict[str, Any] = {}
    errors: list[Exception] = []
    for url, call in calls.items():
        try:
            results[url] = ray.get(call, timeout=TIMEOUT)
        except ray.exceptions.RayTaskError as error:
            errors.append(error.cause or error)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            errors.append(EngineGone(f"the Ray actor of the engine at {url} failed in {method!r}: {error}"))
    if errors:
        raise errors[0]
    return results
