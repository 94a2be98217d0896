"""From a batch to what one rank trains: its micro-batches of each optimizer step, and what every token counts in the loss.

How samples are put into micro-batches is for `plan.py`, how micro-batches are laid out for `batching.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.megatron.engine import MegatronEngine
from stages.train.algorithms.reductions import custom_reducer, per_sample_weights, per_token_weights
from stages.train.batching import Batch, Packed, pack
from stages.train.config import TrainConfig
from stages.train.plan import balanced_shares, filled_microbatches, fixed_microbatches, optimizer_steps
from storage.errors import OptionError

Steps = list[list[Packed]]  # this rank's micro-batches of each optimizer step


def plan(engine: MegatronEngine, batch: Batch, config: TrainConfig) -> Steps:
    """This rank's micro-batches of each optimizer step."""
    _, size = engine.data_parallel
    multiple = size * (config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1)
    steps: Steps = []
    for rows in _rows_of_steps(batch, config):
        rows = rows[batch.num_trained[rows] > 0]  # a sample without trained tokens has no part in the loss
        lengths = batch.lengths[rows].tolist()
        if config.fills_by_tokens:
            bins = filled_microbatches(lengths, config.max_tokens_per_gpu * config.context_parallel_size, multiple)
        else:
            bins = fixed_microbatches(len(rows), config.micro_batch_size or 1, multiple)
        packs = [pack(batch, rows[bins[index]].tolist()) for index in _mine(engine, bins, lengths, config)]
        steps.append([packed.on(engine.device, engine.rows_of(packed), engine.context_group) for packed in packs])
    return steps


def _mine(engine: MegatronEngine, bins: list[list[int]], lengths: list[int], config: TrainConfig) -> list[int]:
    """Which micro-batches of a step are this data-parallel rank's."""
    rank, size = engine.data_parallel
    if not config.balance_data:
        return list(range(rank, len(bins), size))
    flops = [engine.shape.train_flops(sum(lengths[i] for i in b), sum(lengths[i] ** 2 for i in b)) for b in bins]
    return balanced_shares(flops, size)[rank]


def _rows_of_steps(batch: Batch, config: TrainConfig) -> list[np.ndarray]:
    """Samples of each optimizer step: as many trajectories as configured, else the rollout shared out over the steps."""
    if config.global_batch_size is not None:
        return optimizer_steps(batch.trajectory_index, config.global_batch_size)
    num_trajectories, num_steps = int(batch.trajectory_index.max(initial=-1)) + 1, config.num_steps_per_rollout or 1
    if num_trajectories % num_steps:
        raise OptionError(
            f"the rollout holds {num_trajectories} trajectories, which --num-steps-per-rollout {num_steps} does not divide"
        )
    return optimizer_steps(batch.trajectory_index, num_trajectories // num_steps)


@dataclass
class Weights:
    """How token losses become one number per optimizer step."""

    weights: Tensor  # [N] float64, sums to 1 in every step that trains anything
    pg_scale: Tensor | None  # [N] float64, what the policy-gradient part is multiplied with besides
    num_steps: int

    def mean(self, values: Tensor) -> float:
        """Of [N] values, over the round."""
        return float((self.weights * values).sum()) / self.num_steps


def weigh(batch: Batch, config: TrainConfig) -> Weights:
    """What every trained token counts in the loss of its step."""
    weigh_step = per_token_weights if config.calculate_per_token_loss else per_sample_weights
    reduce = config.custom_pg_loss_reducer_function_path and custom_reducer(config.custom_pg_loss_reducer_function_path)
    samples = torch.from_numpy(batch.sample_index)
    trajectories = torch.from_numpy(batch.trajectory_index)[samples]
    weights = torch.zeros(len(samples), dtype=torch.float64)
    scale = torch.ones_like(weights) if reduce else None
    steps = _rows_of_steps(batch, config)
    for rows in steps:
        tokens = torch.from_numpy(np.flatnonzero(np.isin(batch.sample_index, rows)))
        weights[tokens] = weigh_step(trajectories[tokens], len(batch.lengths))
        if reduce and scale is not None:
            num_trajectories = len(np.unique(batch.trajectory_index[rows]))
            scale[tokens] = reduce(trajectories[tokens], samples[tokens], num_trajectories) / weights[tokens]
    return Weights(weights, scale, len(steps))
