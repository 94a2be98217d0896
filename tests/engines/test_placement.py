"""Which node and GPU each process gets, on clusters that exist only as tables."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.placement import NodeLost, Placement, PlacementOptions, first_gpus, num_engine_nodes, order_nodes
from penstock.storage.errors import LayoutError


@pytest.mark.parametrize(
    ("count", "size", "offset", "gpus_per_node", "starts"),
    [
        (4, 1, 0, 2, [0, 1, 2, 3]),  # trainer ranks, in node order
        (2, 4, 0, 8, [0, 4]),
        (2, 4, 6, 8, [8, 12]),  # behind six trainer ranks: not on both nodes
        (3, 3, 0, 8, [0, 3, 8]),
        (2, 8, 8, 8, [8, 16]),  # the two parts of an engine of 16 GPUs
        (2, 8, 4, 8, [8, 16]),
    ],
)
def test_a_process_never_spans_nodes(count: int, size: int, offset: int, gpus_per_node: int, starts: list[int]) -> None:
    assert first_gpus(count, size, offset, gpus_per_node) == starts


@pytest.mark.parametrize(("size", "gpus_per_node", "nodes"), [(1, 8, 1), (8, 8, 1), (16, 8, 2), (4, 1, 4), (3, 8, 1)])
def test_an_engine_spans_as_many_nodes_as_it_fills(size: int, gpus_per_node: int, nodes: int) -> None:
    assert num_engine_nodes(size, gpus_per_node) == nodes


def test_sizes_that_do_not_fit_nodes_are_refused() -> None:
    with pytest.raises(LayoutError, match="--num-gpus-per-node"):
        first_gpus(1, 5, 0, 4)
    with pytest.raises(LayoutError, match="--rollout-num-gpus-per-engine 12"):
        num_engine_nodes(12, 8)


@pytest.mark.parametrize(
    ("options", "gpus_per_node", "total"),
    [
        (PlacementOptions(trainer_gpus=8), 8, 8),
        (PlacementOptions(trainer_gpus=6, engine_gpus=8, gpus_per_engine=4), 8, 16),  # two GPUs are left over
        (PlacementOptions(trainer_gpus=4, engine_gpus=4, gpus_per_engine=1), 8, 8),
        (PlacementOptions(trainer_gpus=4, engine_gpus=16, gpus_per_engine=16), 8, 24),  # over two nodes
    ],
)
def test_all_gpus_of_a_run_are_counted_with_those_left_over(
    options: PlacementOptions, gpus_per_node: int, total: int
) -> None:
    assert options.total_gpus(gpus_per_node) == total


def node(name: str, address: str, *, head: bool = False) -> dict[str, Any]:
    resources = {"node:__internal_head__": 1.0} if head else {}
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": resources}


IDS = {name: name.encode().hex().zfill(56) for name in ("head", "b", "a", "z")}  # of the form of Ray's
HEAD = node(IDS["head"], "10.0.0.9", head=True)
B, C = node(IDS["b"], "10.0.0.2"), node(IDS["a"], "10.0.0.3")


def test_nodes_are_ordered_by_address_after_the_head() -> None:
    assert order_nodes([C, B, HEAD]) == [HEAD, B, C]
    assert order_nodes([C, node(IDS["z"], "10.0.0.2"), HEAD])[1]["NodeID"] == IDS["z"], "it keeps its place"


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a placement on an external cluster of nodes without GPUs. Returns it, and the list of its alive nodes."""

    def make(num_nodes: int) -> tuple[Placement, list[dict[str, Any]]]:
        alive = [HEAD, B]
        made = Placement(SimpleNamespace(owned=False, namespace="run"), PlacementOptions(num_nodes=num_nodes))  # type: ignore[arg-type]
        monkeypatch.setattr(Placement, "num_gpus", 0)
        monkeypatch.setattr(made, "alive_nodes", lambda: order_nodes(alive))
        return made, alive

    return make


@pytest.mark.parametrize(
    ("num_nodes", "count", "nodes"),
    [(2, 2, ["head", "b"]), (2, 4, ["head", "head", "b", "b"]), (2, 1, ["head"]), (1, 3, ["head"] * 3)],
)
def test_without_gpus_processes_are_distributed_in_node_order(
    num_nodes: int, count: int, nodes: list[str], placement: Callable[..., Any]
) -> None:
    slots = placement(num_nodes)[0].place(count)
    assert [slot.node for slot in slots] == [IDS[name] for name in nodes]
    assert [slot.options["scheduling_strategy"].node_id for slot in slots] == [slot.node for slot in slots]
    assert not any(slot.options["scheduling_strategy"].soft for slot in slots)


def test_a_lost_node_is_waited_for_and_a_missing_one_is_refused(placement: Callable[..., Any]) -> None:
    made, alive = placement(2)
    assert [slot.node for slot in made.place(2)] == [IDS["head"], IDS["b"]]
    alive.remove(B)
    with pytest.raises(NodeLost, match="1 of 2 nodes"):
        made.place(2)
    alive.append(node(IDS["z"], "10.0.0.2"))
    assert [slot.node for slot in made.place(2)] == [IDS["head"], IDS["z"]]
    with pytest.raises(LayoutError, match="--actor-num-nodes is 3"):
        placement(3)[0].place(3)
