"""Grouped experts without a model: outputs and gradients against a loop over experts, experts without tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.engines.megatron.compat import import_megatron

import_megatron()

from penstock.engines.megatron.model.grouped_experts import GroupedExperts, TokenDispatcher  # noqa: E402

HIDDEN, WIDTH = 32, 16
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE, tp_ep=ALONE)


def make_experts(num_experts: int, device: str) -> GroupedExperts:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config: Any = SimpleNamespace(
        moe_ffn_hidden_size=WIDTH,
        hidden_size=HIDDEN,
        params_dtype=dtype,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        recompute_granularity=None,
        bias_activation_fusion=False,
    )
    experts = GroupedExperts(num_experts, config, GROUPS)
    generator = torch.Generator(device).manual_seed(0)
    for param in experts.parameters():
        param.data.copy_(0.3 * torch.randn(param.shape, generator=generator, device=device))
    return experts


def reference(experts: GroupedExperts, tokens: torch.Tensor, counts: list[int], weights: torch.Tensor) -> torch.Tensor:
    outputs = []
    pieces = zip(tokens.split(counts), weights.split(counts), strict=True)
    for (piece, weight), fc1, fc2 in zip(pieces, experts.linear_fc1.weight, experts.linear_fc2.weight, strict=True):
        gate, up = F.linear(piece, fc1).chunk(2, dim=-1)
        outputs.append(F.linear((F.silu(gate) * up * weight[:, None]).to(piece.dtype), fc2))
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[4, 0, 6], [0, 3, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_equal_a_loop_and_unused_ones_get_zero_gradients(device: str, counts: list[int]) -> None:
    experts, results = make_experts(len(counts), device), []
    generator = torch.Generator(device).manual_seed(1)
    inputs = torch.randn(sum(counts), HIDDEN, generator=generator, device=device).to(experts.linear_fc1.weight.dtype)
    weights = torch.rand(sum(counts), generator=generator, device=device)
    for compute in (
        lambda x, w: experts(x, torch.tensor(counts, device=device), w)[0],
        lambda x, w: reference(experts, x, counts, w),
    ):
        experts.zero_grad()
        torch.full((1 << 16,), torch.nan, device=device)  # freed memory that a kernel might not overwrite
        x, w = inputs.clone().requires_grad_(), weights.clone().requires_grad_()
        out = compute(x, w)
        out.float().pow(2).sum().backward()
        gradients = [x.grad, w.grad, *(param.grad for param in experts.parameters())]
        results.append([out, *(torch.zeros(()) if grad is None else grad.float() for grad in gradients)])
    for found, expected in zip(*results, strict=True):
        tolerance = 0.03 * float(expected.abs().max()) if device == "cuda" and expected.numel() else 1e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for param in experts.parameters():
        assert param.grad is not None
        assert not any(grad.any() for count, grad in zip(counts, param.grad, strict=True) if count == 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dispatch_copies_each_token_to_its_experts_and_sums_them_again(device: str) -> None:
    num_tokens, num_experts, top_k = 50, 6, 2
    config: Any = SimpleNamespace(num_moe_experts=num_experts, moe_router_topk=top_k)
    dispatcher, generator = TokenDispatcher(config, GROUPS), torch.Generator(device).manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(top_k, dim=1).indices, True)
    tokens = torch.randn(num_tokens, 1, HIDDEN, generator=generator, device=device).requires_grad_()
    copies, weights = dispatcher.dispatch_preprocess(tokens, selected, scores * selected)
    copies, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(copies, weights))
    assert counts.tolist() == selected.sum(0).tolist()
    for expert, (piece, weight) in enumerate(zip(copies.split(counts.tolist()), weights.split(counts.tolist()))):
        assert torch.equal(piece, tokens[selected[:, expert], 0])
        assert torch.equal(weight, scores[selected[:, expert], expert])
    summed = dispatcher.combine_postprocess(dispatcher.combine_preprocess(copies * weights[:, None]))
    torch.testing.assert_close(summed, tokens * (scores * selected).sum(1)[:, None, None])
    summed.sum().backward()
    expected = (scores * selected).sum(1)[:, None, None].expand_as(tokens)
    torch.testing.assert_close(tokens.grad, expected)
