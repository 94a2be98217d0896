"""Plans and packs: nothing lost, nothing doubled, and the same sum however the samples are spread."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stages.train.batching import Batch, Grid, optimizer_steps, pack, plan_microbatches, zigzag_positions
from storage.sample import Sample, to_table


def samples(count: int, seed: int = 0, siblings: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt, response = rng.randrange(1, 6), rng.randrange(0, 9)
        length = prompt + response
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(response)]
        made.append(
            Sample(
                sample_id=f"s{i}",
                group_id=f"g{i // 4}",
                trajectory_id=f"t{i // siblings}",
                rollout_id=0,
                token_ids=[rng.randrange(50) for _ in range(length)],
                loss_mask=mask,
                rollout_logprobs=[-rng.random() * m for m in mask],
                reward=None if i % 7 == 6 else rng.random(),
            )
        )
    return made


def test_batch_holds_what_the_samples_hold() -> None:
    rows = samples(30)
    table = to_table([*samples(3, seed=9), *rows]).slice(3)  # a slice: offsets do not begin at zero
    batch = Batch.from_table(table, graded=True)
    for i, row in enumerate(rows):
        part = slice(batch.offsets[i], batch.offsets[i + 1])
        assert batch.token_ids[part].tolist() == row.token_ids
        expected = [0] * len(row.token_ids) if row.reward is None else row.loss_mask
        assert batch.loss_mask[part].astype(int).tolist() == expected
        assert batch.num_trained[i] == sum(expected)
        assert (row.reward is None) == np.isnan(batch.rewards[i])
    assert batch.group_index.tolist() == [i // 4 for i in range(30)]


def test_the_first_token_of_a_sample_is_never_trained() -> None:
    row = Sample("s", "g", "t", 0, token_ids=[5, 6], loss_mask=[1, 1], rollout_logprobs=[0.0, 0.0])
    assert Batch.from_table(to_table([row, row]), graded=False).num_trained.tolist() == [1, 1]


def test_optimizer_steps_keep_siblings_together_and_refuse_a_remainder() -> None:
    trajectories = np.array([0, 1, 0, 2, 3, 3, 1])
    assert [step.tolist() for step in optimizer_steps(trajectories, 2)] == [[0, 1, 2, 6], [3, 4, 5]]
    with pytest.raises(ValueError, match="4 trajectories, which --global-batch-size 3 does not divide"):
        optimizer_steps(trajectories, 3)
    with pytest.raises(ValueError, match="0 trajectories"):
        optimizer_steps(trajectories[:0], 3)


@pytest.mark.parametrize("seed", range(20))
def test_microbatches_place_each_sample_once_and_respect_the_cap(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(0, 40))]
    capacity, multiple = rng.randrange(20, 120), rng.choice([1, 2, 3, 8])
    plan = plan_microbatches(lengths, capacity, multiple)
    assert sorted(i for bin in plan for i in bin) == list(range(len(lengths)))
    assert plan and len(plan) % multiple == 0
    assert all(len(bin) <= 1 or sum(lengths[i] for i in bin) <= capacity for bin in plan)
    assert all(plan) or all(len(bin) <= 1 for bin in plan)  # empty ones only when nothing is left to split


@pytest.mark.parametrize("context,sequence", [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_packs_hold_every_trained_token_once_whatever_the_grid(context: int, sequence: int) -> None:
    batch = Batch.from_table(to_table(samples(12)), graded=True)
    rng = np.random.default_rng(0)
    weights, advantages = rng.random(len(batch.token_ids)), rng.random(12)
    rows = [i for i in range(12) if batch.num_trained[i]]
    seen = []
    for rank in range(context):
        grid = Grid(context_rank=rank, context_size=context, sequence_size=sequence)
        packed = pack(batch, rows, weights, advantages, grid)
        num_tokens = len(packed.token_ids)
        assert num_tokens == packed.cu_seqlens[-1] and num_tokens % (context * sequence) == 0
        assert packed.cu_seqlens.diff().max() == packed.max_seqlen
        mine = zigzag_positions(packed.cu_seqlens.numpy(), rank, context)
        assert len(mine) * context == num_tokens
        here = torch.from_numpy(mine)[packed.trained]
        torch.testing.assert_close(packed.token_ids[here + 1], packed.targets)  # the hidden state before a token predicts it
        assert (packed.position_ids[here + 1] == packed.position_ids[here] + 1).all()  # inside one sequence
        seen += list(zip(packed.sample_index.tolist(), packed.position_ids[here + 1].tolist(), packed.weights.tolist(), strict=True))
    expected = []
    for row in rows:
        start, end = batch.offsets[row], batch.offsets[row + 1]
        expected += [(row, t - start, np.float32(weights[t])) for t in range(start, end) if batch.loss_mask[t]]
    assert sorted(seen) == sorted(expected)


def test_an_empty_microbatch_is_padding_without_trained_tokens() -> None:
    batch = Batch.from_table(to_table(samples(4)), graded=True)
    packed = pack(batch, [], np.zeros(len(batch.token_ids)), np.zeros(4), Grid(context_size=2, sequence_size=2))
    assert len(packed.token_ids) == 4 and packed.targets.numel() == 0 and packed.streams.advantages.numel() == 0
