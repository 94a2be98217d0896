"""Weight gradients that the matrix product adds to the gradient buffer, on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.megatron_reference import FULL, PACKS, SHAPE, UNTIED, Pack, make_engine

pytestmark = pytest.mark.gpu
SHAPES = {"tied": SHAPE, "untied": UNTIED}


def gradients(name: str, fused: bool, dtype: Any, overrides: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the sums of the gradients of two micro-batches, from the same weights in every call."""
    options = {"gradient_accumulation_fusion": fused, "init_method_std": 0.15, **overrides}
    engine = make_engine(SHAPES[name], dtype=dtype, overrides=options)
    assert engine.config.gradient_accumulation_fusion == fused

    def loss_fn(hidden: torch.Tensor, head: Any, packed: Pack) -> Any:
        return head(hidden).float().square().mean(), {}

    engine.forward_backward(PACKS, loss_fn)
    return {name: param.main_grad.float().clone() for name, param in engine.chunks[0].named_parameters()}


@pytest.mark.parametrize("overrides", [{}, {"overlap_grad_reduce": True}, {"grad_reduce_in_fp32": False}, FULL])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_those_that_are_added_afterwards(
    world: None, name: str, dtype: str, overrides: dict[str, Any]
) -> None:
    fused, separate = (gradients(name, fused, dtype, overrides) for fused in (True, False))
    tolerance = 1e-5 if dtype == "fp32" and overrides.get("grad_reduce_in_fp32", True) else 2e-2
    for key, expected in separate.items():
        assert (fused[key] - expected).abs().max() <= tolerance * expected.abs().max(), key
