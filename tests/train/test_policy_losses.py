"""Compare every loss with plain loops over lists of floats, and its gradient with central differences of the loops."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms import registry
from penstock.stages.train.algorithms.experience import SegmentReducer, TokenFields
from penstock.stages.train.algorithms.losses import (
    LOSSES,
    KLType,
    custom_loss,
    kl_estimate,
    policy_loss,
    sft_loss,
    value_loss,
)
from penstock.storage.errors import PluginError
from tests.train.ragged import options, sums
from tests.train.test_advantages import naive_kl

KL_TYPES = get_args(KLType)
LENGTHS = [3, 1, 6, 2, 4]
NAMES = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def naive_token_losses(
    new: list[float],  # differentiated
    at: list[float],  # the same numbers, for detached terms
    old: list[float],
    advantages: list[float],
    opts: AlgorithmConfig,
) -> list[float]:
    """Return the policy-gradient losses of the tokens of one sample."""
    name, low, n = opts.policy_loss_name, opts.eps_clip, max(len(new), 1)
    high = low if opts.eps_clip_high is None else opts.eps_clip_high
    sequence = math.exp(sum(x - o for x, o in zip(new, old, strict=True)) / n)
    clipped = [min(x - o, high) if a > 0 else max(x - o, -low) for x, o, a in zip(new, old, advantages, strict=True)]
    losses = []
    for x, fixed, o, a in zip(new, at, old, advantages, strict=True):
        ratio = sequence if name == "gspo" else math.exp(x - o)
        if name == "cispo":
            loss = -clip(math.exp(fixed - o), 1 - low, 1 + high) * a * x
        elif name == "sapo":
            tau = opts.sapo_tau_pos if a > 0 else opts.sapo_tau_neg
            loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
        elif name == "gmpo":
            loss = -a * math.exp(sum(clipped) / n)
        elif name in ("dppo_tv", "dppo_kl"):
            p, q = math.exp(o), math.exp(fixed)
            far = abs(p - q) if name == "dppo_tv" else binary_kl(p, q)
            masked = (q > p and far > high) if a > 0 else (q < p and far > low)
            loss = 0.0 if masked else -min(q / p, opts.eps_clip_c or math.inf) * a * x
        else:
            loss = max(-ratio * a, -clip(ratio, 1 - low, 1 + high) * a)
            if opts.eps_clip_c is not None and a < 0:
                loss = min(loss, -opts.eps_clip_c * a)
        losses.append(loss)
    return losses


def naive_policy_loss(
    new: list[float],  # differentiated
    at: list[float],  # the same numbers, for detached terms
    known: dict[str, list[float]],
    entropy: list[float],
    opts: AlgorithmConfig,
    lengths: list[int] = LENGTHS,
) -> list[float]:
    losses: list[float] = []
    for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
        end = start + length
        old = known["rollout_logprobs"] if opts.use_rollout_logprobs else known["old_logprobs"]
        drift = sum(old[t] - at[t] for t in range(start, end)) / max(length, 1)
        sample = [numbers[start:end] for numbers in (new, at, old, known["advantages"])]
        for t, loss in zip(range(start, end), naive_token_losses(*sample, opts), strict=True):
            if opts.opsm and known["advantages"][t] < 0 and drift > opts.opsm.opsm_delta:
                loss = 0.0
            loss -= opts.entropy_coef * entropy[t]
            if opts.use_kl_loss:
                d = new[t] - known["ref_logprobs"][t]
                importance = math.exp(new[t] - old[t]) if opts.use_unbiased_kl else 1.0
                kl = importance * naive_kl(d, "k3" if opts.kl_loss_type == "low_var_kl" else opts.kl_loss_type)
                loss += opts.kl_loss_coef * (clip(kl, -10, 10) if opts.kl_loss_type == "low_var_kl" else kl)
            losses.append(loss)
    return losses


def made_up(
    seed: int, lengths: list[int] = LENGTHS, spread: float = 0.5
) -> tuple[list[float], dict[str, list[float]], list[float]]:
    rng = random.Random(seed)
    n = sum(lengths)
    new = [min(rng.gauss(-1, 1), -0.01) for _ in range(n)]
    known = {name: [min(x + rng.gauss(0, spread), -0.01) for x in new] for name in NAMES}
    known["advantages"] = [rng.gauss(0, 1) for _ in range(n)]
    return new, known, [rng.random() for _ in range(n)]


def tensors(known: dict[str, list[float]]) -> TokenFields:
    return TokenFields(**{name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in known.items()})


def difference_quotients(
    new: list[float], known: dict[str, list[float]], entropy: list[float], opts: AlgorithmConfig
) -> list[float]:
    """Return central differences of the sum of (1 + t) x loss_t, so that each token has another weight."""

    def total(t: int, step: float) -> float:
        moved = [x + step * (i == t) for i, x in enumerate(new)]
        return sum((1 + i) * x for i, x in enumerate(naive_policy_loss(moved, new, known, entropy, opts)))

    return [(total(t, 1e-6) - total(t, -1e-6)) / 2e-6 for t in range(len(new))]


def policy_inputs(
    new: list[float], known: dict[str, list[float]], entropy: list[float]
) -> tuple[Tensor, Tensor, TokenFields, SegmentReducer]:
    """Return the arguments of `policy_loss` before the options."""
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    return logprobs, torch.tensor(entropy, dtype=torch.float64), tensors(known), sums(LENGTHS)


POLICY_LOSSES: list[Any] = [
    *({"advantage_estimator": name, "eps_clip": 0.1, "eps_clip_high": 0.4} for name in ("grpo", "gspo", "cispo")),
    *({"advantage_estimator": name, "eps_clip_c": 1.4} for name in ("grpo", "gspo")),
    *({"advantage_estimator": name, "opsm": {"opsm_delta": 0.05}} for name in ("grpo", "gspo", "cispo")),
    *({"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "use_unbiased_kl": True} for kind in KL_TYPES),
    {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.01},
    {"use_rollout_logprobs": True, "opsm": {}, "eps_clip_c": 3.0, "entropy_coef": -0.2},
    *({"policy_loss": name, "opsm": {"opsm_delta": 0.05}} for name in registry.POLICY_LOSSES),
    {"policy_loss": "sapo", "sapo_tau_pos": 0.5, "sapo_tau_neg": 3.0},
    {"policy_loss": "gmpo", "eps_clip": 0.4, "eps_clip_high": 0.1, "use_rollout_logprobs": True},
    {"policy_loss": "dppo_tv", "eps_clip": 0.02, "eps_clip_high": 0.1, "use_rollout_logprobs": True},
    {"policy_loss": "dppo_kl", "eps_clip": 0.01, "eps_clip_high": 0.05, "eps_clip_c": 1.3},
]


@pytest.mark.parametrize("variant", POLICY_LOSSES, ids=lambda variant: "-".join(map(str, variant.values())))
def test_every_policy_loss_and_its_gradient_equal_a_plain_loop(variant: dict[str, object]) -> None:
    opts = options(**variant)
    for seed in range(3):
        new, known, entropy = made_up(seed)
        logprobs, *others = policy_inputs(new, known, entropy)
        loss, metrics = policy_loss(logprobs, *others, opts)
        expected = torch.tensor(naive_policy_loss(new, new, known, entropy, opts), dtype=torch.float64)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)
        assert all(values.shape == loss.shape for values in metrics.values())

        weights = torch.arange(1, len(new) + 1, dtype=torch.float64)
        found = torch.autograd.grad((weights * loss).sum(), logprobs)[0]
        slopes = torch.tensor(difference_quotients(new, known, entropy, opts), dtype=torch.float64)
        torch.testing.assert_close(found, slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_clip_fractions_and_ratios_are_reported(name: str) -> None:
    new, known, entropy = made_up(0)
    metrics = policy_loss(*policy_inputs(new, known, entropy), options(policy_loss=name, opsm={}))[1]
    pairs = list(zip(new, known["old_logprobs"], strict=True))
    log_ratio = [n - o for n, o in pairs]
    if name == "gspo":
        means = [sum(part) / len(part) for part in split(log_ratio)]
        log_ratio = [mean for mean, length in zip(means, LENGTHS, strict=True) for _ in range(length)]
    outside = {
        "sapo": [False] * len(new),
        "gmpo": [abs(n - o) > 0.2 for n, o in pairs],
        "dppo_tv": [abs(math.exp(n) - math.exp(o)) > 0.2 for n, o in pairs],
        "dppo_kl": [binary_kl(math.exp(o), math.exp(n)) > 0.2 for n, o in pairs],
    }.get(name, [not 0.8 <= math.exp(x) <= 1.2 for x in log_ratio])
    harmful = [name == "cispo" or (x > 0) == (a > 0) for x, a in zip(log_ratio, known["advantages"], strict=True)]
    clipped = [o and h for o, h in zip(outside, harmful, strict=True)]
    assert metrics["train/pg_clipfrac"].tolist() == [float(c) for c in clipped]
    assert (0 < sum(clipped) < len(clipped)) == (name != "sapo")
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-x for x in log_ratio])
    assert metrics["train/ois"].tolist() == pytest.approx([math.exp(x) for x in log_ratio])
    assert 0 < metrics["train/opsm_clipfrac"].mean() < 1
    gap = [abs(o - r) for o, r in zip(known["old_logprobs"], known["rollout_logprobs"], strict=True)]
    assert metrics["train/train_rollout_logprob_abs_diff"].tolist() == pytest.approx(gap)


def split(numbers: list[float]) -> list[list[float]]:
    starts = list(itertools.accumulate([0, *LENGTHS]))
    return [numbers[a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_without_old_logprobs_the_gradient_is_the_plain_policy_gradient(name: str) -> None:
    new, known, entropy = made_up(0)
    del known["old_logprobs"]
    logprobs, *others = policy_inputs(new, known, entropy)
    loss, metrics = policy_loss(logprobs, *others, options(policy_loss=name))
    expected = -torch.tensor(known["advantages"], dtype=torch.float64)
    if name in ("gspo", "gmpo"):  # every token carries the mean of its sequence
        expected = sums(LENGTHS).mean(expected)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], expected)
    assert not metrics["train/ppo_kl"].any() and not metrics["train/pg_clipfrac"].any()


EVERYTHING = dict(opsm={}, use_tis=True, tis_mode="mask", tis_veto=1e-3, eps_clip_high=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [500.0, -500.0])
@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_extreme_ratios_stay_finite(name: str, gap: float, dtype: torch.dtype) -> None:
    for extra in ({}, EVERYTHING, {"use_tis": True, "tis_level": "sequence"}, {"eps_clip_c": 3.0}):
        for kind in KL_TYPES:
            kl = dict(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=True)
            opts = options(policy_loss=name, **kl, **extra)
            logprobs = torch.full((16,), gap, dtype=dtype, requires_grad=True)
            zeros, advantages = torch.zeros(16, dtype=dtype), torch.linspace(-9, 9, 16, dtype=dtype)
            fields = TokenFields(
                advantages, rollout_logprobs=zeros + gap / 2, old_logprobs=zeros, ref_logprobs=2 * zeros + 2 * gap
            )
            loss, metrics = policy_loss(logprobs, zeros, fields, sums(LENGTHS), opts)
            gradient = torch.autograd.grad(loss.sum(), logprobs)[0]
            assert loss.isfinite().all() and gradient.isfinite().all()
            assert all(values.isfinite().all() for values in metrics.values())


def test_a_probability_that_is_rounded_to_one_does_not_mask_its_token() -> None:
    """float32 rounds the log-prob of a nearly certain token to 0, whose other tokens would have the log-prob -inf."""
    logprobs, old = torch.zeros(2), torch.tensor([math.log(0.9999), 0.0])
    fields = TokenFields(torch.ones(2), rollout_logprobs=old, old_logprobs=old)
    metrics = policy_loss(logprobs, logprobs, fields, sums([2]), options(policy_loss="dppo_kl"))[1]
    assert metrics["train/pg_clipfrac"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "all"])
@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_zero_advantages_give_zero_gradients(name: str, extra: dict[str, object]) -> None:
    new, known, entropy = made_up(0, spread=20.0)
    known["advantages"] = [0.0] * len(new)
    logprobs, *others = policy_inputs(new, known, entropy)
    loss, _ = policy_loss(logprobs, *others, options(policy_loss=name, **extra))
    assert not torch.autograd.grad(loss.sum(), logprobs)[0].any()


def whole(
    opts: AlgorithmConfig, order: list[int], bins: list[list[int]]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return losses and gradients of each sample, computed in the micro-batches `bins` of positions in `order`."""
    new, known, entropy = made_up(4)
    parts = {name: split(numbers) for name, numbers in {**known, "new": new, "entropy": entropy}.items()}
    losses: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for places in bins:
        samples = [order[place] for place in places]
        own = {name: list(itertools.chain(*(part[i] for i in samples))) for name, part in parts.items()}
        logprobs = torch.tensor(own.pop("new"), dtype=torch.float64, requires_grad=True)
        entropies = torch.tensor(own.pop("entropy"), dtype=torch.float64)
        lengths = [LENGTHS[i] for i in samples]
        loss, _ = policy_loss(logprobs, entropies, tensors(own), sums(lengths), opts)
        gradient = torch.autograd.grad((loss * torch.tensor(own["advantages"])).sum(), logprobs)[0]
        losses |= dict(zip(samples, loss.detach().split(lengths), strict=True))
        gradients |= dict(zip(samples, gradient.split(lengths), strict=True))
    return losses, gradients


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_order_and_microbatches_do_not_change_losses_and_gradients(name: str) -> None:
    kl = dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_unbiased_kl=True)
    opts = options(policy_loss=name, entropy_coef=0.01, **EVERYTHING, **kl)
    reference = whole(opts, [0, 1, 2, 3, 4], [[0, 1, 2, 3, 4]])
    for order, bins in (
        ([3, 1, 4, 0, 2], [[0, 1, 2, 3, 4]]),
        ([0, 1, 2, 3, 4], [[0, 3], [1], [2, 4]]),
        ([4, 3, 2, 1, 0], [[2], [0, 1, 4], [3]]),
    ):
        torch.testing.assert_close(whole(opts, order, bins), reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_microbatch_without_trained_tokens_has_a_graph(loss_type: str) -> None:
    logprobs, none = torch.zeros(0, requires_grad=True), torch.zeros(0)
    opts = options(advantage_estimator="gspo", use_kl_loss=True, **EVERYTHING)
    loss, metrics = LOSSES[loss_type](logprobs, none, TokenFields(none, none, none, none), sums([0, 0]), opts)
    loss.sum().backward()
    assert logprobs.grad is not None and loss.shape == (0,) and all(values.shape == (0,) for values in metrics.values())


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_is_zero_for_equal_policies_and_low_var_is_bounded(kind: KLType) -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(100, dtype=torch.float64) * 4, torch.randn(100, dtype=torch.float64) * 4
    expected = [naive_kl(p - r, kind) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert kl_estimate(policy, reference, kind).tolist() == pytest.approx(expected, rel=1e-12)
    assert (10.0 in expected) == (kind == "low_var_kl")
    assert not kl_estimate(policy, policy, kind).any()


def test_gradient_of_the_unbiased_kl_equals_that_of_the_kl() -> None:
    """Uses exact expectations over a vocabulary of five, sampled by an older policy."""
    torch.manual_seed(0)
    logits, older, reference = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    policy, old, ref = (x.log_softmax(0) for x in (logits, older, reference))
    true = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    unbiased = (old.exp() * kl_estimate(policy, ref, "k3", (policy - old).exp())).sum()
    torch.testing.assert_close(torch.autograd.grad(unbiased, logits, retain_graph=True)[0], true)
    biased = (old.exp() * kl_estimate(policy, ref, "k3")).sum()
    assert (torch.autograd.grad(biased, logits)[0] - true).abs().max() > 0.01


def test_value_loss_and_its_gradient_equal_a_plain_loop() -> None:
    rng = random.Random(0)
    new, old, target = ([rng.gauss(0, 1) for _ in range(60)] for _ in range(3))
    expected, slopes, clipped = [], [], []
    for v, o, r in zip(new, old, target, strict=True):
        near = o + clip(v - o, -0.5, 0.5)
        expected.append(max((v - r) ** 2, (near - r) ** 2))
        slopes.append(2 * (v - r) if (v - r) ** 2 >= (near - r) ** 2 else 0.0)
        clipped.append(float(abs(v - o) > 0.5))
    values = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(60)
    fields = TokenFields(
        none, none, returns=torch.tensor(target, dtype=torch.float64), values=torch.tensor(old, dtype=torch.float64)
    )
    loss, metrics = value_loss(values, fields, options(value_clip=0.5))
    assert loss.tolist() == pytest.approx(expected, rel=1e-12) and metrics["train/value_clipfrac"].tolist() == clipped
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == pytest.approx(slopes, rel=1e-12)
    assert 0.0 in slopes and 0 < sum(clipped) < 60


def test_sft_loss_is_the_negative_logprob_and_tells_the_probability_of_a_sample() -> None:
    logprobs = torch.tensor([0.5, 0.8, 0.25], dtype=torch.float64).log()
    loss, metrics = sft_loss(logprobs, logprobs, TokenFields(logprobs, logprobs), sums([2, 1]), options())
    assert loss.tolist() == (-logprobs).tolist()
    assert metrics["train/sample_prob"].tolist() == pytest.approx([0.4, 0.4, 0.25], rel=1e-12)


def test_user_defined_loss(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def loss(logprobs, entropy, fields, samples, options):\n"
        "    kept = -samples.mean(logprobs) * fields.advantages\n"
        "    return kept, {'kept': kept, 'rollout/twice': 2 * entropy}\n\n"
        "def scalar(logprobs, entropy, fields, samples, options):\n"
        "    return logprobs.sum(), {}\n"
    )
    logprobs = torch.tensor([-1.0, -3.0, -5.0])
    fields = TokenFields(torch.tensor([1.0, 2.0, 3.0]), logprobs)
    opts = options(custom_loss_function_path=str(mine))
    loss, metrics = custom_loss(logprobs, logprobs, fields, sums([2, 1]), opts)
    assert loss.tolist() == [2.0, 4.0, 15.0] and list(metrics) == ["train/kept", "rollout/twice"]
    opts = options(custom_loss_function_path=f"{mine}:scalar")
    with pytest.raises(PluginError, match=f"{mine}:scalar"):
        custom_loss(logprobs, logprobs, fields, sums([2, 1]), opts)
