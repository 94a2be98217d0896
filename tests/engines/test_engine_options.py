"""How many engines are started, on which GPUs, and how weights get to them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec
from penstock.engines.weights.transfer import ProcessPlace, memory_routes
from penstock.storage.errors import EngineError

SPEC = ServerSpec(model_path="/model")
HERE, ELSEWHERE = ("127.0.0.1:1",), ("127.0.0.1:1", "10.0.0.7:1")


@pytest.mark.parametrize(
    ("options", "has_gpus", "count", "first_gpu"),
    [
        ({"num_engines": 3, "trainer_gpus": 8}, False, 3, 0),
        ({"num_engines": 3, "trainer_gpus": 8, "gpus_per_engine": 2}, True, 4, 0),  # shares the trainer's GPUs
        ({"num_gpus": 4, "trainer_gpus": 2, "gpus_per_engine": 2}, True, 2, 2),
    ],
)
def test_engines_share_the_trainers_gpus_or_use_the_next_ones(
    options: dict[str, Any], has_gpus: bool, count: int, first_gpu: int
) -> None:
    engines = EngineOptions(SPEC, **options)
    assert (engines.num_engines_to_start(has_gpus), engines.first_gpu) == (count, first_gpu)


CPU = ProcessPlace("a", pid=7)
GPU0, GPU1, GPU01 = ProcessPlace("a", ("0",)), ProcessPlace("a", ("1",)), ProcessPlace("a", ("0", "1"))
OTHER_NODE = ProcessPlace("b", ("0",))


@pytest.mark.parametrize(
    ("options", "engines", "ranks", "kind"),
    [
        ({}, [CPU], [CPU], "tensor"),
        ({}, [ProcessPlace("b")], [CPU], "nccl"),
        ({}, [GPU0, GPU1], [GPU0, GPU1], "tensor"),
        ({}, [GPU01], [GPU0, GPU1], "tensor"),
        ({"num_gpus": 1}, [GPU1], [GPU0], "nccl"),
        ({"external": HERE}, [ProcessPlace("")], [GPU0], "disk"),
        ({"external": ELSEWHERE}, [ProcessPlace("")] * 2, [CPU], "disk"),
        ({"transport": "disk"}, [CPU], [CPU], "disk"),
        ({"transport": "tensor", "external": ELSEWHERE}, [ProcessPlace("")] * 2, [GPU0], "tensor"),
    ],
)
def test_weights_go_over_memory_only_where_it_is_shared(
    options: dict[str, Any], engines: list[ProcessPlace], ranks: list[ProcessPlace], kind: str
) -> None:
    places = {f"http://engine-{index}": place for index, place in enumerate(engines)}
    transport = EngineOptions(SPEC, **options).weight_transport(places, ranks, "/directory")
    assert (transport.kind, transport.model_path, transport.directory) == (kind, "/model", "/directory")
    assert list(transport.routes) == list(places)


NODES = [ProcessPlace(node, (str(gpu),)) for node in "ab" for gpu in range(4)]
WHOLE, HALF = ProcessPlace("b", ("0", "1", "2", "3")), ProcessPlace("a", ("2", "3"))
TWO_NODES = ProcessPlace("a", ("0", "1", "0", "1"), pid=5, nodes=("a", "a", "b", "b"))
RANKS_ON_GPUS = [ProcessPlace(node, (gpu,)) for node in "ab" for gpu in "01"]


@pytest.mark.parametrize(
    ("ranks", "engines", "senders"),
    [
        ([CPU, CPU, ProcessPlace("b")], [CPU, CPU, ProcessPlace("b"), CPU], [(0,), (1,), (2,), (1,)]),
        (NODES, [WHOLE, HALF, GPU1], [(4, 5, 6, 7), (2, 3), (1,)]),
        (RANKS_ON_GPUS, [TWO_NODES], [(0, 1, 2, 3)]),
        ([CPU, ProcessPlace("b")], [ProcessPlace("b", nodes=("b", "a"))], [(1, 0)]),
        ([CPU], [ProcessPlace("c")], "its node; use --update-weight-transport nccl"),
        (RANKS_ON_GPUS[:3], [TWO_NODES], "its GPU 1; use --update-weight-transport nccl"),
        (NODES, [ProcessPlace("b", ("3", "4"))], "its GPU 4; use --update-weight-transport nccl"),
        ([CPU, ProcessPlace("b")], [ProcessPlace("b", nodes=("b", "c"))], "its node; use"),
    ],
)
def test_each_part_of_an_engine_reads_from_a_rank_beside_it(
    ranks: list[ProcessPlace], engines: list[ProcessPlace], senders: list[tuple[int, ...]] | str
) -> None:
    places = {str(number): place for number, place in enumerate(engines)}
    if isinstance(senders, str):
        with pytest.raises(EngineError, match=senders):
            memory_routes(places, ranks)
        return
    routes = memory_routes(places, ranks)
    assert [route.senders for route in routes.values()] == senders
    assert TWO_NODES not in engines or routes["0"].incarnation == "a:5"


@pytest.mark.parametrize(
    ("options", "engines", "ranks", "host"),
    [
        ({}, [GPU0, GPU1], [GPU0, GPU1], "127.0.0.1"),
        ({"num_gpus": 1}, [OTHER_NODE], [GPU0], None),
        ({"num_gpus": 2}, [ProcessPlace("a", ("1", "0"), nodes=("a", "b"))], [GPU0], None),
        ({"external": HERE}, [ProcessPlace("")], [GPU0], "127.0.0.1"),
        ({"external": ELSEWHERE}, [ProcessPlace("")] * 2, [GPU0], None),
    ],
)
def test_the_weight_group_listens_on_loopback_unless_an_engine_is_on_another_node(
    options: dict[str, Any], engines: list[ProcessPlace], ranks: list[ProcessPlace], host: str | None
) -> None:
    places = {f"http://engine-{index}": place for index, place in enumerate(engines)}
    assert EngineOptions(SPEC, transport="nccl", **options).weight_transport(places, ranks, "").host == host
