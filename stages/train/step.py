"""One round of training on one rank: plan, log-probs before the update, optimizer steps, metrics.

The only place where the maths meets the engine. The engine's gradients are plain sums over micro-batches and ranks, and the
tokens' weights hold all denominators, so no factor of Megatron's appears. Every sum of weight x value is a mean over the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engines.megatron.engine import MegatronEngine
from stages.train.algorithms.advantages import ESTIMATORS
from stages.train.algorithms.logprobs import Head, token_logprobs
from stages.train.algorithms.objectives import OBJECTIVES
from stages.train.algorithms.reductions import per_sample_weights, per_token_weights
from stages.train.batching import Batch, Packed, optimizer_steps, pack, plan_microbatches
from stages.train.config import TrainConfig
from storage.faults import reach

Metrics = dict[str, float]
TokenLogProbs = Callable[[Tensor, Head, Packed], tuple[Tensor, Tensor]]  # -> log-probs [N], entropies [N]


def train_rollout(
    engine: MegatronEngine,
    batch: Batch,
    config: TrainConfig,
    *,
    temperature: float,
    reference: Any | None = None,  # snapshot of the frozen weights, if the KL to them is wanted
) -> tuple[Metrics, list[Metrics], dict[str, float]]:
    """Train on all samples of a rollout. Returns metrics of the round and of each optimizer step, and where the seconds went."""
    clock = _Clock()
    with clock("plan"):
        advantages = _advantages(batch, config)
        steps = _plan(engine, batch, advantages, config)
    logprobs_of = _logprobs_of(engine, config, temperature)

    if reference is not None:
        with clock("ref_logprobs"), engine.using(reference):
            _fill_logprobs(engine, steps, logprobs_of, "ref_logprobs")
    if (
        config.loss_type == "policy_loss" and len(steps) > 1
    ):  # with one step they are the current ones, and a forward pass is saved
        with clock("old_logprobs"):
            _fill_logprobs(engine, steps, logprobs_of, "old_logprobs")

    with clock("update"):
        loss_fn = _loss_fn(config, logprobs_of)
        per_step = _over_ranks(engine, [_optimizer_step(engine, microbatches, loss_fn) for microbatches in steps])
    metrics = {name: float(np.mean([step[name] for step in per_step])) for name in per_step[0]}
    metrics |= {"train/lr-pg_0": per_step[-1]["train/lr-pg_0"], "rollout/advantages": float(advantages.mean())}
    return metrics | _speed(engine, batch, clock.seconds), per_step, clock.seconds


# ---- plan -------------------------------------------------------------------------------------------------------------------


def _advantages(batch: Batch, config: TrainConfig) -> np.ndarray:  # [B]
    if config.loss_type != "policy_loss":
        return np.zeros(len(batch.rewards))
    estimate = ESTIMATORS[config.advantage_estimator]
    rewards, groups = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_index)
    return estimate(rewards, groups, normalize_std=not config.disable_grpo_std_normalization).numpy()


def _plan(engine: MegatronEngine, batch: Batch, advantages: np.ndarray, config: TrainConfig) -> list[list[Packed]]:
    """This rank's micro-batches of each optimizer step. Every rank makes the whole plan and packs its own part."""
    rank, size = engine.data_parallel
    capacity = config.max_tokens_per_gpu * config.context_parallel_size
    multiple = size * (config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1)
    lengths, num_trained = np.diff(batch.offsets), batch.num_trained
    steps = []
    for rows in optimizer_steps(batch.trajectory_index, _global_batch_size(batch, config)):
        weights = _token_weights(batch, rows, config)
        rows = rows[num_trained[rows] > 0]  # a sample without trained tokens has no part in the loss
        bins = plan_microbatches(lengths[rows].tolist(), capacity, multiple)
        packs = [pack(batch, rows[microbatch].tolist(), weights, advantages) for microbatch in bins[rank::size]]
        steps.append([packed.on(engine.device, engine.rows_of(packed)) for packed in packs])
    return steps


def _global_batch_size(batch: Batch, config: TrainConfig) -> int:
    """Trajectories per optimizer step: as configured, else the rollout shared out over the steps."""
    if config.global_batch_size is not None:
        return config.global_batch_size
    num_trajectories, num_steps = int(batch.trajectory_index.max(initial=-1)) + 1, config.num_steps_per_rollout or 1
    if num_trajectories % num_steps:
        raise ValueError(
            f"the rollout holds {num_trajectories} trajectories, which --num-steps-per-rollout {num_steps} does not divide"
        )
    return num_trajectories // num_steps


def _token_weights(batch: Batch, rows: np.ndarray, config: TrainConfig) -> np.ndarray:  # [S]
    """Weight of every token of the rollout in the loss of the step that trains `rows`."""
    in_step = np.zeros(len(batch.rewards), dtype=bool)
    in_step[rows] = True
    tokens = np.flatnonzero(batch.loss_mask & np.repeat(in_step, np.diff(batch.offsets)))
    trajectories = np.repeat(batch.trajectory_index, np.diff(batch.offsets))[tokens]
    weigh = per_token_weights if config.calculate_per_token_loss else per_sample_weights
    weights = np.zeros(len(batch.token_ids))
    weights[tokens] = weigh(torch.from_numpy(trajectories), int(batch.trajectory_index.max()) + 1).numpy()
    return weights


# ---- passes through the model -----------------------------------------------------------------------------------------------


def _logprobs_of(engine: MegatronEngine, config: TrainConfig, temperature: float) -> TokenLogProbs:
    def logprobs_of(hidden: Tensor, head: Head, packed: Packed) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden[packed.trained],  # the head runs on trained positions alone, never on the prompt
            head,
            packed.targets,
            temperature=temperature,
            chunk_size=config.log_probs_chunk_size,
            group=engine.tensor_group,
            entropy_gradient=config.entropy_coef != 0,
        )

    return logprobs_of


def _fill_logprobs(engine: MegatronEngine, steps: list[list[Packed]], logprobs_of: TokenLogProbs, stream: str) -> None:
    """Store the log-probs of the model as it is in a stream of every micro-batch (on the last stage, which needs them)."""

    def keep(hidden: Tensor, head: Head, packed: Packed) -> tuple[None, dict[str, Tensor]]:
        setattr(packed.streams, stream, logprobs_of(hidden, head, packed)[0])
        return None, {}

    for microbatches in steps:
        engine.forward_backward(microbatches, keep, forward_only=True)


def _loss_fn(
    config: TrainConfig, logprobs_of: TokenLogProbs
) -> Callable[[Tensor, Head, Packed], tuple[Tensor, dict[str, Tensor]]]:
    objective = OBJECTIVES[config.loss_type](config)

    def loss_fn(hidden: Tensor, head: Head, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropies = logprobs_of(hidden, head, packed)
        losses, watched = objective(logprobs, entropies, packed.streams)
        sums = {name: (packed.weights * values.detach()).sum() for name, values in {"train/loss": losses, **watched}.items()}
        return (packed.weights * losses).sum(), sums

    return loss_fn


def _optimizer_step(engine: MegatronEngine, microbatches: list[Packed], loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """One update. Returns this rank's share of the metrics: sums on the last stage, grad norm and learning rate everywhere."""
    engine.zero_grad()
    outputs = engine.forward_backward(microbatches, loss_fn, forward_only=False)
    learning_rate = engine.lr
    updated, grad_norm = engine.step()
    reach("train-mid-step")  # weights changed, gradients there, the rank unclean; more optimizer steps of this round may follow
    assert updated, "the optimizer skipped a step"
    sums = {name: torch.stack([output[name] for output in outputs]).double().sum() for name in (outputs[0] if outputs else ())}
    return {"sums": sums, "alike": {"train/grad_norm": grad_norm, "train/lr-pg_0": learning_rate}}


def _over_ranks(engine: MegatronEngine, steps: list[dict[str, Any]]) -> list[Metrics]:
    """Add up the shares of all ranks, in one exchange for the whole round; tensor-parallel ranks hold the same share."""
    first = engine.tensor_group is None or engine.tensor_group.rank() == 0
    mine = [{name: float(value) for name, value in step["sums"].items()} if first else {} for step in steps]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    shares = [share for share in shares if share[0]]
    return [
        {name: sum(share[i][name] for share in shares) for name in shares[0][i]} | step["alike"] for i, step in enumerate(steps)
    ]


# ---- time -------------------------------------------------------------------------------------------------------------------


def _speed(engine: MegatronEngine, batch: Batch, seconds: dict[str, float]) -> Metrics:
    num_tokens, lengths = len(batch.token_ids), np.diff(batch.offsets)
    flops = engine.shape.train_flops(num_tokens, int((lengths**2).sum()))
    metrics = {
        "perf/actor_train_time": seconds["update"],
        "perf/actor_train_tok_per_s": num_tokens / seconds["update"],
        "perf/actor_train_tflops": flops / seconds["update"] / dist.get_world_size() / 1e12,  # per GPU
    }
    names = {"old_logprobs": "perf/log_probs_time", "ref_logprobs": "perf/ref_log_probs_time"}
    return metrics | {metric: seconds[name] for name, metric in names.items() if name in seconds}


class _Clock:
    """Seconds per phase. Every phase ends in numbers on the host, so that a GPU's queue is empty when it is read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start
