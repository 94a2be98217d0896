"""Weights of tokens in the loss, and sums over the tokens of a sample on one rank and on two."""

from __future__ import annotations

import itertools
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.stages.train.algorithms.experience import SegmentReducer
from penstock.stages.train.algorithms.losses import (
    per_sample_weights,
    per_token_weights,
    policy_loss,
)
from penstock.stages.train.batching import Batch
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import compute_loss_weights
from penstock.storage.samples.sample import Sample, to_table
from tests.train.ragged import options, sums
from tests.train.test_policy_losses import made_up, tensors

LENGTHS = [3, 1, 6, 0, 2, 4]


def test_per_sample_weights_equal_a_loop_over_trajectories() -> None:
    trajectories = torch.tensor([0, 0, 0, 2, 2, 4, 0, 4])  # 1 and 3 are fully masked; 0 has a sibling at the end
    losses = torch.arange(8, dtype=torch.float64) + 1
    means = [losses[trajectories == t].mean().item() for t in (0, 2, 4)]
    assert (per_sample_weights(trajectories, 5) * losses).sum().item() == pytest.approx(statistics.fmean(means))
    assert (per_token_weights(trajectories, 5) * losses).sum().item() == pytest.approx(losses.mean().item())
    assert per_sample_weights(trajectories[:0], 5).numel() == per_token_weights(trajectories[:0], 5).numel() == 0


# sample -> prompt, trajectory and number of trained tokens; the steps are the trajectories 0 and 1, then 2 and 3
ROWS = [(0, 0, 3), (0, 0, 1), (0, 1, 2), (1, 2, 5), (1, 3, 0), (1, 2, 4)]


def batch_of_rows() -> Batch:
    made = [
        Sample(
            *(f"s{i}", f"g{prompt}", f"t{trajectory}", 0),
            token_ids=[5] * (1 + length),
            loss_mask=[0] + [1] * length,
            rollout_logprobs=[0.0] * (1 + length),
            reward=1.0,
        )
        for i, (prompt, trajectory, length) in enumerate(ROWS)
    ]
    return Batch.from_table(to_table(made), needs_rewards=True)


@pytest.mark.parametrize(
    ("options", "weights", "pg_weights"),
    [
        ({}, [1 / 8] * 4 + [1 / 4] * 2 + [1 / 9] * 9, None),
        ({"calculate_per_token_loss": True}, [1 / 6] * 6 + [1 / 9] * 9, None),
        ({"global_batch_size": 4, "calculate_per_prompt_loss": True}, [1 / 12] * 6 + [1 / 18] * 9, None),
        ({"loss_denominator": 10}, [1 / 8] * 4 + [1 / 4] * 2 + [1 / 9] * 9, [1 / 20] * 6 + [1 / 10] * 9),
        (
            {"global_batch_size": 4, "loss_denominator": 10},
            [1 / 12] * 4 + [1 / 6] * 2 + [1 / 27] * 9,
            [1 / 30] * 15,
        ),
    ],
)
def test_weights_of_each_normalization(
    options: dict[str, Any], weights: list[float], pg_weights: list[float] | None
) -> None:
    """Trajectory 3 has no trained tokens, so it does not count."""
    found = compute_loss_weights(batch_of_rows(), TrainConfig(**{"global_batch_size": 2} | options))
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-12)
    assert (found.pg_scale is None) == (pg_weights is None)
    if found.pg_scale is not None:
        assert (found.weights * found.pg_scale).tolist() == pytest.approx(pg_weights, rel=1e-12)


def test_segment_sums_and_means_equal_a_plain_loop() -> None:
    numbers = [[random.Random(i * 100 + t).gauss(0, 1) for t in range(length)] for i, length in enumerate(LENGTHS)]
    values = torch.tensor(list(itertools.chain(*numbers)), requires_grad=True)
    samples = sums(LENGTHS)
    assert samples.total(values).tolist() == pytest.approx([sum(mine) for mine in numbers], abs=1e-6)
    means = [sum(mine) / len(mine) for mine in numbers for _ in mine]
    assert (
        samples.mean(values).tolist() == pytest.approx(means, abs=1e-6) and samples.mean(values).dtype == values.dtype
    )
    (samples.mean(values) * torch.arange(16)).sum().backward()
    starts = list(itertools.accumulate([0, *LENGTHS]))
    slopes = [sum(range(a, b)) / (b - a) for a, b in itertools.pairwise(starts) for _ in range(a, b)]
    assert values.grad is not None and values.grad.tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo"])
def test_samples_split_over_two_ranks_give_the_same_losses_and_gradients(name: str) -> None:
    """Two threads with a gloo group: some samples are on one rank, some on both; one rank may have no tokens."""
    new, known, entropy = made_up(5, LENGTHS)
    opts = options(policy_loss=name, opsm={"opsm_delta": -0.1}, use_tis=True, tis_level="geometric", tis_veto=0.3)
    weights = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(tokens: torch.Tensor, samples: SegmentReducer) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.tensor(new, dtype=torch.float64)[tokens].requires_grad_()
        fields = tensors({field: [numbers[t] for t in tokens.tolist()] for field, numbers in known.items()})
        loss, _ = policy_loss(logprobs, torch.tensor(entropy)[tokens], fields, samples, opts)
        return loss.detach(), torch.autograd.grad((loss * weights[tokens]).sum(), logprobs)[0]

    def rank(number: int, tokens: torch.Tensor, store: dist.Store) -> tuple[torch.Tensor, torch.Tensor]:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        return run(tokens, SegmentReducer(whole.index[tokens], whole.num_tokens, group))

    whole = sums(LENGTHS)
    expected = run(torch.arange(16), whole)
    for here in ([0, 2, 3, 4, 7, 15], [], [1, 9, 10]):
        first = torch.tensor(here, dtype=torch.long)
        second = torch.tensor([t for t in range(16) if t not in here])
        with ThreadPoolExecutor(2) as threads:
            shares = list(threads.map(rank, (0, 1), (first, second), [dist.HashStore()] * 2))
        place = torch.cat([first, second]).argsort()
        for found, right in zip(zip(*shares, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(found)[place], right, rtol=1e-12, atol=1e-12)
