"""Place the processes of a run on the nodes and GPUs of its Ray cluster.

The GPUs of a run are numbered. Every `gpus_per_node` consecutive ones are a block, reserved with a STRICT_PACK
placement group on one node, so that an engine or a tensor-parallel group of the trainer that fits a node does not span
nodes. A block whose node died is placed again when Ray has a node for it. On an external Ray cluster without GPUs,
processes are pinned to nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.network import accepts_connections
from penstock.storage.errors import LayoutError, PenstockError

GPU_SHARE = 0.45  # Ray's `num_gpus` of one process: a trainer rank, an engine and a probe (0.05) fit on one GPU
RESERVE_TIMEOUT = 60  # seconds for Ray to reserve a new placement group
PROBE_TIMEOUT = 120  # seconds for a Ray task that returns the id of its GPU


class NodeLost(PenstockError, ConnectionError):
    """A node that the run uses has died and has not been replaced yet."""

    code = "node-lost"


@dataclass(frozen=True)
class PlacementOptions:
    """How a run uses the nodes of its Ray cluster. All GPUs are reserved when the run's first process is placed."""

    gpus_per_node: int | None = None  # GPUs that the run uses on each node; None: as many as the largest node has
    trainer_gpus: int = 0  # GPUs of the trainer
    engine_gpus: int = 0  # GPUs of the engines that the trainer does not use
    gpus_per_engine: int = 1
    teacher_gpus: int = 0  # GPUs of the teacher's engine, after those of the engines
    num_nodes: int = 1  # nodes of a cluster without GPUs over which processes are distributed
    node_timeout: float = 600  # seconds to wait for a node that died

    def end_of_engines(self, gpus_per_node: int) -> int:
        """Return the number of the first GPU after those of trainer and engines."""
        return _end(self.engine_gpus, self.gpus_per_engine, self.trainer_gpus, gpus_per_node)

    def total_gpus(self, gpus_per_node: int) -> int:
        """Return the number of GPUs to reserve, including those at the end of a node that are too few for an engine."""
        return _end(self.teacher_gpus, self.teacher_gpus, self.end_of_engines(gpus_per_node), gpus_per_node)


@dataclass(frozen=True)
class Slot:
    """Placement of one process: Ray options, GPU ids and node."""

    options: dict[str, Any] = field(default_factory=dict)  # for `ray.remote(cls).options(**slot.options)`
    gpu_ids: tuple[str, ...] = ()  # GPU ids on the node, for CUDA_VISIBLE_DEVICES; empty on CPU
    node: str = ""  # Ray's node id; "" if Ray chooses the node


def first_gpus(num_processes: int, gpus_per_process: int, first_gpu: int, gpus_per_node: int) -> list[int]:
    """Return the number of each process's first GPU, from `first_gpu` on. GPUs are numbered node after node; a process
    that would span two nodes begins on the second node."""
    if gpus_per_process > gpus_per_node:
        raise LayoutError(
            f"a process needs {gpus_per_process} GPUs, but a node has {gpus_per_node} (--num-gpus-per-node): "
            "use fewer GPUs per process"
        )
    starts, start = [], first_gpu
    for _ in range(num_processes):
        if start % gpus_per_node + gpus_per_process > gpus_per_node:
            start += -start % gpus_per_node
        starts.append(start)
        start += gpus_per_process
    return starts


def _end(num_gpus: int, gpus_per_engine: int, first_gpu: int, gpus_per_node: int) -> int:
    """Return the number of the first GPU after those of the engines, which have `num_gpus` GPUs from `first_gpu` on."""
    size = max(1, min(gpus_per_engine, gpus_per_node))
    starts = first_gpus(num_gpus // size, size, first_gpu, gpus_per_node)
    return starts[-1] + size if starts else first_gpu


def num_engine_nodes(gpus_per_engine: int, gpus_per_node: int) -> int:
    """Return the number of nodes of one engine."""
    if gpus_per_engine <= gpus_per_node:
        return 1
    if gpus_per_engine % gpus_per_node:
        raise LayoutError(
            f"--rollout-num-gpus-per-engine {gpus_per_engine} is not a multiple of the {gpus_per_node} GPUs of a node "
            "(--num-gpus-per-node), and an engine that spans nodes uses all GPUs of each: use a divisor or a multiple "
            f"of {gpus_per_node}"
        )
    return gpus_per_engine // gpus_per_node


def order_nodes(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of `ray.nodes()` in the order in which processes are placed: the head node, then by address."""
    return sorted(
        nodes,
        key=lambda node: (
            "node:__internal_head__" not in node["Resources"],
            node["NodeManagerAddress"],
            node["NodeID"],
        ),
    )


@dataclass(frozen=True)
class Gpu:
    """One reserved GPU."""

    group: Any  # Ray's placement group
    bundle: int  # index in the placement group
    gpu_id: str  # id of the GPU on its node
    node: str  # Ray's node id


class Placement:
    """Place the processes of one run. `cluster` is its `Cluster`, whose module imports this one. Not thread-safe."""

    def __init__(self, cluster: Any, options: PlacementOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._gpus_per_node = options.gpus_per_node
        self._blocks: list[list[Gpu]] = []
        self._max_gpus = self._max_nodes = 0  # the largest GPU and node counts that Ray has reported to this process

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def alive_nodes(self) -> list[dict[str, Any]]:
        """Return the entries of `ray.nodes()` whose raylet accepts connections, ordered by `order_nodes`.

        Ray notices the death of a node only after some seconds. Until then it would place an actor there, which fails.
        """
        nodes = [node for node in self._cluster.call_ray(self._cluster.ray.nodes) if node["Alive"]]
        if not self._cluster.ray.util.client.ray.is_connected():  # outside of the nodes' network no port can be tested
            nodes = [node for node in nodes if accepts_connections(node["NodeManagerAddress"], node["NodeManagerPort"])]
        return order_nodes(nodes)

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of the whole Ray cluster."""
        return int(self._cluster.call_ray(self._cluster.ray.cluster_resources).get("GPU", 0))

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs that the run uses on each node."""
        if self._gpus_per_node is None:
            sizes = [int(node["Resources"].get("GPU", 0)) for node in self.alive_nodes()]
            self._gpus_per_node = max([1, *sizes])
        return self._gpus_per_node

    @property
    def spans_nodes(self) -> bool:
        """Return whether processes of the run, driver included, may be on different nodes."""
        if self._cluster.owned:
            return False
        if self._cluster.ray.util.client.ray.is_connected():
            return True
        driver = self._cluster.ray.get_runtime_context().get_node_id()
        if self.num_gpus == 0 and not self._max_gpus:
            return {node["NodeID"] for node in self._cpu_nodes()} != {driver}
        self._reserve(0)
        return len(self._blocks) > 1 or any(gpu.node != driver for block in self._blocks for gpu in block)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def place(self, num_processes: int, gpus_per_process: int = 1, first_gpu: int = 0) -> list[Slot]:
        """Return the placement of each process; arguments and errors as in `Cluster.place_processes`."""
        num_gpus = self.num_gpus
        self._max_gpus = max(self._max_gpus, num_gpus)
        if gpus_per_process and self._max_gpus:
            starts = first_gpus(num_processes, gpus_per_process, first_gpu, self.gpus_per_node)
            self._reserve(starts[-1] + gpus_per_process)
            gpus = [gpu for block in self._blocks for gpu in block]
            alive, slots = {node["NodeID"] for node in self.alive_nodes()}, []
            for own in (gpus[start : start + gpus_per_process] for start in starts):
                if len({gpu.node for gpu in own}) > 1:
                    raise LayoutError(
                        f"the {len(own)} GPUs of one process are on several nodes, but must be on one node: set "
                        "--num-gpus-per-node to the number of GPUs of the smallest node"
                    )
                node = own[0].node
                if node not in alive:
                    raise NodeLost(f"the node {node} with GPUs of the run does not answer: restart it with `ray start`")
                strategy = self._strategy(own[0].group, own[0].bundle)
                options = {"num_cpus": 0, "num_gpus": GPU_SHARE, "scheduling_strategy": strategy}
                slots.append(Slot(options, tuple(gpu.gpu_id for gpu in own), node))
            return slots
        if self._cluster.owned or not gpus_per_process:
            return [Slot({"num_cpus": 0}) for _ in range(num_processes)]
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ids = [str(node["NodeID"]) for node in self._cpu_nodes()]
        chosen = [ids[index * len(ids) // num_processes] for index in range(num_processes)]
        strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in chosen]
        return [Slot({"num_cpus": 0, "scheduling_strategy": s}, node=node) for s, node in zip(strategies, chosen)]

    def _cpu_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the run on a cluster without GPUs."""
        nodes, needed = self.alive_nodes(), self._options.num_nodes
        self._max_nodes = max(self._max_nodes, len(nodes))
        if len(nodes) < needed <= self._max_nodes:
            raise NodeLost(
                f"{len(nodes)} of {needed} nodes of the Ray cluster are alive: restart the other nodes with `ray start`"
            )
        if len(nodes) < needed:
            raise LayoutError(
                f"the Ray cluster has {len(nodes)} nodes, but --actor-num-nodes is {needed}: start more nodes "
                "with `ray start --address`, or lower --actor-num-nodes"
            )
        return nodes[:needed]

    # ---- placement groups --------------------------------------------------------------------------------------------

    def _reserve(self, needed: int) -> None:
        """Reserve GPUs until the run has `needed` of them, or as many as trainer and engines need if that is more."""
        needed = max(needed, self._options.total_gpus(self.gpus_per_node))
        if not self._blocks and not self._cluster.owned:
            full, rest = divmod(needed, self.gpus_per_node)
            self._adopt_or_remove_groups([self.gpus_per_node] * full + [rest] * bool(rest))
        for index, block in enumerate(self._blocks):
            self._blocks[index] = self._follow_moved_block(block)
        reserved = sum(map(len, self._blocks))
        if reserved < needed > (num_gpus := self.num_gpus):
            if needed <= self._max_gpus:
                raise NodeLost(f"Ray has {num_gpus} of the {needed} GPUs of the run: restart the lost node")
            raise LayoutError(
                f"the cluster has {num_gpus} GPUs, but the run needs {needed}: use fewer (--actor-num-gpus-per-node, "
                "--rollout-num-gpus), or share them between trainer and engines with --colocate"
            )
        while reserved < needed:
            size = min(self.gpus_per_node - reserved % self.gpus_per_node, needed - reserved)
            group = self._new_group(f"{self._cluster.namespace}-gpus-{len(self._blocks):03d}", size)
            self._blocks.append(self._locate(group, size))
            reserved += size

    def _adopt_or_remove_groups(self, sizes: list[int]) -> None:
        """Reuse the placement groups of earlier drivers if they have these sizes; otherwise remove them and their
        processes."""
        table = self._cluster.call_ray(self._cluster.ray.util.placement_group_table).values()
        prefix = f"{self._cluster.namespace}-gpus-"
        names = sorted(
            entry["name"] for entry in table if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
        )
        groups = [self._cluster.call_ray(self._cluster.ray.util.get_placement_group, name) for name in names]
        if [group.bundle_count for group in groups] == sizes:
            self._blocks = [self._locate(group, size) for group, size in zip(groups, sizes, strict=True)]
            return
        for group in groups:
            self._cluster.call_ray(self._cluster.ray.util.remove_placement_group, group)

    def _new_group(self, name: str, size: int) -> Any:
        """Reserve `size` GPUs of one node in a new placement group."""
        util, options = self._cluster.ray.util, self._cluster.detached_options(name)
        group = self._cluster.call_ray(util.placement_group, [{"GPU": 1}] * size, strategy="STRICT_PACK", **options)
        try:
            self._cluster.get(self._cluster.call_ray(group.ready), timeout=RESERVE_TIMEOUT)
        except self._cluster.ray.exceptions.GetTimeoutError as error:
            self._cluster.call_ray(util.remove_placement_group, group)
            raise LayoutError(
                f"could not reserve {size} GPUs of one node within {RESERVE_TIMEOUT} s, because no node has so many "
                "or other processes of this Ray cluster use them: wait until these end, use fewer GPUs, or give the "
                "number of GPUs of a node with --num-gpus-per-node"
            ) from error
        return group

    def _follow_moved_block(self, block: list[Gpu]) -> list[Gpu]:
        """Return a placement group's GPUs with their current node, to which Ray moved them if their node died."""
        entry = self._cluster.call_ray(self._cluster.ray.util.placement_group_table, block[0].group)
        if entry["state"] != "CREATED":
            raise NodeLost(
                f"a Ray node with {len(block)} of the run's GPUs died ({block[0].node}): run `ray start "
                "--address=HEAD_ADDRESS` on its machine"
            )
        if [entry["bundles_to_node_id"][gpu.bundle] for gpu in block] == [gpu.node for gpu in block]:
            return block
        return self._locate(block[0].group, len(block))

    def _locate(self, group: Any, size: int) -> list[Gpu]:
        """Return the GPUs of a placement group of `size` bundles, ordered by their ids."""
        probe = self._cluster.ray.remote(_assigned_node_and_gpu)
        calls = [
            probe.options(num_cpus=0, num_gpus=0.05, scheduling_strategy=self._strategy(group, index)).remote()
            for index in range(size)
        ]
        places = [self._cluster.get(call, timeout=PROBE_TIMEOUT) for call in calls]
        gpus = [Gpu(group, bundle, gpu_id, node) for bundle, (node, gpu_id) in enumerate(places)]
        return sorted(gpus, key=lambda gpu: (len(gpu.gpu_id), gpu.gpu_id))

    def release(self) -> None:
        """Remove the placement groups, which kills the processes in them."""
        blocks, self._blocks = self._blocks, []
        for group in {gpu.group.id: gpu.group for block in blocks for gpu in block}.values():
            self._cluster.call_ray(self._cluster.ray.util.remove_placement_group, group)

    def _strategy(self, group: Any, bundle: int) -> Any:
        """Return the scheduling strategy of a process on one bundle of a placement group."""
        return self._cluster.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)


def _assigned_node_and_gpu() -> tuple[str, str]:  # a Ray task
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])
