"""Plan the training of a round: samples of each optimizer step, order of the steps, micro-batches of each rank, loss
weight of each token.

The plan depends only on lengths and trajectories, so every rank computes the same plan without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from penstock.engines.training import TrainEngine
from penstock.stages.train.algorithms.losses import (
    constant_weights,
    custom_weights,
    per_sample_weights,
    per_token_weights,
)
from penstock.stages.train.batching import Batch, PackedMicrobatch, pack, train_flops
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import OptionError

Steps = list[list[PackedMicrobatch]]  # this rank's micro-batches of each optimizer step


def plan_steps(engine: TrainEngine, batch: Batch, config: TrainConfig) -> Steps:
    """Return this rank's packed micro-batches of each optimizer step, with the loss inputs on the engine's device."""
    rank, size = engine.data_parallel_rank_and_size
    multiple = size * (config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1)
    steps: Steps = []
    for rows in samples_of_steps(batch.trajectory_index, config):
        rows = rows[batch.num_trained_tokens[rows] > 0]  # samples without trained tokens do not contribute
        longest = batch.lengths if batch.hinted is None else np.maximum(batch.lengths, batch.hinted.lengths)
        lengths = longest[rows].tolist()
        if config.fills_microbatches_by_tokens:
            bins = filled_microbatches(lengths, config.max_tokens_per_gpu * config.context_parallel_size, multiple)
        else:
            bins = fixed_microbatches(len(rows), config.micro_batch_size or 1, multiple)
        if config.balance_data:
            trains_vision = not config.freeze_vision
            flops = [train_flops(engine.shape, batch, rows[b], trains_vision=trains_vision) for b in bins]
            own_bins = balanced_shares(flops, size)[rank]
        else:
            own_bins = list(range(rank, len(bins), size))
        steps.append([_pack_for_engine(engine, batch, rows[bins[index]].tolist()) for index in own_bins])
    return steps


def _pack_for_engine(engine: TrainEngine, batch: Batch, rows: list[int]) -> PackedMicrobatch:
    """Return the packed micro-batch of some samples, and of the same samples after the teacher's prompts."""
    packed = pack(batch, rows)
    packed.stream = engine.pack_stream(packed)  # copied to the GPU now: later it would interrupt training
    packed = packed.to_local(engine.device, packed.stream.pack_slice, engine.context_group)
    packed.hinted = None if batch.hinted is None else _pack_for_engine(engine, batch.hinted, rows)
    return packed


@dataclass
class LossWeights:
    """Weights that reduce token losses to one loss per optimizer step: the sum of weight x token loss."""

    weights: Tensor  # [N] float64, sums to 1 in every step with trained tokens
    pg_scale: Tensor | None  # [N] float64, weight in the policy-gradient loss / `weights`; None = they are equal
    num_steps: int  # optimizer steps of the round

    def mean_over_steps(self, values: Tensor) -> float:
        """Return the mean over the optimizer steps of each step's weighted sum of `values` [N], one value per token
        of the batch; the weights are those of the loss."""
        return float((self.weights * values).sum()) / self.num_steps


def compute_loss_weights(batch: Batch, config: TrainConfig) -> LossWeights:
    """Return the weight of every trained token in the loss of its optimizer step."""
    weights_of_step = per_token_weights if config.calculate_per_token_loss else per_sample_weights
    custom_path, denominator = config.custom_pg_loss_reducer_function_path, config.loss_denominator
    samples = torch.from_numpy(batch.sample_index)
    trajectories = torch.from_numpy(batch.trajectory_index)[samples]
    units = torch.from_numpy(batch.group_index)[samples] if config.calculate_per_prompt_loss else trajectories
    weights = torch.zeros(len(samples), dtype=torch.float64)
    scale = torch.ones_like(weights)
    steps = samples_of_steps(batch.trajectory_index, config)
    for rows in steps:
        is_in_step = np.isin(np.arange(len(batch.lengths)), rows)
        tokens = torch.from_numpy(np.flatnonzero(is_in_step[batch.sample_index]))
        weights[tokens] = weights_of_step(units[tokens], len(batch.lengths))
        if denominator:
            scale[tokens] = constant_weights(trajectories[tokens], denominator) / weights[tokens]
        if custom_path:
            num_trajectories = len(np.unique(batch.trajectory_index[rows]))
            custom = custom_weights(custom_path, trajectories[tokens], samples[tokens], num_trajectories)
            scale[tokens] = custom / weights[tokens]
    return LossWeights(weights, scale if custom_path or denominator else None, len(steps))


# ---- samples of each optimizer step ----------------------------------------------------------------------------------


def order_steps(num_steps: int, config: TrainConfig, rollout_id: int) -> list[int]:
    """Return the number of the batch (`samples_of_steps`) that each optimizer step of a round trains on: every batch
    once per epoch of --ppo-epochs. The first epoch has the order of the rollout, each later one a permutation that
    depends only on --seed, round and epoch."""
    order = list(range(num_steps))
    for epoch in range(1, config.ppo_epochs):
        order += np.random.default_rng([config.seed % 2**64, rollout_id, epoch]).permutation(num_steps).tolist()
    return order


def count_sample_uses(batch: Batch, config: TrainConfig, order: Sequence[int]) -> np.ndarray:  # [B]
    """Return in how many optimizer steps of a round each sample was trained, if the steps trained on the batches
    `order`."""
    steps, uses = samples_of_steps(batch.trajectory_index, config), np.zeros(len(batch.lengths), np.int64)
    for step in order:
        uses[steps[step]] += batch.num_trained_tokens[steps[step]] > 0
    return uses


def samples_of_steps(trajectory_index: np.ndarray, config: TrainConfig) -> list[np.ndarray]:
    """Return the sample indices of each optimizer step: blocks of --global-batch-size consecutive trajectories, or else
    --num-steps-per-rollout equal blocks. All samples of a trajectory are in the same step. `trajectory_index` [B] is
    the number of each sample's trajectory, in order of appearance."""
    num_trajectories = int(trajectory_index.max(initial=-1)) + 1
    size, num_steps = config.global_batch_size, config.num_steps_per_rollout or 1
    flag, divisor = ("--num-steps-per-rollout", num_steps) if size is None else ("--global-batch-size", size)
    if num_trajectories == 0 or num_trajectories % divisor:
        raise OptionError(
            f"{flag} {divisor} does not divide the {num_trajectories} trajectories of the rollout: choose a divisor of "
            "--rollout-batch-size x --n-samples-per-prompt"
        )
    step_of_row = trajectory_index // (size or num_trajectories // num_steps)
    return [np.flatnonzero(step_of_row == step) for step in range(int(step_of_row.max()) + 1)]


# ---- samples of each micro-batch -------------------------------------------------------------------------------------


def fixed_microbatches(num_samples: int, size: int, multiple_of: int) -> list[list[int]]:
    """Return the sample indices of each micro-batch: `size` samples each, then empty micro-batches until their number
    is a multiple of `multiple_of`."""
    bins = [list(range(start, min(start + size, num_samples))) for start in range(0, num_samples, size)]
    return bins + [[] for _ in range(-len(bins) % multiple_of if bins else multiple_of)]


def filled_microbatches(lengths: Sequence[int], capacity: int, multiple_of: int) -> list[list[int]]:
    """Return the sample indices of each micro-batch, filled up to `capacity` tokens.

    Samples are assigned first-fit in their order; a sample longer than `capacity` gets its own micro-batch. The number
    of micro-batches is then raised to a multiple of `multiple_of` (data-parallel ranks, x pipeline stages with virtual
    pipeline stages): split the micro-batch with the most tokens that has several samples, or add empty micro-batches if
    all have at most one sample.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        fitting = next((b for b, free in enumerate(room) if free >= length), None)
        if fitting is None:
            fitting = len(bins)
            bins.append([])
            room.append(capacity)
        bins[fitting].append(index)
        room[fitting] -= length
    while not bins or len(bins) % multiple_of:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b), default=None)
        if heaviest is None:
            bins.append([])
        else:
            halves: list[list[int]] = [[], []]
            sizes = [0, 0]
            for index in sorted(heaviest, key=lambda i: -lengths[i]):  # longest first, into the lighter half
                lighter = int(sizes[1] < sizes[0])
                halves[lighter].append(index)
                sizes[lighter] += lengths[index]
            bins[bins.index(heaviest) : bins.index(heaviest) + 1] = map(sorted, halves)
    return bins


def balanced_shares(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Partition items into shares of equal count and nearly equal cost, and return the item indices of each share.

    Uses the largest differencing method (Karmarkar & Karp 1982) with equal counts: every `num_shares` items start as a
    partition with one item per share. The two most uneven partitions are merged, the heaviest share of one with the
    lightest share of the other, until one partition remains. The number of items must be a multiple of `num_shares`.
    """
    assert len(costs) % num_shares == 0, f"{len(costs)} items cannot be split into {num_shares} shares of equal count"
    order, tie_breaker = sorted(range(len(costs)), key=lambda item: -costs[item]), count()
    heap = []
    for start in range(0, len(order), num_shares):
        shares = [(costs[item], [item]) for item in order[start : start + num_shares]]  # heaviest share first
        heap.append((shares[-1][0] - shares[0][0], next(tie_breaker), shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, items + others) for (a, items), (b, others) in zip(first, reversed(second))]
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(tie_breaker), merged))
    return sorted(sorted(items) for _, items in heap[0][2])
