"""Compare divergences over the vocabulary with plain loops in float64, on one rank and split over two."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.stages.train.algorithms.divergences import (
    DIVERGENCE_TERMS,
    TeacherHidden,
    TeacherTopK,
    top_k,
    vocabulary_divergence,
)

V, TEMPERATURE = 12, 0.7
NAMES = list(DIVERGENCE_TERMS)


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp((x - max(logits)) / TEMPERATURE) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def naive(name: str, p: list[float], q: list[float], beta: float) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    if name == "forward_kl":
        return kl(q, p)
    if name == "reverse_kl":
        return kl(p, q)
    m = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def buckets(probs: list[float], ids: list[int]) -> list[float]:
    return [probs[i] for i in ids] + [math.fsum(x for i, x in enumerate(probs) if i not in ids)]


def logits(seed: int, rows: int = 5) -> Tensor:
    return 3 * torch.randn(rows, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full(teacher: Tensor) -> TeacherHidden:
    return TeacherHidden(teacher, [lambda hidden: hidden], torch.zeros(len(teacher), dtype=torch.long))


def divergence(name: str, of: Tensor, teacher: Any, beta: float = 0.5, group: Any = None) -> Tensor:
    row = partial(DIVERGENCE_TERMS[name], beta=beta)
    return vocabulary_divergence(of, torch.arange(len(of)), teacher, row, TEMPERATURE, group)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_divergence_equals_the_loop_over_all_tokens(name: str, beta: float) -> None:
    policy, teacher = logits(0), logits(1)
    found = divergence(name, policy, full(teacher), beta)
    rows = zip(policy.tolist(), teacher.tolist(), strict=True)
    expected = torch.tensor([naive(name, softmax(p), softmax(q), beta) for p, q in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4, V - 1])
@pytest.mark.parametrize("name", NAMES)
def test_top_k_divergence_equals_the_loop_over_k_tokens_and_their_rest(name: str, k: int) -> None:
    policy, teacher = logits(2), logits(3)
    of_teacher = top_k(teacher, k, TEMPERATURE, None)
    expected = []
    for p, q in zip(policy.tolist(), teacher.tolist(), strict=True):
        ids = sorted(range(V), key=lambda i: -q[i])[:k]
        expected.append(naive(name, buckets(softmax(p), ids), buckets(softmax(q), ids), 0.3))
    found = divergence(name, policy, of_teacher, 0.3)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    stored = TeacherTopK.from_logprobs(of_teacher.ids, of_teacher.logprobs[:, :-1])
    torch.testing.assert_close(stored.logprobs, of_teacher.logprobs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_central_differences(name: str, k: int | None) -> None:
    policy, teacher = logits(4), logits(5)
    of_teacher = full(teacher) if k is None else top_k(teacher, k, TEMPERATURE, None)
    upstream = torch.linspace(-1, 2, len(policy), dtype=torch.float64)
    leaf = policy.clone().requires_grad_()
    [found] = torch.autograd.grad((divergence(name, leaf, of_teacher, 0.3) * upstream).sum(), leaf)
    step = 1e-5
    for row in range(len(policy)):
        for column in range(V):
            change = torch.zeros_like(policy)
            change[row, column] = step
            above, below = (divergence(name, policy + sign * change, of_teacher, 0.3)[row] for sign in (1, -1))
            expected = upstream[row] * (above - below) / (2 * step)
            assert abs(found[row, column] - expected) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_distributions_give_finite_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Certain and opposite distributions, the padding of the vocabulary, a tail of probability 0."""
    certain, opposite = torch.zeros(4, V, dtype=dtype), torch.zeros(4, V, dtype=dtype)
    certain[:, 0], opposite[:, 1] = 1000.0, 1000.0
    certain[:, -2:] = opposite[:, -2:] = -1e30
    for teacher in (certain, opposite):
        known = torch.tensor([[0.0, -math.inf if name == "forward_kl" else -1000.0]] * 4, dtype=dtype)
        of_engine = TeacherTopK.from_logprobs(torch.tensor([[0, 1]] * 4), known.clamp(min=-1000.0))
        for of in (full(teacher), top_k(teacher, 1, 1.0, None), top_k(teacher, V, 1.0, None), of_engine):
            leaf = certain.clone().requires_grad_()
            value = divergence(name, leaf, of)
            [gradient] = torch.autograd.grad(value.sum(), leaf)
            assert value.isfinite().all() and gradient.isfinite().all()
            assert (value > -1e-6).all()
    assert divergence(name, certain, full(certain)).abs().max() == 0


def test_each_position_is_compared_with_its_teacher() -> None:
    policy, teachers, index = logits(6), [logits(7), logits(8)], torch.tensor([0, 1, 1, 0, 1])
    hidden = torch.where(index[:, None] == 0, teachers[0], teachers[1])
    heads = [lambda x: x, lambda x: 2 * x]
    found = divergence("forward_kl", policy, TeacherHidden(hidden, heads, index))
    alone = [divergence("forward_kl", policy, full((1 + i) * teacher)) for i, teacher in enumerate(teachers)]
    torch.testing.assert_close(found, torch.where(index == 0, *alone), rtol=0, atol=1e-12)


def test_two_ranks_with_half_of_the_vocabulary_each_equal_one() -> None:
    policy, teacher, half = logits(11), logits(12), V // 2

    def rank(number: int, store: dist.Store) -> list[Tensor]:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        own = slice(number * half, (number + 1) * half)
        return results(policy[:, own], teacher[:, own], group)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(rank, (0, 1), [dist.HashStore()] * 2))
    for whole, left, right in zip(results(policy, teacher, None), *ranks, strict=True):
        both = torch.cat([left, right], -1) if whole.shape[-1] == V else left
        torch.testing.assert_close(both, whole, rtol=0, atol=1e-12)


def results(policy: Tensor, teacher: Tensor, group: Any) -> list[Tensor]:
    """Return values and gradients of all divergences, over the whole vocabulary and over 3 tokens."""
    found = []
    for of in (full(teacher), top_k(teacher, 3, TEMPERATURE, group)):
        for name in NAMES:
            leaf = policy.clone().requires_grad_()
            value = divergence(name, leaf, of, 0.3, group=group)
            found += [value.detach(), *torch.autograd.grad(value.sum(), leaf)]
    return found
