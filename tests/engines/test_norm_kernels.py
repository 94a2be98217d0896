"""The Triton kernel for RMSNorm and RoPE, compared with torch's operations: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.megatron.model.norm_and_rope import apply_rope, apply_rope_unfused
from tests.triton_interpreter import run_in_interpreter

EPS = 1e-6
SMALL = [(0, 2, 64), (5, 3, 96), (9, 1, 320), (70, 2, 64)]  # tokens, heads, dimensions
LARGE = [(301, 16, 128), (33, 1, 1024), (9, 1, 5120)]
KINDS = ["norm", "rope", "interleaved rope", "norm and rope", "norm and interleaved rope"]


def plain(x: Tensor, weight: Tensor | None, cos_sin: tuple[Tensor, Tensor] | None, interleaved: bool) -> Tensor:
    if weight is not None:
        x = F.rms_norm(x, (x.shape[-1],), weight, EPS)
    return x if cos_sin is None else apply_rope_unfused(x, *cos_sin, interleaved)


def gradients(out: Tensor, grad: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def check(shape: tuple[int, int, int], kind: str, dtype: torch.dtype, device: str) -> None:
    """Compare results and gradients for heads that are a part of a larger tensor. In bf16 the reference is fp32."""
    from penstock.engines.megatron.triton_kernels import normalize_and_rotate

    torch.manual_seed(0)
    whole = torch.randn(*shape[:2], 3 * shape[2], device=device).to(dtype)
    x = whole[..., shape[2] : 2 * shape[2]].requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[2], device=device)).to(dtype).requires_grad_() if "norm" in kind else None
    angles = 10 * torch.rand(shape[0], 1, shape[2] // 2, device=device).repeat(1, 1, 2)
    cos_sin = (angles.cos(), angles.sin()) if "rope" in kind else None
    grad, interleaved = torch.randn(shape, device=device), "interleaved" in kind
    inputs = [x] if weight is None else [x, weight]

    found = gradients(normalize_and_rotate(x, weight, EPS, cos_sin, interleaved), grad, inputs)
    repeated = gradients(normalize_and_rotate(x, weight, EPS, cos_sin, interleaved), grad, inputs)
    assert all(torch.equal(*pair) for pair in zip(found, repeated))
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = gradients(plain(wide[0], wide[1] if weight is not None else None, cos_sin, interleaved), grad, wide)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(found, expected):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert not ours.numel() or (ours.float() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=pytest.mark.gpu) for shape in SMALL + LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_equals_torch(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    check(shape, kind, dtype, "cuda")


@pytest.mark.gpu
def test_rope_of_a_part_of_each_head_equals_torch() -> None:
    x = torch.randn(50, 4, 128, device="cuda")
    angles = torch.rand(50, 1, 32, device="cuda").repeat(1, 1, 2)
    cos_sin = (angles.cos(), angles.sin())
    torch.testing.assert_close(apply_rope(x, cos_sin, False), apply_rope_unfused(x, *cos_sin), atol=1e-5, rtol=1e-5)


@pytest.mark.integration
def test_kernel_equals_torch_in_tritons_interpreter() -> None:
    run_in_interpreter("tests.engines.test_norm_kernels:check_all")


def check_all() -> None:
    for shape in SMALL:
        for kind in KINDS:
            check(shape, kind, torch.float32, "cpu")
