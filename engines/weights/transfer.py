"""Transfer a trainer's weights to the engines: choose which trainer ranks send to which engine, upload the weights for
engines without a file system shared with the trainer, and check that every tensor arrived
(`--check-weight-update-equal`).

Engines load new weights from local directories only, so for an upload the Ray actor of each engine, which runs on the
engine's machine, downloads the directory.

An engine shards, fuses (qkv, gate and up, experts) and converts what it loads, so its parameters cannot be compared
with the trainer's tensors by name. They are compared through the engine itself, on every rank:

1. The trainer writes its tensors to files, reads them back and compares them. The engine loads the files as it loads a
   model; the checksums of its parameters are the expected ones.
2. All parameters are overwritten with random values: a tensor that is not sent, or not loaded, cannot stay correct.
3. The weights are sent over the run's transport. The checksums must be those of step 1.

A new engine has loaded version 0 from --hf-checkpoint without the trainer. Its checksums must be those of step 1, too:
otherwise the conversion or the gathering of shards, which steps 1 and 3 have in common, changed a tensor.

An engine's own comparison (`/weights_checker` with `snapshot` and `compare`) is not sufficient: it answers for rank 0
only, and the snapshot is equal to the trainer's weights only at the first update.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.engines.generation import REFERENCE, EngineClient, EngineGone, EngineRoute, WeightTransport, WeightUpload
from penstock.storage.commit import Commit
from penstock.storage.errors import EngineError, WeightMismatch
from penstock.storage.store import Store

TIMEOUT = 3600.0  # seconds for the download of a model
INITIAL = "hf-checkpoint"  # version that an engine reports while it has the weights of --hf-checkpoint
Checksums = Mapping[str, list[dict[str, str]]]  # URL -> for each rank of the engine, tensor -> checksum


@dataclass(frozen=True)
class ProcessPlace:
    """Where one process (a trainer rank or an engine) runs."""

    node: str  # Ray's node id; "" if unknown (external engines)
    gpu_ids: tuple[str, ...] = ()  # ids on the node, in the order of the process's ranks; empty on CPU
    pid: int = 0  # process id on the node; of an engine over several nodes, that of its first process; 0 if unknown
    nodes: tuple[str, ...] = ()  # node of each rank of an engine that spans nodes; empty: all ranks are on `node`

    @property
    def rank_nodes(self) -> tuple[str, ...]:
        """Return the node of each rank of the process; for an engine on CPU, the nodes of its server processes."""
        return self.nodes or (self.node,) * max(1, len(self.gpu_ids))


def shares_memory(engines: Mapping[str, ProcessPlace], ranks: Sequence[ProcessPlace]) -> bool:
    """Return whether each engine can read the memory of trainer ranks (`memory_routes`)."""
    try:
        memory_routes(engines, ranks)
    except EngineError:
        return False
    return True


def memory_routes(engines: Mapping[str, ProcessPlace], ranks: Sequence[ProcessPlace]) -> dict[str, EngineRoute]:
    """Return URL -> route (trainer ranks that send the weights) of each engine for the weight transport "tensor".

    An engine's process sees only its own GPUs, so it can open a CUDA IPC handle only if the handle was created on one
    of them: each tensor-parallel rank of an engine reads from the trainer rank on the same GPU. On CPU any rank on the
    same node can send, so the engines of a node are distributed over its ranks.
    """
    rank_on = {(place.node, gpu): rank for rank, place in enumerate(ranks) for gpu in place.gpu_ids}
    routes: dict[str, EngineRoute] = {}
    for index, (url, place) in enumerate(engines.items()):
        if place.gpu_ids:
            gpus = list(zip(place.rank_nodes, place.gpu_ids, strict=True))
            candidates = [[rank_on[gpu]] if gpu in rank_on else [] for gpu in gpus]
            where = f"GPU {', '.join(gpu for (_, gpu), found in zip(gpus, candidates) if not found)}"
        else:
            candidates, where = [], "node"
            for node in place.rank_nodes:
                candidates.append([rank for rank, other in enumerate(ranks) if node in ("", other.node)])
        if not all(candidates):
            raise EngineError(
                f"the weight transport 'tensor' cannot reach the engine at {url}: no trainer rank runs on its {where}; "
                "use --update-weight-transport nccl"
            )
        senders = tuple(found[index % len(found)] for found in candidates)
        routes[url] = EngineRoute(senders, engine_process_id(place))
    return routes


def engine_process_id(place: ProcessPlace) -> str:
    """Return "<node id>:<process id>" of an engine, which changes at a restart; "" if the process id is unknown."""
    return f"{place.node}:{place.pid}" if place.pid else ""


def add_upload(
    transport: WeightTransport, engines: Mapping[str, ProcessPlace], trainer_node: str, upload: WeightUpload
) -> WeightTransport:
    """Return `transport` with `upload` if its kind is "disk" and an engine runs on another machine than trainer rank 0,
    which writes the directory, on `trainer_node`. External engines have no actors, so nothing changes for them."""
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
    All copies are removed after the block."""
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


# ---- check -----------------------------------------------------------------------------------------------------------


def update_and_check(
    client: EngineClient,
    publish: Callable[[str, WeightTransport], None],
    version: str,
    transport: WeightTransport,
    *,
    is_initial: bool,
) -> tuple[int, float]:
    """Send the trainer's weights to all engines of a client and check that every tensor arrived. `is_initial` says that
    these are the weights of --hf-checkpoint: those that an engine loaded itself (version `INITIAL`) must be equal.

    Return the number of compared tensors, over all ranks of all engines, and the seconds of the update itself. After a
    WeightMismatch the engines report no policy version, so the next update sends the weights again.
    """
    initial: Checksums = {}
    if is_initial and any(client.weight_version(url) == INITIAL for url in client.urls):
        checksums = client.weight_checksums()
        initial = {url: checksums[url] for url in client.urls if client.weight_version(url) == INITIAL}
    publish(f"{REFERENCE}{version}", replace(transport, kind="disk"))
    expected = client.weight_checksums()
    _compare(
        {url: expected[url] for url in initial},
        initial,
        f"in the engine as it loaded --hf-checkpoint, but {{expected}} after loading the trainer's {version}: the "
        "conversion or the gathering of shards changed the tensor; report this as a bug",
    )
    client.overwrite_weights()
    start = time.perf_counter()
    publish(version, transport)
    seconds = time.perf_counter() - start
    try:
        num_tensors = _compare(
            expected,
            client.weight_checksums(),
            f"in the engine after the weight update to {version} ({transport.kind}), but {{expected}} in the trainer: "
            "try another --update-weight-transport, and report this as a bug",
        )
        return num_tensors, seconds
    except WeightMismatch:
        client.overwrite_weights()
        raise


def _compare(expected: Checksums, actual: Checksums, where: str) -> int:
    """Compare checksums and return their number. Raises WeightMismatch for the first difference. The message ends with
    `where`, in which `{expected}` is replaced by the expected checksum."""
    different, total = [], 0
    for url, ranks in expected.items():
        for rank, (before, after) in enumerate(zip(ranks, actual[url], strict=True)):
            names = sorted(before.keys() | after.keys())
            total += len(names)
            different += [
                (url, rank, name, before.get(name, "missing"), after.get(name, "missing"))
                for name in names
                if before.get(name) != after.get(name)
            ]
    if different:
        url, rank, name, checksum, found = different[0]
        raise WeightMismatch(
            f"engine {url}, rank {rank}: {name} ({len(different)} of {total} tensors differ) has checksum {found} "
            f"{where.format(expected=checksum)}"
        )
    return total
