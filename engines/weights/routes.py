"""Choose which trainer ranks send the weights to which engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.engines.generation import EngineRoute
from penstock.storage.errors import EngineError


@dataclass(frozen=True)
class ProcessPlace:
    """Where one process runs: a trainer rank or an engine."""

    node: str  # Ray's node id; "" if unknown (external engines)
    gpu_ids: tuple[str, ...] = ()  # ids on the node, in the order of the process's ranks; empty on CPU
    pid: int = 0  # process id on the node, of an engine's node rank 0; 0 if unknown
    nodes: tuple[str, ...] = ()  # node of each rank of an engine that spans nodes; empty: all ranks are on `node`

    @property
    def rank_nodes(self) -> tuple[str, ...]:
        """Return the node of each rank of the process; of an engine on CPU, the nodes of its server processes."""
        return self.nodes or (self.node,) * max(1, len(self.gpu_ids))


def shares_memory(engines: Mapping[str, ProcessPlace], ranks: Sequence[ProcessPlace]) -> bool:
    """Return whether each engine can read the memory of trainer ranks: on a GPU, a trainer rank runs on each of the
    engine's GPUs; on CPU, a trainer rank runs on the engine's node."""
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

    Args:
        engines: URL -> place.
        ranks: the place of each trainer rank.

    Raises:
        EngineError: no trainer rank runs on an engine's GPU or node.
    """
    rank_on = {(place.node, gpu): rank for rank, place in enumerate(ranks) for gpu in place.gpu_ids}
    routes: dict[str, EngineRoute] = {}
    for index, (url, place) in enumerate(engines.items()):
        if place.gpu_ids:
            gpus = list(zip(place.rank_nodes, place.gpu_ids, strict=True))
            missing = [gpu for node, gpu in gpus if (node, gpu) not in rank_on]
            if missing:
                raise EngineError(
                    f"the weight transport 'tensor' cannot reach the engine at {url}: no trainer rank runs on its GPU "
                    f"{', '.join(missing)}; use --update-weight-transport nccl"
                )
            senders = tuple(rank_on[gpu] for gpu in gpus)
        else:
            on_nodes = [
                [rank for rank, other in enumerate(ranks) if node in ("", other.node)] for node in place.rank_nodes
            ]
            if not all(on_nodes):
                raise EngineError(
                    f"the weight transport 'tensor' cannot reach the engine at {url}: no trainer rank runs on its "
                    "node; use --update-weight-transport nccl"
                )
            senders = tuple(on_node[index % len(on_node)] for on_node in on_nodes)
        routes[url] = EngineRoute(senders, engine_process_id(place))
    return routes


def engine_process_id(place: ProcessPlace) -> str:
    """Return "<node id>:<process id>" of an engine, which changes at a restart; "" if the process id is unknown."""
    return f"{place.node}:{place.pid}" if place.pid else ""
