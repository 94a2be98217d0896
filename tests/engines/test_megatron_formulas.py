"""Rotary embeddings and expert selection, compared with transformers' functions."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3MoE
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from penstock.engines.families.shape import Experts, Rotary, YarnScaling
from penstock.engines.megatron.compat import import_megatron
from penstock.engines.megatron.model.norm_and_rope import (
    apply_rope_unfused,
    rope_cos_sin,
    rope_frequencies,
    softmax_scale,
    yarn_attention_factor,
)
from tests.engines.megatron_reference import LATENT, LATENT_ATTENTION

import_megatron()

from penstock.engines.megatron.model.layers import select_experts  # noqa: E402


@pytest.mark.parametrize(
    "scaling",
    [
        YarnScaling(factor=40, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),  # DeepSeek V3
        YarnScaling(
            factor=32, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
        ),  # Kimi K2
        YarnScaling(factor=4, original_max_positions=64, mscale=0.7, mscale_all_dim=0.4),
        YarnScaling(factor=4, original_max_positions=64, mscale=0.7),  # one mscale without the other has no effect
        YarnScaling(factor=1, original_max_positions=64, mscale=0.7, mscale_all_dim=0.4),
    ],
    ids=lambda scaling: f"{scaling.factor}-{scaling.mscale}-{scaling.mscale_all_dim}",
)
def test_yarn_frequencies_attention_factor_and_softmax_scale(scaling: YarnScaling) -> None:
    fields = scaling.model_dump() | {"original_max_position_embeddings": scaling.original_max_positions}
    rope = dict(rope_type="yarn", rope_theta=50000.0, **fields)
    config = transformers.DeepseekV3Config(
        **LATENT_ATTENTION.model_dump(), hidden_size=40, num_attention_heads=4, rope_parameters=rope
    )
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    rotary = Rotary(base=50000.0, scaling=scaling)
    torch.testing.assert_close(rope_frequencies(rotary, LATENT_ATTENTION.qk_rope_head_dim), expected, rtol=1e-6, atol=0)
    assert yarn_attention_factor(scaling) == pytest.approx(length)
    cosines, _ = rope_cos_sin(torch.zeros(1), LATENT_ATTENTION.qk_rope_head_dim, rotary)
    torch.testing.assert_close(cosines, torch.full_like(cosines, length))
    scale = softmax_scale(LATENT.model_copy(update={"rotary": rotary}))
    assert scale == pytest.approx(DeepseekV3Attention(config, 0).scaling)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_interleaved_and_partial_rotation(fraction: float) -> None:
    """The order of dimensions may differ from transformers' GLM-4, in queries and keys alike: products are equal."""
    query, key = torch.randn(2, 1, 3, 50, 16).unbind()  # [batch, heads, t, head_dim], as transformers has it
    dim = int(16 * fraction)
    cosines, sines = rope_cos_sin(torch.arange(50), dim, Rotary(base=10000.0))
    expected = apply_rotary_pos_emb(query, key, cosines[None, :, 0], sines[None, :, 0])
    ours = [
        apply_rope_unfused(x[0].transpose(0, 1), cosines, sines, interleaved=True).transpose(0, 1) for x in (query, key)
    ]
    torch.testing.assert_close(ours[0] @ ours[1].mT, (expected[0] @ expected[1].mT)[0])


@pytest.mark.parametrize(
    ("groups", "top_groups", "top_k", "normalized"),
    [(1, 1, 2, True), (4, 2, 3, True), (4, 3, 2, False), (2, 1, 4, True), (1, 1, 1, True)],
)
def test_routing_of_sigmoid_scores(groups: int, top_groups: int, top_k: int, normalized: bool) -> None:
    """Includes groups of other than two experts, where megatron-core differs."""
    torch.manual_seed(groups + top_k)
    config = transformers.DeepseekV3Config(
        hidden_size=8,
        n_routed_experts=16,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
        moe_intermediate_size=8,
    )
    reference = DeepseekV3MoE(config)
    correction = reference.gate.e_score_correction_bias.normal_(std=0.3)
    experts = Experts(
        num_experts=16,
        top_k=top_k,
        ffn_hidden_size=8,
        score="sigmoid",
        normalized=normalized,
        bias=True,
        num_groups=groups,
        top_groups=top_groups,
        scaling=2.5,
    )
    compare_routing(reference.route_tokens_to_experts, lambda logits: select_experts(logits, experts, correction))


@pytest.mark.parametrize("normalized", [True, False])
def test_routing_of_softmax_scores(normalized: bool) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=16, num_experts=16, num_experts_per_tok=3, norm_topk_prob=normalized, moe_intermediate_size=8
    )
    reference = Qwen3MoeTopKRouter(config)
    torch.nn.init.eye_(reference.weight)  # its logits are then its input
    experts = Experts(num_experts=16, top_k=3, ffn_hidden_size=8, normalized=normalized)
    compare_routing(lambda logits: reference(logits)[:0:-1], lambda logits: select_experts(logits, experts))


def compare_routing(reference: Any, ours: Any) -> None:
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    our_logits, their_logits = (logits.clone().requires_grad_() for _ in range(2))
    indices, weights = reference(their_logits)
    expected = torch.zeros(200, 16).scatter(1, indices, weights)
    routed, selection = ours(our_logits)
    assert torch.equal(selection, torch.zeros(200, 16, dtype=torch.bool).scatter(1, indices, True))
    torch.testing.assert_close(routed, expected)
    direction = torch.randn(200, 16)
    (routed * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(our_logits.grad, their_logits.grad)
