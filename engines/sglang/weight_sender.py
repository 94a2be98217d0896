"""Update the weights of SGLang servers over the transports "tensor", "nccl" and "disk" (`WeightTransport`).

All trainer ranks take part: each consumes the same stream of full tensors, whose gathering is collective. The ranks
that an engine reads from also exchange handles (transport "tensor"). A rank whose engine fails therefore consumes the
rest of the stream before it raises the error: otherwise the other ranks would wait for it.
"""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from penstock.engines.generation import REFERENCE, EngineRoute, WeightTransport
from penstock.engines.lora import CONFIG, WEIGHTS
from penstock.engines.network import listen_at, serve_store
from penstock.engines.sglang.weight_update import (
    GROUP_NAME,
    AdapterUpdate,
    FlatBucket,
    NamedTensor,
    WeightUpdate,
    split_into_buckets,
)
from penstock.engines.weights.fp8_blocks import quantize_weights
from penstock.engines.weights.transfer import upload_weights
from penstock.storage.errors import EngineError, WeightMismatch
from penstock.storage.failpoints import failpoint

KEPT_ADAPTERS = 2  # number of the latest adapter directories that an update over disk keeps
ABORT_SECONDS = 30.0  # time for an aborted broadcast to end; otherwise the trainer is restarted
TIMEOUT = timedelta(minutes=5)  # time for all ranks to join the process group, and for one broadcast

Call = Callable[[str, str, dict[str, Any]], object]  # (URL, route, JSON body)
Routes = dict[str, EngineRoute]  # URL -> route


class WeightSender:
    """Send the weights of this trainer rank's model to servers, and keep the process groups for the next update."""

    def __init__(self) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._handle_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # trainer ranks -> their gloo group
        self._engine_group: EngineGroup | None = None
        self._members: list[tuple[str, str]] = []  # (URL, incarnation) of the servers in `_engine_group`
        self._written: list[Path] = []  # directories of earlier updates over disk, oldest first

    def update(self, urls: list[str], named: Iterable[NamedTensor], version: str, transport: WeightTransport) -> None:
        """Load weights into the servers at these addresses; see `EngineClient.update_weights`."""
        assert urls, "no engines to update"
        has_place = transport.model_path and (transport.directory or transport.upload)
        assert transport.kind != "disk" or has_place, "the transport 'disk' needs model_path, and directory or upload"
        if transport.kind == "tensor" and find_spec("sglang") is None:
            raise EngineError(
                "the weight transport 'tensor' needs SGLang in the trainer's Python environment: install it, or give "
                "--update-weight-transport disk"
            )
        if self._rank == 0:
            failpoint("publish-before")
        weights = iter(named)
        stream = quantize_weights(weights, transport.fp8_weights) if transport.fp8_weights else weights
        try:
            if transport.kind == "tensor":
                self._update_through_shared_memory(urls, stream, version, transport)
            elif self._rank == 0 and transport.kind == "nccl":
                self._broadcast(urls, stream, version, transport)
            elif self._rank == 0:
                self._update_through_disk(urls, stream, version, transport)
        finally:
            deque(weights, maxlen=0)  # the other ranks wait for this one in collectives
        if self._rank == 0:
            failpoint("publish-after")

    def _update_through_shared_memory(
        self, urls: list[str], named: Iterator[NamedTensor], version: str, transport: WeightTransport
    ) -> None:
        """Let the servers copy bucket by bucket from the memory of the trainer ranks, which hold one bucket at a
        time."""
        routes = {url: transport.routes.get(url, EngineRoute()) for url in urls}
        for route in routes.values():  # on every trainer rank: creating a group is collective
            if len(set(route.senders)) > 1 and route.senders not in self._handle_groups:
                self._handle_groups[route.senders] = dist.new_group(list(route.senders), backend="gloo")
        if not any(self._rank in route.senders for route in routes.values()):
            return
        if transport.through_host:
            named = ((name, tensor.cpu()) for name, tensor in named)
        # SGLang loads all matrices of an adapter in one call.
        bucket_bytes = sys.maxsize if transport.adapter else transport.bucket_bytes
        stream = self._buckets_with_handles(named, routes, bucket_bytes)
        own = [url for url, route in routes.items() if route.senders[0] == self._rank]
        try:
            with open_update(own, version, transport) as update:
                for flat, handles, last in stream:
                    update.load_shared(flat, handles, last=last)
        finally:
            deque(stream, maxlen=0)

    def _buckets_with_handles(
        self, named: Iterator[NamedTensor], routes: Routes, bucket_bytes: int
    ) -> Iterator[tuple[FlatBucket, dict[str, list[str]], bool]]:
        """Yield (bucket, handles, is_last). `handles` maps the URL of each server that reads from several trainer
        ranks, this rank among them, to one pickled memory handle per rank of the server."""
        shared = {url: route.senders for url, route in routes.items() if len(set(route.senders)) > 1}
        for bucket, last in split_into_buckets(named, bucket_bytes):
            if bucket[0][1].device.type == "cpu":  # full shared memory would kill this process with SIGBUS
                needed, free = sum(tensor.nbytes for _, tensor in bucket), shutil.disk_usage("/dev/shm").free
                if needed > free:
                    raise EngineError(
                        f"/dev/shm has {free >> 20} MiB free, but a bucket of weights needs {needed >> 20} MiB: "
                        "enlarge /dev/shm (docker run --shm-size), or give --update-weight-transport disk"
                    )
            flat, handles = FlatBucket(bucket), dict[str, list[str]]()
            for url, senders in shared.items():
                if self._rank in senders:
                    gathered: list[Any] = [None] * len(senders)
                    dist.all_gather_object(gathered, flat.serialize(), group=self._handle_groups[senders])
                    handles[url] = gathered
            yield flat, handles, last
            for senders in shared.values():
                if self._rank in senders:  # the first sender arrives here after the server has copied the bucket
                    dist.barrier(self._handle_groups[senders])
            flat.free()

    def _broadcast(
        self, urls: list[str], named: Iterator[NamedTensor], version: str, transport: WeightTransport
    ) -> None:
        """Broadcast bucket by bucket. While the servers receive and load a bucket, the next one is gathered.

        The process group of the last update is used again if the servers are the same processes.
        """
        members = [(url, transport.routes.get(url, EngineRoute()).incarnation) for url in urls]
        if members != self._members or not all(incarnation for _, incarnation in members):
            self._leave_engine_group()
        with WeightUpdate(urls, version, transport.in_flight) as update:
            try:
                loading: list[Future[Any]] = []
                for bucket, last in split_into_buckets(named, transport.bucket_bytes):
                    if self._engine_group is None:
                        update.leave_group()
                        sizes = {url: size for url, (_, size) in update.facts.items()}
                        device = bucket[0][1].device
                        assert transport.host is not None  # `TrainActor.publish` sets it
                        self._engine_group = EngineGroup(sizes, transport.host, device, update.pool.submit, update.post)
                    update.wait_until_loaded(loading)
                    flat = FlatBucket(bucket)
                    loading = update.load_broadcast(flat, last=last)
                    # In a thread: the first broadcast connects the ranks, which blocks if a server has failed.
                    loading.append(update.pool.submit(self._engine_group.broadcast, flat.flat))
                update.wait_until_loaded(loading)
                self._members = members
            except BaseException:
                # A broadcast may be unfinished; leaving the group also releases the servers that wait for it.
                if wait([*loading, update.pool.submit(self._leave_engine_group)], timeout=ABORT_SECONDS).not_done:
                    raise RuntimeError(
                        f"the broadcast of weights to a failed engine did not abort within {ABORT_SECONDS:.0f} s; "
                        "all trainer ranks must be restarted"
                    ) from None
                raise

    def _update_through_disk(
        self, urls: list[str], named: Iterator[NamedTensor], version: str, transport: WeightTransport
    ) -> None:
        """Write a Hugging Face directory, or a PEFT directory of adapters, and make every server load it. With
        `transport.upload` each server gets a copy of the directory over a store."""

        def write(target: Path) -> None:
            if transport.adapter is None:
                verify = version.startswith(REFERENCE)
                write_weights(target, named, Path(transport.model_path), transport.bucket_bytes, verify=verify)
                return
            target.mkdir(parents=True, exist_ok=True)
            matrices = {name: matrix.detach().cpu().contiguous() for name, matrix in named}
            save_file(matrices, target / WEIGHTS, metadata={"format": "pt"})
            (target / CONFIG).write_text(json.dumps(dict(transport.adapter.config)))

        if transport.upload is not None:
            with (
                upload_weights(write, transport.upload) as directories,
                open_update(urls, version, transport) as update,
            ):
                update.load_from_disk(directories)
            return
        target = (Path(transport.directory) / f"weights-{uuid.uuid4().hex[:12]}").absolute()
        try:
            write(target)
            with open_update(urls, version, transport) as update:
                update.load_from_disk(dict.fromkeys(urls, str(target)))
        finally:
            # An engine may map the files of an adapter into its memory until it unloads the adapter, so the last
            # directories are kept.
            self._written.append(target)
            for directory in self._written[: -KEPT_ADAPTERS if transport.adapter else None]:
                shutil.rmtree(directory, ignore_errors=True)
                self._written.remove(directory)

    def _leave_engine_group(self) -> None:
        group, self._engine_group, self._members = self._engine_group, None, []
        if group is not None:
            group.close()


def open_update(urls: list[str], version: str, transport: WeightTransport) -> WeightUpdate:
    """Return an update (of weights, or of adapters) of several servers, as a context manager that the caller enters."""
    if transport.adapter is None:
        return WeightUpdate(urls, version, transport.in_flight)
    return AdapterUpdate(urls, version, transport.adapter)


class EngineGroup:
    """A process group of trainer rank 0, as rank 0 of the group, and all tensor-parallel ranks of the servers.

    The constructor blocks until every server has joined at `host`, an address of this machine. CUDA tensors are sent
    over NCCL, CPU tensors over gloo. `sizes`: URL -> tensor-parallel size of a server. `submit` runs a function in a
    thread, `call` sends one request.
    """

    def __init__(
        self, sizes: dict[str, int], host: str, device: torch.device, submit: Callable[..., Future[Any]], call: Call
    ) -> None:
        self.sizes = sizes
        world_size = 1 + sum(sizes.values())
        backend = "nccl" if device.type == "cuda" else "gloo"
        with listen_at(host) as listener:
            port = listener.getsockname()[1]
            store = serve_store(listener, world_size, TIMEOUT)
        joining, offset = [], 1
        body = {"master_address": host, "master_port": port, "world_size": world_size, "backend": backend}
        for url, size in sizes.items():
            own = body | {"rank_offset": offset, "group_name": GROUP_NAME}
            joining.append(submit(call, url, "/init_weights_update_group", own))
            offset += size

        def first_error() -> BaseException | None:
            return next((error for call in joining if call.done() and (error := call.exception()) is not None), None)

        try:
            # torch has no public function for a group with ranks outside of the default group. The arguments are those
            # of SGLang's `init_custom_process_group`, because both sides must use the same keys of the store.
            self._group, _ = c10d._new_process_group_helper(
                world_size,
                0,
                [],
                dist.Backend(backend),
                dist.PrefixStore(GROUP_NAME, store),
                group_name=GROUP_NAME,  # type: ignore[arg-type]
                timeout=TIMEOUT,
            )
        except RuntimeError as error:  # over gloo this waits for all ranks; a server that did not join is the cause
            raise first_error() or error from None
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        wait(joining)
        if refusal := first_error():
            self.close()  # frees the group's name, for the next try
            raise refusal

    def broadcast(self, flat: torch.Tensor) -> None:
        """Start to send a byte tensor to all servers, after the requests to receive it
        (`WeightUpdate.load_broadcast`). It has arrived when the servers have answered these requests."""
        dist.broadcast(flat, 0, group=self._group, async_op=True)  # the group keeps `flat` until it has been sent

    def close(self) -> None:
        """Leave the group, without waiting for servers that have died."""
        self._group.abort()
        dist.destroy_process_group(self._group)


# ---- directories -----------------------------------------------------------------------------------------------------


def write_weights(
    target: Path, named: Iterable[tuple[str, Tensor]], model_path: Path, shard_bytes: int, *, verify: bool = False
) -> None:
    """Write weights as safetensors shards with an index, and copy the JSON files of `model_path` (config, tokenizer).
    `verify`: read every file back and compare it with the tensors bit for bit; raises WeightMismatch."""
    target.mkdir(parents=True, exist_ok=True)
    for file in model_path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    weight_map: dict[str, str] = {}
    for number, (bucket, _) in enumerate(split_into_buckets(named, shard_bytes)):
        shard = f"model-{number:05d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_file(tensors, target / shard, metadata={"format": "pt"})
        if verify:
            read = load_file(target / shard)
            for name, tensor in tensors.items():
                if not torch.equal(read[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)):
                    raise WeightMismatch(
                        f"{shard}: {name} read back differs from the tensor that was written: check the disk of "
                        f"{target}"
                    )
        weight_map |= dict.fromkeys(tensors, shard)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
