"""Weights for engines that share no file system with the trainer: uploaded to the store, downloaded where they run.

SGLang loads new weights from local directories only (0.5.15.post1 to 0.5.21 refuse a remote loader), so the Ray actor
of each engine, which runs on the engine's machine, downloads the directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.engines.generation import EngineGone, WeightUpload
from penstock.storage.refs import Commit
from penstock.storage.store import Store

TIMEOUT = 3600.0  # seconds for the download of a model


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
