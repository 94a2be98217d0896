"""How many engines are started, on which GPUs, and how weights get to them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec

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


@pytest.mark.parametrize(
    ("options", "has_gpus", "kind"),
    [
        ({}, False, "tensor"),
        ({}, True, "tensor"),
        ({"num_gpus": 2}, False, "tensor"),
        ({"num_gpus": 2}, True, "disk"),
        ({"external": HERE}, False, "tensor"),
        ({"external": HERE}, True, "disk"),
        ({"external": ELSEWHERE}, False, "disk"),
        ({"transport": "disk"}, False, "disk"),
        ({"transport": "tensor", "external": ELSEWHERE}, True, "tensor"),
    ],
)
def test_weight_transport_is_tensor_only_if_memory_is_shared(
    options: dict[str, Any], has_gpus: bool, kind: str
) -> None:
    transport = EngineOptions(SPEC, **options).weight_transport(has_gpus, "/directory")
    assert (transport.kind, transport.model_path, transport.directory) == (kind, "/model", "/directory")
