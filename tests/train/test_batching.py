"""Plans and packs: nothing lost, nothing doubled, and the same sum however the samples are spread."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stages.train.batching import Batch, optimizer_steps, pack, plan_microbatches
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


def test_packs_hold_every_trained_token_once_and_in_its_place() -> None:
    batch = Batch.from_table(to_table(samples(12)), graded=True)
    rng = np.random.default_rng(0)
    weights, advantages = rng.random(len(batch.token_ids)), rng.random(12)
    rows = [i for i in (7, 3, 10, 0, 1, 5) if batch.num_trained[i]]
    packed = pack(batch, rows, weights, advantages)
    assert packed.cu_seqlens.diff().tolist() == [batch.offsets[i + 1] - batch.offsets[i] for i in rows]
    assert packed.max_seqlen == packed.cu_seqlens.diff().max() and packed.cu_seqlens[-1] == len(packed.token_ids)
    assert torch.equal(packed.token_ids[packed.trained + 1], packed.targets)  # the hidden state before a token predicts it
    assert torch.equal(packed.position_ids[packed.trained + 1], packed.position_ids[packed.trained] + 1)  # inside one sequence
    found = list(
        zip(
            packed.sample_index.tolist(),
            packed.targets.tolist(),
            packed.weights.tolist(),
            packed.streams.rollout_logprobs.tolist(),
            packed.streams.advantages.tolist(),
            strict=True,
        )
    )
    expected = [
        (row, batch.token_ids[t], np.float32(weights[t]), batch.rollout_logprobs[t], np.float32(advantages[row]))
        for row in rows
        for t in range(batch.offsets[row], batch.offsets[row + 1])
        if batch.loss_mask[t]
    ]
    assert found == expected


def test_an_empty_microbatch_is_one_pad_token_that_trains_nothing() -> None:
    batch = Batch.from_table(to_table(samples(4)), graded=True)
    packed = pack(batch, [], np.zeros(len(batch.token_ids)), np.zeros(4))
    assert packed.token_ids.tolist() == [0] and packed.cu_seqlens.tolist() == [0, 1]
    assert packed.targets.numel() == packed.streams.advantages.numel() == packed.sample_index.numel() == 0
