"""The Triton kernels for SwiGLU and its gradient, compared with torch: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.triton_interpreter import run_in_interpreter


def check(ffn: int, dtype: torch.dtype, device: str) -> None:
    from penstock.engines.megatron.triton_kernels import swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back

    torch.manual_seed(0)
    gate_up, grad = (torch.randn(7, size, device=device).to(dtype) for size in (2 * ffn, ffn))
    weights = torch.rand(7, 1, device=device)
    inputs = gate_up.float().requires_grad_(), weights.clone().requires_grad_()
    gate, up = inputs[0].chunk(2, dim=-1)
    plain = F.silu(gate) * up
    expected = [
        *(plain, plain * inputs[1]),
        *torch.autograd.grad(plain, inputs[:1], grad.float(), retain_graph=True),
        *torch.autograd.grad(plain * inputs[1], inputs, grad.float()),
    ]
    found = [
        *(swiglu(gate_up), weighted_swiglu(gate_up, weights)),
        *(swiglu_back(grad, gate_up), *weighted_swiglu_back(grad, gate_up, weights)),
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.float() - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert swiglu(gate_up[:0]).shape == (0, ffn)
    assert weighted_swiglu_back(grad[:0], gate_up[:0], weights[:0])[0].shape == (0, 2 * ffn)


@pytest.mark.parametrize("ffn", [pytest.param(size, marks=pytest.mark.gpu) for size in (8, 768, 3072, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_equal_those_of_torch(ffn: int, dtype: torch.dtype) -> None:
    check(ffn, dtype, "cuda")


@pytest.mark.integration
def test_values_and_gradients_equal_those_of_torch_in_tritons_interpreter() -> None:
    run_in_interpreter("tests.engines.test_swiglu_kernels:check_all")


def check_all() -> None:
    for ffn in (8, 768, 3000):
        check(ffn, torch.float32, "cpu")


@pytest.mark.gpu
def test_megatron_uses_the_kernels() -> None:
    from penstock.engines.megatron.compat import import_megatron

    import_megatron()
    from megatron.core.fusions import fused_bias_swiglu

    from penstock.engines.megatron import triton_kernels

    for name in ("swiglu", "weighted_swiglu", "swiglu_back", "weighted_swiglu_back"):
        assert getattr(fused_bias_swiglu, name) is getattr(triton_kernels, name)
