"""The trainer's kernels (RMSNorm and RoPE, SwiGLU, gradient norms, weight gradients), compared with torch's operations
and Megatron's functions. Triton kernels run on a GPU and in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.megatron.compat import import_megatron
from penstock.engines.megatron.model.norm_and_rope import apply_rope, apply_rope_unfused
from penstock.engines.megatron.patches import l2_norm, scale
from tests.engines.megatron_reference import FULL, PACKS, SHAPE, UNTIED, Pack, make_engine
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


def check_norm_and_rope(shape: tuple[int, int, int], kind: str, dtype: torch.dtype, device: str) -> None:
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
def test_norm_and_rope_equal_torch(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    check_norm_and_rope(shape, kind, dtype, "cuda")


@pytest.mark.gpu
def test_rope_of_a_part_of_each_head_equals_torch() -> None:
    x = torch.randn(50, 4, 128, device="cuda")
    angles = torch.rand(50, 1, 32, device="cuda").repeat(1, 1, 2)
    cos_sin = (angles.cos(), angles.sin())
    torch.testing.assert_close(apply_rope(x, cos_sin, False), apply_rope_unfused(x, *cos_sin), atol=1e-5, rtol=1e-5)


def check_swiglu(ffn: int, dtype: torch.dtype, device: str) -> None:
    from penstock.engines.megatron.triton_kernels import swiglu, swiglu_back, weighted_swiglu_back

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
        *(swiglu(gate_up), swiglu(gate_up, weights)),
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
def test_swiglu_and_its_gradients_equal_torch(ffn: int, dtype: torch.dtype) -> None:
    check_swiglu(ffn, dtype, "cuda")


@pytest.mark.integration
def test_kernels_equal_torch_in_tritons_interpreter() -> None:
    run_in_interpreter("tests.engines.test_kernels:check_all")


def check_all() -> None:
    cases = [*((shape, KINDS[-1]) for shape in SMALL), *((SMALL[1], kind) for kind in KINDS[:-1])]
    for shape, kind in cases:
        check_norm_and_rope(shape, kind, torch.float32, "cpu")
    for ffn in (8, 3000):
        check_swiglu(ffn, torch.float32, "cpu")


CLIPPED = [(3, 5), (1,), (4096,), (64, 32)]


def make_tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in CLIPPED]


def test_norm_equals_that_of_all_elements() -> None:
    tensors = make_tensors()
    norm, per_tensor = l2_norm(1, torch.zeros(1), [tensors], False)
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert norm.shape == (1,) and per_tensor is None
    assert norm.double().item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("in_place", [True, False])
def test_scaled_tensors_equal_megatrons_bit_for_bit(in_place: bool) -> None:
    import_megatron()
    from megatron.core.utils import local_multi_tensor_scale

    sources, expected = make_tensors(), make_tensors()
    targets = sources if in_place else [torch.empty_like(tensor) for tensor in sources]
    scale(1, torch.zeros(1), [sources, targets], 0.37)
    local_multi_tensor_scale(1, torch.zeros(1), [expected, expected], 0.37)
    assert all(torch.equal(found, wanted) for found, wanted in zip(targets, expected, strict=True))
    if not in_place:
        assert all(torch.equal(found, wanted) for found, wanted in zip(sources, make_tensors(), strict=True))


def weight_gradients(name: str, fused: bool, dtype: Any, overrides: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sums of the gradients of two micro-batches, from the same weights in every call."""
    options = {"gradient_accumulation_fusion": fused, "init_method_std": 0.15, **overrides}
    engine = make_engine(UNTIED if name == "untied" else SHAPE, dtype=dtype, overrides=options)
    assert engine.config.gradient_accumulation_fusion == fused

    def loss_fn(hidden: Tensor, head: Any, packed: Pack) -> Any:
        return head(hidden).float().square().mean(), {}

    engine.forward_backward(PACKS, loss_fn)
    return {name: param.main_grad.float().clone() for name, param in engine.chunks[0].named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [{}, {"overlap_grad_reduce": True}, {"grad_reduce_in_fp32": False}, FULL])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weight_gradients_equal_those_that_are_added_afterwards(
    world: None, name: str, dtype: str, overrides: dict[str, Any]
) -> None:
    fused, separate = (weight_gradients(name, fused, dtype, overrides) for fused in (True, False))
    tolerance = 1e-5 if dtype == "fp32" and overrides.get("grad_reduce_in_fp32", True) else 2e-2
    for key, expected in separate.items():
        assert (fused[key] - expected).abs().max() <= tolerance * expected.abs().max(), key


@pytest.mark.gpu
def test_megatron_uses_the_kernels() -> None:
    import_megatron()
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.optimizer import clip_grads

    from penstock.engines.megatron import triton_kernels

    for name in ("swiglu", "swiglu_back", "weighted_swiglu_back"):
        assert getattr(fused_bias_swiglu, name) is getattr(triton_kernels, name)
    assert fused_bias_swiglu.weighted_swiglu is triton_kernels.swiglu
    assert clip_grads.l2_norm_impl is l2_norm and clip_grads.multi_tensor_scale_impl is scale
