"""Compare every estimator with plain loops over lists of floats."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.advantages import discounted_cumsum, estimate_advantages, whiten
from penstock.stages.train.algorithms.experience import Experience
from penstock.stages.train.algorithms.registry import ESTIMATORS
from penstock.storage.errors import RunError
from tests.train.ragged import FIELDS, Sample, experience, options, ragged

Numbers = list[list[float]]  # per sample, per trained token


def naive_kl(d: float, kind: str) -> float:
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": max(-10.0, min(10.0, k3))}[kind]


def naive_gdpo(samples: list[Sample], opts: AlgorithmConfig) -> list[float]:
    """Return the whitened sum of the weighted components; each is normalized as the reward of GRPO."""
    as_grpo, sums = options(disable_grpo_std_normalization=opts.disable_grpo_std_normalization), [0.0] * len(samples)
    for name, weight in opts.gdpo_reward_weights.items():
        alone = [replace(sample, reward=sample.components[name]) for sample in samples]
        sums = [total + weight * part for total, part in zip(sums, naive_rewards(alone, as_grpo), strict=True)]
    graded = [total for total, sample in zip(sums, samples, strict=True) if not math.isnan(sample.reward)]
    mean, variance = statistics.fmean(graded), statistics.variance(graded)
    return [(total - mean) / math.sqrt(variance + 1e-8) for total in sums]


def naive_rewards(samples: list[Sample], opts: AlgorithmConfig) -> list[float]:
    name, rewards = opts.advantage_estimator, []
    if name == "gdpo":
        return naive_gdpo(samples, opts)
    for i, sample in enumerate(samples):
        others = [
            s.reward for j, s in enumerate(samples) if j != i and s.group == sample.group and not math.isnan(s.reward)
        ]
        if name in ("ppo", "reinforce_plus_plus") or opts.disable_rewards_normalization:
            rewards.append(sample.reward)
        elif math.isnan(sample.reward) or not others or all(r == sample.reward for r in others):
            rewards.append(0.0)
        elif name == "rloo":
            rewards.append(sample.reward - statistics.fmean(others))
        else:
            group = [sample.reward, *others]
            centered = sample.reward - statistics.fmean(group)
            if name == "maxrl":
                centered /= statistics.fmean(group) + 1e-6
            with_std = name not in ("reinforce_plus_plus_baseline", "maxrl") and not opts.disable_grpo_std_normalization
            rewards.append(centered / (statistics.stdev(group) + 1e-6) if with_std else centered)
    return rewards


def naive_advantages(samples: list[Sample], opts: AlgorithmConfig) -> tuple[Numbers, Numbers | None]:
    advantages: Numbers = []
    returns: Numbers = []
    name = opts.advantage_estimator
    for sample, reward in zip(samples, naive_rewards(samples, opts), strict=True):
        s, length = sample.fields, sample.length
        policy = s["rollout_logprobs"] if opts.use_rollout_logprobs else s["old_logprobs"]
        penalty = [
            opts.kl_coef * naive_kl(p - r, opts.kl_loss_type) if opts.kl_coef else 0.0
            for p, r in zip(policy, s["ref_logprobs"], strict=True)
        ]
        mine = [reward] * length
        if name == "reinforce_plus_plus_baseline":
            mine = [reward - p for p in penalty]
        if name in ("ppo", "reinforce_plus_plus"):
            rewards = [-p + (reward if t == length - 1 else 0.0) for t, p in enumerate(penalty)]
            values = s["values"] if name == "ppo" else [0.0] * length
            decay = opts.gamma * opts.lambd if name == "ppo" else opts.gamma
            running = 0.0
            for t in reversed(range(length)):
                after = values[t + 1] if t + 1 < length else 0.0
                running = rewards[t] + opts.gamma * after - values[t] + decay * running
                mine[t] = running
            returns.append([a + v for a, v in zip(mine, values, strict=True)])
        if opts.opd:
            gaps = [p - t for p, t in zip(policy, s["teacher_logprobs"], strict=True)]
            mine = [a - opts.opd.opd_kl_coef * gap for a, gap in zip(mine, gaps, strict=True)]
        advantages.append(mine)
    if opts.normalize_advantages:
        everything = list(itertools.chain(*advantages))
        mean, variance = statistics.fmean(everything), statistics.variance(everything)
        advantages = [[(a - mean) / math.sqrt(variance + 1e-8) for a in mine] for mine in advantages]
    return advantages, returns if name == "ppo" else None


VARIANTS: list[Any] = [
    {},
    {"disable_grpo_std_normalization": True},
    {"disable_rewards_normalization": True},
    {"gamma": 0.9, "lambd": 0.95},
    {"gamma": 0.0},
    *({"kl_coef": 0.3, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")),
    {"kl_coef": 0.1, "use_rollout_logprobs": True, "opd": {"opd_kl_coef": 0.5, "hinted": {}}},
    {"opd": {"hinted": {}}, "normalize_advantages": True, "kl_coef": 0.2, "gamma": 0.99, "lambd": 0.9},
]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_equals_a_plain_loop(name: str) -> None:
    for seed, variant in enumerate(VARIANTS):
        samples = ragged(seed, lowest=0.5 if name == "maxrl" else -2.5)
        opts = options(advantage_estimator=name, gdpo_reward_weights={"right": 1.0, "short": -0.25}, **variant)
        found = estimate_advantages(experience(samples), opts)
        advantages, returns = naive_advantages(samples, opts)
        expected = torch.tensor(list(itertools.chain(*advantages)), dtype=torch.float64)
        torch.testing.assert_close(found.advantages, expected, rtol=1e-12, atol=1e-12)
        assert (found.returns is None) == (returns is None)
        if returns is not None:
            expected = torch.tensor(list(itertools.chain(*returns)), dtype=torch.float64)
            torch.testing.assert_close(found.returns, expected, rtol=1e-12, atol=1e-12)
        assert all(values.shape == expected.shape for values in found.metrics.values())
        assert ("rollout/kl" in found.metrics) == bool(opts.kl_coef)
        assert ("rollout/opd_reverse_kl" in found.metrics) == (opts.opd is not None)


@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if row.group_relative])
def test_equal_rewards_and_single_samples_give_exactly_zero(name: str) -> None:
    opts = options(
        advantage_estimator=name, gdpo_reward_weights={"right": 0.3, "short": 0.7}, normalize_advantages=True
    )
    for reward in (0.9, 0.1, 1e6 + 0.3, 0.0 if name == "maxrl" else -7.7):
        groups, components = (0,) * 8 + (1,) * 3 + (2,), {"right": reward, "short": reward / 3}
        samples = [Sample(group, reward, {field: [0.5] for field in FIELDS}, components) for group in groups]
        assert not estimate_advantages(experience(samples), opts).advantages.any()
    none = torch.zeros(0)
    nothing = torch.tensor([math.nan] * 2)
    parts = {"right": nothing, "short": nothing}
    ungraded = Experience(none.long(), nothing, torch.zeros(2).long(), none, reward_components=parts)
    assert estimate_advantages(ungraded, opts).advantages.shape == (0,)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline"])
def test_a_baseline_over_trajectories_is_that_of_one_sample_per_trajectory(name: str) -> None:
    """Trajectories of one to three samples, with unequal rewards and some that are not graded, against a plain loop."""
    opts = options(advantage_estimator=name, baseline_over_trajectories=True)
    for seed in range(4):
        samples, rng = ragged(seed, lowest=0.5 if name == "maxrl" else -2.5), random.Random(seed)
        members: dict[tuple[int, int], list[int]] = {}
        for i, sample in enumerate(samples):
            members.setdefault((sample.group, rng.randrange(3)), []).append(i)
        whole = []
        for (group, _), rows in members.items():
            graded = [samples[i] for i in rows if not math.isnan(samples[i].reward)] or [samples[rows[0]]]
            whole.append(Sample(group, statistics.fmean(s.reward for s in graded), samples[rows[0]].fields))
        of_trajectory = dict(zip(members, naive_rewards(whole, opts), strict=True))
        of_sample = {i: of_trajectory[key] for key, own in members.items() for i in own}
        rollout = experience(samples)
        numbers = {i: number for number, rows in enumerate(members.values()) for i in rows}
        rollout.trajectory_index = torch.tensor([numbers[i] for i in range(len(samples))])
        found = estimate_advantages(rollout, opts).advantages
        rows = [i for i, sample in enumerate(samples) for _ in range(sample.length)]
        expected = torch.tensor([of_sample[i] for i in rows], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        rollout.trajectory_index = torch.arange(len(samples))
        samplewise = estimate_advantages(experience(samples), options(advantage_estimator=name))
        assert torch.equal(estimate_advantages(rollout, opts).advantages, samplewise.advantages)
        assert not torch.equal(found, samplewise.advantages)


def test_trajectories_with_equal_rewards_get_exactly_zero() -> None:
    samples = [Sample(0, 0.9, {field: [0.5] for field in FIELDS}) for _ in range(7)]
    rollout = experience(samples)
    rollout.trajectory_index = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    opts = options(baseline_over_trajectories=True)
    assert not estimate_advantages(rollout, opts).advantages.any()


def test_maxrl_refuses_negative_rewards_and_weights_rare_successes_most() -> None:
    with pytest.raises(RunError, match=r"the reward -2.5, but --advantage-estimator maxrl"):
        estimate_advantages(experience(ragged(0)), options(advantage_estimator="maxrl"))
    samples = [Sample(0, float(i == 0), {field: [0.5] for field in FIELDS}) for i in range(8)]
    found = estimate_advantages(experience(samples), options(advantage_estimator="maxrl")).advantages
    assert found.tolist() == pytest.approx([7.0] + [-1.0] * 7, rel=1e-5)


def test_gdpo_keeps_components_apart_whose_sum_is_equal() -> None:
    """The sums 2 + 0 and 0 + 2 are equal, so grpo has no signal, but the first component has the larger weight."""
    parts = [{"right": 2.0, "short": 0.0}, {"right": 0.0, "short": 2.0}]
    samples = [Sample(0, 2.0, {field: [0.5] for field in FIELDS}, part) for part in parts]
    opts = options(advantage_estimator="gdpo", gdpo_reward_weights={"right": 2.0, "short": 1.0})
    found = estimate_advantages(experience(samples), opts).advantages
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert not estimate_advantages(experience(samples), options()).advantages.any()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.97, 1.0])
def test_discounted_cumsum_equals_a_plain_loop_for_any_lengths(decay: float) -> None:
    for lengths in ([1], [2], [3, 1, 4], [17, 1, 64, 33, 2], [257], []):
        numbers = [[random.Random(i * 1000 + t).gauss(0, 1) for t in range(length)] for i, length in enumerate(lengths)]
        expected = [sum(decay**k * x for k, x in enumerate(mine[t:])) for mine in numbers for t in range(len(mine))]
        index = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
        found = discounted_cumsum(torch.tensor(list(itertools.chain(*numbers)), dtype=torch.float64), index, decay)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_whitening_of_few_or_equal_advantages() -> None:
    assert whiten(torch.zeros(0)).shape == (0,)
    assert not whiten(torch.tensor([3.3])).any()
    assert not whiten(torch.full((9,), 0.9, dtype=torch.float64)).any()
    found = whiten(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    assert found.mean().item() == pytest.approx(0, abs=1e-12) and found.var().item() == pytest.approx(1, abs=1e-7)


def test_user_defined_estimator_replaces_the_built_in_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def advantages(experience, options):\n"
        "    return experience.rewards[experience.sample_index] * options.gamma\n\n"
        "def short(experience, options):\n"
        "    return experience.rewards\n"
    )
    samples = ragged(3)
    found = estimate_advantages(
        experience(samples),
        options(custom_advantage_function_path=str(mine), gamma=0.5, opd={"opd_kl_coef": 0.0, "hinted": {}}),
    )
    assert found.advantages.tolist() == [sample.reward * 0.5 for sample in samples for _ in range(sample.length)]
    assert "rollout/opd_reverse_kl" in found.metrics  # what follows the estimator still follows
    with pytest.raises(ValueError, match=f"{mine}:short"):
        estimate_advantages(experience(samples), options(custom_advantage_function_path=f"{mine}:short"))
    with pytest.raises(ValueError, match="ppo"):
        estimate_advantages(
            experience(samples), options(custom_advantage_function_path=str(mine), advantage_estimator="ppo")
        )
