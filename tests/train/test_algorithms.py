"""Every formula against a loop that a reader can check by hand, in float64."""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from stages.train.algorithms.advantages import grpo_advantages
from stages.train.algorithms.kl import KL_TYPES, kl_estimate
from stages.train.algorithms.logprobs import token_logprobs
from stages.train.algorithms.objectives import TokenStreams, policy_objective, sft_objective
from stages.train.algorithms.policy_loss import clipped_surrogate
from stages.train.algorithms.reductions import per_sample_weights, per_token_weights


def naive_grpo(rewards: list[float], groups: list[int], normalize_std: bool) -> list[float]:
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(members) < 2:
            advantages.append(0.0)
            continue
        centered = reward - statistics.fmean(members)
        advantages.append(centered / (statistics.stdev(members) + 1e-6) if normalize_std else centered)
    return advantages


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_equals_the_loop_for_uneven_and_mixed_groups(normalize_std: bool) -> None:
    rng = random.Random(0)
    groups = [rng.randrange(7) for _ in range(40)] + [7]  # uneven, interleaved, and one singleton
    rewards = [rng.choice([0.0, 1.0, 0.3, math.nan]) for _ in groups]
    found = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), normalize_std=normalize_std)
    torch.testing.assert_close(found, torch.tensor(naive_grpo(rewards, groups, normalize_std)), atol=1e-6, rtol=1e-6)
    assert found[-1] == 0.0


def test_equal_rewards_give_no_advantage_even_when_not_binary() -> None:
    rewards = torch.full((8,), 0.9, dtype=torch.float64)
    assert grpo_advantages(rewards, torch.zeros(8, dtype=torch.long)).abs().max() < 1e-8


def test_clipped_surrogate_equals_the_loop_and_is_asymmetric() -> None:
    torch.manual_seed(0)
    new, old, advantages = (torch.randn(200, dtype=torch.float64) for _ in range(3))
    loss, clipped = clipped_surrogate(new, old, advantages, clip_low=0.2, clip_high=0.28)
    for n, o, a, found, was_clipped in zip(
        new.tolist(), old.tolist(), advantages.tolist(), loss.tolist(), clipped.tolist(), strict=True
    ):
        ratio = math.exp(n - o)
        plain, bounded = -ratio * a, -min(max(ratio, 0.8), 1.28) * a
        assert found == pytest.approx(max(plain, bounded), rel=1e-12)
        assert was_clipped == float(bounded > plain)
    assert 0 < clipped.mean() < 1


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_equals_its_formula_and_is_zero_for_equal_policies(kind: str) -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(100, dtype=torch.float64) * 4, torch.randn(100, dtype=torch.float64) * 4
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
        "low_var_kl": lambda d: max(-10.0, min(10.0, math.exp(-d) - 1 + d)),
    }[kind]
    expected = torch.tensor(
        [formula(p - r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)], dtype=torch.float64
    )
    torch.testing.assert_close(kl_estimate(policy, reference, kind), expected)
    assert (expected.abs() == 10.0).any() == (kind == "low_var_kl")
    assert torch.equal(kl_estimate(policy, policy, kind), torch.zeros(100, dtype=torch.float64))


def test_per_sample_weights_equal_the_loop_over_trajectories() -> None:
    trajectories = torch.tensor([0, 0, 0, 2, 2, 4, 0, 4])  # 1 and 3 are fully masked; 0 has a sibling at the end
    losses = torch.arange(8, dtype=torch.float64) + 1
    means = [losses[trajectories == t].mean().item() for t in (0, 2, 4)]
    assert (per_sample_weights(trajectories, 5) * losses).sum().item() == pytest.approx(statistics.fmean(means))
    assert (per_token_weights(trajectories, 5) * losses).sum().item() == pytest.approx(losses.mean().item())
    assert per_sample_weights(trajectories[:0], 5).numel() == per_token_weights(trajectories[:0], 5).numel() == 0


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunked_logprobs_and_gradients_equal_log_softmax(chunk_size: int) -> None:
    torch.manual_seed(0)
    temperature = 0.7
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(6, 17, bias=False, dtype=torch.float64)
    targets = torch.randint(17, (10,))
    upstream, entropy_upstream = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)

    log_p = (head(hidden) / temperature).log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    expected_grads = torch.autograd.grad((expected[0] * upstream + expected[1] * entropy_upstream).sum(), (hidden, head.weight))

    found = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size, entropy_gradient=True)
    found_grads = torch.autograd.grad((found[0] * upstream + found[1] * entropy_upstream).sum(), (hidden, head.weight))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grads, expected_grads)

    log_probs, entropy = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size)
    assert not entropy.requires_grad  # without an entropy bonus nothing is kept for it
    torch.testing.assert_close(
        torch.autograd.grad((log_probs * upstream).sum(), hidden)[0],
        torch.autograd.grad(
            ((head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0] * upstream).sum(), hidden
        )[0],
    )


def test_logprobs_of_no_tokens_still_reach_every_parameter() -> None:
    hidden, head = torch.randn(0, 6, requires_grad=True), torch.nn.Linear(6, 17)
    logprobs, _ = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


def options(**changed: object) -> SimpleNamespace:
    base = dict(eps_clip=0.2, eps_clip_high=None, use_kl_loss=False, kl_loss_coef=0.0, kl_loss_type="k3", entropy_coef=0.0)
    return SimpleNamespace(**(base | changed))


def test_without_old_logprobs_the_gradient_is_plain_policy_gradient() -> None:
    torch.manual_seed(0)
    logprobs = torch.randn(9, dtype=torch.float64, requires_grad=True)
    streams = TokenStreams(advantages=torch.randn(9, dtype=torch.float64), rollout_logprobs=logprobs.detach() + 0.5)
    loss, metrics = policy_objective(options())(logprobs, torch.zeros(9), streams)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], -streams.advantages)
    torch.testing.assert_close(
        metrics["train/train_rollout_logprob_abs_diff"].detach(), torch.full((9,), 0.5, dtype=torch.float64)
    )
    assert not metrics["train/ppo_kl"].any() and not metrics["train/pg_clipfrac"].any()


def test_objective_adds_entropy_and_kl_with_their_coefficients() -> None:
    torch.manual_seed(0)
    logprobs, old, reference, advantages, entropy = (torch.randn(9, dtype=torch.float64) for _ in range(5))
    streams = TokenStreams(advantages=advantages, rollout_logprobs=old, old_logprobs=old, ref_logprobs=reference)
    found, _ = policy_objective(options(eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.01))(
        logprobs, entropy, streams
    )
    surrogate, _ = clipped_surrogate(logprobs, old, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(found, surrogate - 0.01 * entropy + 0.3 * kl_estimate(logprobs, reference, "k3"))
    torch.testing.assert_close(sft_objective(options())(logprobs, entropy, streams)[0], -logprobs)
