"""Several optimizer epochs over a rollout (--ppo-epochs), with a bigram model in place of the training engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from random_rollouts import samples

from penstock.flows.config import derive
from penstock.flows.options.flags import parse_config
from penstock.stages.train.batching import Batch, PackedMicrobatch
from penstock.stages.train.build import Models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import order_steps, samples_of_steps
from penstock.stages.train.step import TrainedRound, train_rollout
from penstock.storage.errors import RunError
from penstock.storage.samples.sample import to_table
from tests.train.bigram_engine import LR, VOCABULARY, BigramEngine, process_group  # noqa: F401 fixture

BATCH = Batch.from_table(to_table(samples(3)), needs_rewards=True)


def trained(keep_tokens: bool = False, **options: Any) -> tuple[BigramEngine, TrainedRound]:
    engine = BigramEngine()
    config = TrainConfig(num_steps_per_rollout=4, max_tokens_per_gpu=40, **options)
    models = Models(policy=engine)  # type: ignore[arg-type]
    return engine, train_rollout(models, BATCH, config, keep_tokens=keep_tokens)


def updates(engine: BigramEngine) -> list[list[PackedMicrobatch]]:
    return [microbatches for forward_only, microbatches, _ in engine.passes if not forward_only]


def test_each_epoch_trains_every_batch_once_in_its_own_order() -> None:
    config = TrainConfig(num_steps_per_rollout=8, ppo_epochs=4)
    order = order_steps(8, config, 3)
    epochs = [order[start : start + 8] for start in range(0, 32, 8)]
    assert epochs[0] == list(range(8)), "one epoch is the order of the rollout"
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs) and len(set(map(tuple, epochs))) == 4
    assert order == order_steps(8, config, 3)
    assert order[:24] == order_steps(8, config.model_copy(update={"ppo_epochs": 3}), 3), (
        "later epochs change no earlier"
    )
    assert order != order_steps(8, config, 4) and order != order_steps(8, config.model_copy(update={"seed": -1}), 3)


@pytest.mark.parametrize("epochs", [1, 3])
def test_uses_of_samples_are_those_of_a_naive_count(epochs: int) -> None:
    engine, result = trained(ppo_epochs=epochs)
    tokens = np.zeros(len(BATCH.trained_positions), int)
    for microbatches in updates(engine):
        for packed in microbatches:
            tokens[packed.ordinal.numpy()] += 1
    assert set(tokens) == {epochs}, "every trained token was in one update of each epoch"
    expected = [epochs if num_tokens else 0 for num_tokens in BATCH.num_trained_tokens]
    assert result.sample_uses.tolist() == expected and 0 in expected
    assert len(result.steps) == 4 * epochs


def test_the_second_epoch_continues_the_first_with_the_same_old_logprobs_and_advantages() -> None:
    """The same steps one after the other, each in a round of its own, with the log-probs of before the first."""
    engine, result = trained(ppo_epochs=2, use_rollout_logprobs=True, seed=5)
    naive = BigramEngine()
    config = TrainConfig(num_steps_per_rollout=4, max_tokens_per_gpu=40, use_rollout_logprobs=True)
    order = order_steps(4, config.model_copy(update={"ppo_epochs": 2, "seed": 5}), BATCH.rollout_id)
    losses = []
    for step in order:
        probe = BigramEngine()
        with torch.no_grad():
            probe.table.copy_(naive.table)
        kept = probe.table.detach().clone()
        probe.optimizer_step = lambda step=step, probe=probe, kept=kept: only(step, probe, kept)  # type: ignore[method-assign]
        losses.append(train_rollout(Models(policy=probe), BATCH, config).steps[step]["train/loss"])  # type: ignore[arg-type]
        with torch.no_grad():
            naive.table.copy_(probe.table)
    assert [step["train/loss"] for step in result.steps] == losses
    assert torch.equal(engine.table, naive.table)


def only(step: int, probe: BigramEngine, before: torch.Tensor) -> tuple[bool, float, list[float]]:
    """Update the weights only in optimizer step number `step` of a round."""
    number = len(updates(probe)) - 1
    assert probe.table.grad is not None
    if number == step:
        with torch.no_grad():
            probe.table.copy_(before - LR * probe.table.grad)
    return True, 0.0, [LR]


def test_logprobs_of_a_round_are_those_of_the_first_epoch() -> None:
    once, twice = (trained(True, ppo_epochs=epochs)[1].tokens["trainer_logprobs"] for epochs in (1, 2))
    assert once is not None and twice is not None and torch.equal(once, twice)


def test_one_step_and_two_epochs_need_old_logprobs_that_the_second_epoch_keeps() -> None:
    engine = BigramEngine()
    config = TrainConfig(num_steps_per_rollout=1, ppo_epochs=2)
    result = train_rollout(Models(policy=engine), BATCH, config)  # type: ignore[arg-type]
    assert [forward_only for forward_only, *_ in engine.passes] == [True, False, False]
    first, second = (olds for forward_only, _, olds in engine.passes if not forward_only)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first
    assert result.steps[0]["train/ppo_kl"] == pytest.approx(0, abs=1e-6) != result.steps[1]["train/ppo_kl"]


def test_learning_rate_decays_over_the_steps_of_all_epochs() -> None:
    sizes = "--rollout-batch-size 8 --n-samples-per-prompt 2 --num-steps-per-rollout 4 --num-rollout 3"
    config = derive(parse_config(f"{sizes} --ppo-epochs 5 --lr-decay-style linear".split()))
    assert config.train.lr_decay_iters == 3 * 4 * 5


# ---- replayed samples (--replay-share) -------------------------------------------------------------------------------

NUM_NEW = 16  # of the samples of BATCH, which are trajectories of their own


def test_replayed_trajectories_are_added_equally_to_the_steps_of_the_new_ones() -> None:
    config = TrainConfig(num_steps_per_rollout=4)
    trajectories = np.repeat(np.arange(14), 2)  # eight new ones, two in each step, and six replayed ones
    steps = samples_of_steps(trajectories, config, num_new=16)
    assert [sorted(set(trajectories[rows])) for rows in steps] == [[0, 1, 8, 9], [2, 3, 10], [4, 5, 11, 12], [6, 7, 13]]
    new = samples_of_steps(trajectories[:16], config)
    assert all(np.array_equal(rows, all_rows[all_rows < 16]) for rows, all_rows in zip(new, steps, strict=True))


def test_old_logprobs_of_replayed_samples_are_those_of_the_engine() -> None:
    replay = {"replay_share": 0.5}
    batch, engine = dataclasses.replace(BATCH, num_new=NUM_NEW), BigramEngine()
    config = TrainConfig(num_steps_per_rollout=2, max_tokens_per_gpu=40, replay=replay, ppo_epochs=2)
    result = train_rollout(Models(policy=engine), batch, config, keep_tokens=True)  # type: ignore[arg-type]
    old, is_replayed = result.tokens["trainer_logprobs"], result.experience.sample_index >= NUM_NEW
    uniform = -np.log(VOCABULARY)  # of the policy before the update
    assert torch.allclose(old[~is_replayed], torch.tensor(uniform).double(), atol=1e-6) and is_replayed.any()
    assert torch.equal(old[is_replayed], result.experience.rollout_logprobs[is_replayed])
    assert not torch.allclose(old[is_replayed], torch.tensor(uniform).double(), atol=1e-2)
    assert result.sample_uses.tolist() == [2 if num_tokens else 0 for num_tokens in BATCH.num_trained_tokens]


def test_replayed_samples_without_logprobs_are_refused() -> None:
    batch = dataclasses.replace(BATCH, num_new=NUM_NEW, rollout_logprobs=np.zeros_like(BATCH.rollout_logprobs))
    config = TrainConfig(num_steps_per_rollout=2, max_tokens_per_gpu=40, replay={"replay_share": 0.5})
    with pytest.raises(RunError, match="--replay-share replays have no log-probs"):
        train_rollout(Models(policy=BigramEngine()), batch, config)  # type: ignore[arg-type]
