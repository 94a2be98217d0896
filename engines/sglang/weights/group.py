"""The process group over which trainer rank 0 broadcasts weights to the ranks of SGLang servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from penstock.engines.rendezvous import listen_at, serve_store

NAME = "penstock-weights"
TIMEOUT = timedelta(minutes=5)  # for all ranks to join, and for one broadcast

Call = Callable[[str, str, dict[str, Any]], None]  # (URL, route, JSON body)
Submit = Callable[..., "Future[Any]"]


class EngineGroup:
    """A process group of trainer rank 0 (rank 0 here) and all tensor-parallel ranks of the servers, in the order of
    `sizes`.

    The constructor blocks until every server has joined.

    Args:
        sizes: URL -> tensor-parallel size of the server.
        host: address of this machine that the servers can reach.
        device: device of the tensors that are sent: CUDA uses NCCL, CPU uses gloo.
        submit: runs a call in a thread.
        call: sends one request.

    Raises:
        ConnectionError, RuntimeError: a server did not join.
    """

    def __init__(self, sizes: dict[str, int], host: str, device: torch.device, submit: Submit, call: Call) -> None:
        self.sizes = sizes
        world_size = 1 + sum(sizes.values())
        backend = "nccl" if device.type == "cuda" else "gloo"
        with listen_at(host) as listener:
            port = listener.getsockname()[1]
            store = serve_store(listener, world_size, TIMEOUT)
        joining, offset = [], 1
        for url, size in sizes.items():
            body = {
                "master_address": host,
                "master_port": port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": NAME,
                "backend": backend,
            }
            joining.append(submit(call, url, "/init_weights_update_group", body))
            offset += size
        try:
            # torch has no public function for a group with ranks outside of the default group. The arguments are those
            # of SGLang's `init_custom_process_group`, because both sides must use the same keys of the store.
            self._group, _ = c10d._new_process_group_helper(
                world_size,
                0,
                [],
                dist.Backend(backend),
                dist.PrefixStore(NAME, store),
                group_name=NAME,  # type: ignore[arg-type]
                timeout=TIMEOUT,
            )
        except RuntimeError as error:  # over gloo this waits for all ranks; a server that did not join is the cause
            raise _error_of_a_call(joining) or error from None
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        wait(joining)
        if refusal := _error_of_a_call(joining):
            self.close()  # frees the group's name, for the next try
            raise refusal

    def broadcast(self, flat: torch.Tensor) -> None:
        """Start to send a byte tensor to all servers, to which the requests to receive it must have been sent. The
        tensor has arrived when all servers have answered these requests."""
        dist.broadcast(flat, 0, group=self._group, async_op=True)  # the group keeps `flat` until it has been sent

    def close(self) -> None:
        """Leave the group, without waiting for servers that have died."""
        self._group.abort()
        dist.destroy_process_group(self._group)


def _error_of_a_call(calls: list[Future[Any]]) -> BaseException | None:
    """Return the error of the first call that has failed, or None."""
    return next((error for call in calls if call.done() and (error := call.exception()) is not None), None)
