"""Plans and packed micro-batches: every sample and token exactly once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engines.families.shape import Vision
from penstock.stages.train.batching import Batch, pack, train_flops
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import (
    balanced_shares,
    filled_microbatches,
    fixed_microbatches,
    samples_of_steps,
)
from penstock.storage.errors import OptionError, RunError
from penstock.storage.samples.sample import Sample, to_table
from tests.engines.megatron_reference import SHAPE


def samples(count: int, seed: int = 0, siblings: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt, response = rng.randrange(1, 6), rng.randrange(0, 9)
        length = prompt + response
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(response)]
        row = Sample(f"s{i}", f"g{i // 4}", f"t{i // siblings}", 0, loss_mask=mask)
        row.token_ids = [rng.randrange(50) for _ in range(length)]
        row.rollout_logprobs = [-rng.random() * m for m in mask]
        row.reward = None if i % 7 == 6 else rng.random()
        made.append(row)
    return made


def test_batch_has_the_data_of_its_samples() -> None:
    rows = samples(30)
    table = to_table([*samples(3, seed=9), *rows]).slice(3)  # a slice: offsets do not begin at zero
    batch = Batch.from_table(table, needs_rewards=True)
    for i, row in enumerate(rows):
        part = slice(batch.offsets[i], batch.offsets[i + 1])
        assert batch.token_ids[part].tolist() == row.token_ids
        expected = [0] * len(row.token_ids) if row.reward is None else row.loss_mask
        assert batch.loss_mask[part].astype(int).tolist() == expected
        assert batch.num_trained_tokens[i] == sum(expected)
        assert (row.reward is None) == np.isnan(batch.rewards[i])
    assert batch.group_index.tolist() == [i // 4 for i in range(30)]


def test_batch_has_the_reward_components_that_the_estimator_compares() -> None:
    rows = samples(8)
    for i, row in enumerate(rows):
        row.rewards = {"right": i / 2, "short": -float(i)}  # the row 6 has components, but no reward
    batch = Batch.from_table(to_table(rows), needs_rewards=True, components=["short", "right"])
    assert list(batch.reward_components) == ["short", "right"]
    assert batch.reward_components["right"][:6].tolist() == [i / 2 for i in range(6)]
    assert np.isnan(batch.reward_components["right"]).tolist() == [i == 6 for i in range(8)]
    rows[3].rewards = {"right": 1.0}
    with pytest.raises(RunError, match=r"1 samples .* without the component 'short' of --gdpo-reward-weights"):
        Batch.from_table(to_table(rows), needs_rewards=True, components=["right", "short"])


def test_first_token_of_a_sample_is_never_trained() -> None:
    row = Sample("s", "g", "t", 0, token_ids=[5, 6], loss_mask=[1, 1], rollout_logprobs=[0.0, 0.0])
    assert Batch.from_table(to_table([row, row]), needs_rewards=False).num_trained_tokens.tolist() == [1, 1]


def test_optimizer_steps_keep_siblings_together_and_refuse_a_remainder() -> None:
    trajectories = np.array([0, 1, 0, 2, 3, 3, 1])
    for options in ({"global_batch_size": 2}, {"num_steps_per_rollout": 2}):
        steps = samples_of_steps(trajectories, TrainConfig.model_validate(options))
        assert [step.tolist() for step in steps] == [[0, 1, 2, 6], [3, 4, 5]]
    for name, flag in (
        ("global_batch_size", "--global-batch-size"),
        ("num_steps_per_rollout", "--num-steps-per-rollout"),
    ):
        with pytest.raises(OptionError, match=f"{flag} 3 .* 4 trajectories"):
            samples_of_steps(trajectories, TrainConfig.model_validate({name: 3}))
        with pytest.raises(OptionError, match="0 trajectories"):
            samples_of_steps(trajectories[:0], TrainConfig.model_validate({name: 3}))


@pytest.mark.parametrize("seed", range(8))
def test_filled_microbatches_hold_each_sample_once_and_respect_the_capacity(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(0, 40))]
    capacity, multiple = rng.randrange(20, 120), rng.choice([1, 2, 3, 8])
    plan = filled_microbatches(lengths, capacity, multiple)
    assert sorted(i for bin in plan for i in bin) == list(range(len(lengths)))
    assert plan and len(plan) % multiple == 0
    assert all(len(bin) <= 1 or sum(lengths[i] for i in bin) <= capacity for bin in plan)
    assert all(plan) or all(len(bin) <= 1 for bin in plan)  # empty ones only when nothing is left to split


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_fixed_microbatches_hold_the_same_number_of_samples(multiple: int) -> None:
    assert fixed_microbatches(5, 2, 1) == [[0, 1], [2, 3], [4]]
    assert fixed_microbatches(0, 2, multiple) == [[]] * multiple
    plan = fixed_microbatches(7, 2, multiple)
    assert [i for bin in plan for i in bin] == list(range(7)) and len(plan) % multiple == 0 and max(map(len, plan)) == 2


@pytest.mark.parametrize("seed", range(8))
def test_balanced_shares_have_equal_count_and_nearly_equal_cost(seed: int) -> None:
    rng = random.Random(seed)
    num_shares = rng.choice([1, 2, 3, 4])
    costs = [rng.random() ** 3 * 100 for _ in range(num_shares * rng.randrange(1, 8))]
    shares = balanced_shares(costs, num_shares)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert {len(share) for share in shares} == {len(costs) // num_shares}
    in_turn = [costs[start::num_shares] for start in range(num_shares)]
    assert max(sum(costs[i] for i in share) for share in shares) <= max(map(sum, in_turn)) + 1e-9


def test_pack_holds_each_trained_token_once_at_the_right_position() -> None:
    batch = Batch.from_table(to_table(samples(12)), needs_rewards=True)
    rows = [i for i in (7, 3, 10, 0, 1, 5) if batch.num_trained_tokens[i]]
    packed = pack(batch, rows)
    assert packed.cu_seqlens.diff().tolist() == [batch.offsets[i + 1] - batch.offsets[i] for i in rows]
    assert packed.max_seqlen == packed.cu_seqlens.diff().max() and packed.cu_seqlens[-1] == len(packed.token_ids)
    assert torch.equal(packed.token_ids[packed.trained + 1], packed.targets)  # the state before a token predicts it
    positions = packed.position_ids
    assert torch.equal(positions[packed.trained + 1], positions[packed.trained] + 1)  # inside one sequence
    ordinal = packed.ordinal.numpy()
    assert batch.token_ids[batch.trained_positions[ordinal]].tolist() == packed.targets.tolist()
    assert [rows[i] for i in packed.samples.index.tolist()] == batch.sample_index[ordinal].tolist()
    assert packed.samples.num_tokens.tolist() == batch.num_trained_tokens[rows].tolist()
    assert sorted(ordinal) == [n for n, row in enumerate(batch.sample_index) if row in rows]


def test_context_parallel_ranks_split_the_trained_tokens() -> None:
    batch = Batch.from_table(to_table(samples(6)), needs_rewards=True)
    packed = pack(batch, range(6))
    middle, total = len(packed.token_ids) // 2, len(packed.token_ids)
    halves = [slice(0, middle), slice(middle, total)]
    parts = [packed.to_local(torch.device("cpu"), half) for half in halves]
    assert sorted(torch.cat([part.ordinal for part in parts]).tolist()) == packed.ordinal.tolist()
    for part, half in zip(parts, halves):
        assert torch.equal(packed.token_ids[half.start + part.trained + 1], part.targets)
        assert torch.equal(part.samples.num_tokens, packed.samples.num_tokens)


def test_empty_microbatch_is_one_pad_token_without_trained_tokens() -> None:
    batch = Batch.from_table(to_table(samples(4)), needs_rewards=True)
    packed = pack(batch, [])
    assert packed.token_ids.tolist() == [0] and packed.cu_seqlens.tolist() == [0, 1]
    fields = (packed.targets, packed.ordinal, packed.samples.index, packed.samples.num_tokens)
    assert [field.numel() for field in fields] == [0] * 4


def test_flops_of_samples_include_their_images() -> None:
    batch = Batch.from_table(to_table(samples(4)), needs_rewards=True)
    grids, places, owners = np.array([[1, 4, 4], [1, 2, 6], [1, 8, 2]]), np.array([0, 1, 2, 1]), np.array([1, 1, 3, 1])
    batch = replace(batch, image_grids=grids, image_index=places, image_samples=owners)
    vision = Vision(
        variant="qwen3", image_token_id=0, num_blocks=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1,
        output_size=8, in_channels=3, patch_size=4, temporal_patch_size=2, merge_size=2,
    )  # fmt: skip
    shape = SHAPE.model_copy(update={"vision": vision})
    for chosen, images in (([0, 2], []), ([0, 1], [0, 1]), ([3], [2]), ([0, 1, 2, 3], [0, 1, 2])):
        for trained in (False, True):
            text = train_flops(SHAPE, batch, np.array(chosen))
            expected = text + vision.train_flops(grids[images], trained=trained)
            assert train_flops(shape, batch, np.array(chosen), trains_vision=trained) == pytest.approx(expected)
