"""One round of training on one rank, top to bottom: plan, log-probs and values before the update, advantages, optimizer steps, metrics.

The only place where the maths meets the engine. The engine's gradients are plain sums over micro-batches and ranks, and the
tokens' weights hold all denominators, so no factor of Megatron's appears. Every sum of weight x value is a mean over the step.
What is known of a rollout's N trained tokens is the same on every rank, so every rank estimates the same advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engines.megatron.engine import MegatronEngine
from engines.megatron.weights import Snapshot
from stages.train.algorithms.advantages import estimate
from stages.train.algorithms.experience import Estimate, Experience
from stages.train.algorithms.logprobs import Head, token_logprobs
from stages.train.algorithms.objectives import OBJECTIVES
from stages.train.algorithms.streams import TokenStreams
from stages.train.algorithms.value_loss import value_objective
from stages.train.batching import Batch, Packed
from stages.train.build import Models
from stages.train.config import TrainConfig
from stages.train.metrics import Clock, Metrics, over_ranks, speed
from stages.train.prepare import Steps, Weights, plan, weigh
from storage.faults import reach

Known = Callable[[Tensor, Head, Packed], Tensor]  # hidden [r, H] -> one number per trained token [n]
LossFunction = Callable[[Tensor, Head, Packed, TokenStreams], tuple[Tensor, dict[str, Tensor]]]  # -> loss [n], metrics [n] each
Routing = Literal["record", "replay"]


@dataclass
class Round:
    """What came of a round."""

    metrics: Metrics  # means over the optimizer steps
    steps: list[Metrics]  # of each optimizer step
    seconds: dict[str, float]  # of each phase


def train_rollout(
    models: Models, batch: Batch, config: TrainConfig, *, temperature: float = 1.0, critic_only: bool = False
) -> Round:
    """Train on all samples of a rollout.

    Args:
        models: as `config` needs them.
        batch: the rollout, the same on every rank.
        config: algorithm and batches.
        temperature: that the samples were drawn at.
        critic_only: leave the policy as it is.
    """
    clock = Clock()
    with clock("plan"):
        steps, weights = plan(models.policy, batch, config), weigh(batch, config)
    experience = gather_experience(models, steps, batch, config, temperature, clock)
    with clock("advantages"):
        estimated = estimate(experience, config)
        hand_out(steps, experience, estimated, weights, models.policy.device)
    per_step: list[Metrics] = [{} for _ in steps]
    if models.critic is not None:
        with clock("critic"):
            trained = update(models.critic, steps, value_loss(config))
        per_step = [{name.replace("train/", "train/critic-"): value for name, value in step.items()} for step in trained]
    if not critic_only:
        with clock("update"):
            trained = update(
                models.policy, steps, policy_loss(models.policy, config, temperature), routing=replay_of(config, len(steps))
            )
        per_step = [critic | policy for critic, policy in zip(per_step, trained)]
    metrics = {name: float(np.mean([step[name] for step in per_step])) for name in per_step[0]}
    metrics |= {name: value for name, value in per_step[-1].items() if "lr-pg" in name}
    watched = {"rollout/advantages": estimated.advantages, **estimated.metrics}
    means = {name: weights.mean(values) for name, values in watched.items()}
    return Round(metrics | means | speed(models.policy, batch, clock.seconds), per_step, clock.seconds)


# ---- before the update ------------------------------------------------------------------------------------------------------


def gather_experience(
    models: Models, steps: Steps, batch: Batch, config: TrainConfig, temperature: float, clock: Clock
) -> Experience:
    """What is known of the rollout before anything is changed."""
    policy, num_tokens = models.policy, len(batch.trained)
    logprobs_of = _logprobs_of(policy, config, temperature)
    experience = Experience(
        sample_index=torch.from_numpy(batch.sample_index),
        rewards=torch.from_numpy(batch.rewards),
        group_index=torch.from_numpy(batch.group_index),
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[batch.trained]).double(),
    )

    def measured(
        name: str, engine: MegatronEngine, known: Known, held: Snapshot | None = None, routing: Routing | None = None
    ) -> None:
        with clock(name), engine.using(held) if held is not None else nullcontext():
            setattr(experience, name, _on_every_rank(engine, steps, num_tokens, known, routing))

    def logprobs(hidden: Tensor, head: Head, packed: Packed) -> Tensor:
        return logprobs_of(hidden, head, packed)[0]

    if models.reference is not None:
        measured("ref_logprobs", policy, logprobs, held=models.reference)
    if models.teacher is not None:
        measured("teacher_logprobs", policy, logprobs, held=models.teacher)
    if models.critic is not None:
        measured("values", models.critic, _values)
    if config.use_rollout_logprobs:
        experience.old_logprobs = experience.rollout_logprobs
    elif needs_old_logprobs(config, len(steps)):
        measured(
            "old_logprobs", policy, logprobs, routing="record" if config.use_routing_replay else replay_of(config, len(steps))
        )
    return experience


def needs_old_logprobs(config: TrainConfig, num_steps: int) -> bool:
    """With one optimizer step the old log-probs are the current ones, and a forward pass is saved, unless advantages need them."""
    shaped = config.kl_coef > 0 or config.use_opd or config.custom_advantage_function_path is not None
    return config.loss_type != "sft_loss" and (num_steps > 1 or shaped)


def replay_of(config: TrainConfig, num_steps: int) -> Routing | None:
    """Whether the update chooses experts by itself. The trainer's own choice of before is another one from the second step on."""
    recorded = config.use_routing_replay and not config.use_rollout_logprobs and needs_old_logprobs(config, num_steps)
    return "replay" if recorded or config.use_rollout_routing_replay else None


def _on_every_rank(
    engine: MegatronEngine, steps: Steps, num_tokens: int, known: Known, routing: Routing | None
) -> Tensor:  # [N] float64
    """One number per trained token of the rollout. Every token is computed once, and adding zeros is exact: the same bits everywhere."""
    found = torch.zeros(num_tokens, device=engine.device)

    def keep(hidden: Tensor, head: Head, packed: Packed) -> tuple[None, dict[str, Tensor]]:
        found[packed.ordinal] = known(hidden, head, packed)
        return None, {}

    for microbatches in steps:
        engine.forward_backward(microbatches, keep, forward_only=True, routing=routing)
    if engine.tensor_group is not None and engine.tensor_group.rank() > 0:
        found.zero_()  # the first rank has the same
    dist.all_reduce(found)
    return found.cpu().double()


def _logprobs_of(
    engine: MegatronEngine, config: TrainConfig, temperature: float
) -> Callable[[Tensor, Head, Packed], tuple[Tensor, Tensor]]:
    def logprobs_of(hidden: Tensor, head: Head, packed: Packed) -> tuple[Tensor, Tensor]:  # [n], [n]
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


def _values(hidden: Tensor, head: Head, packed: Packed) -> Tensor:  # [n] float32
    """What the critic expects of the state in which each trained token was chosen. No temperature here."""
    return head(hidden[packed.trained])[:, 0].float()


# ---- the update -------------------------------------------------------------------------------------------------------------


def hand_out(steps: Steps, experience: Experience, estimated: Estimate, weights: Weights, device: torch.device) -> None:
    """Give every micro-batch what is known of its tokens."""
    known = {
        **{name: getattr(experience, name) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")},
        "advantages": estimated.advantages,
        "returns": estimated.returns,
        "pg_scale": weights.pg_scale,
    }
    here = {name: values.to(device, torch.float32) for name, values in known.items() if values is not None}
    weights_here = weights.weights.to(device, torch.float32)
    for packed in (packed for microbatches in steps for packed in microbatches):
        packed.streams = TokenStreams(**{name: values[packed.ordinal] for name, values in here.items()})
        packed.weights = weights_here[packed.ordinal]


def policy_loss(engine: MegatronEngine, config: TrainConfig, temperature: float) -> LossFunction:
    """The loss of a micro-batch's tokens, from the policy's hidden states."""
    objective = OBJECTIVES[config.loss_type](config)
    logprobs_of = _logprobs_of(engine, config, temperature)

    def loss(hidden: Tensor, head: Head, packed: Packed, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return objective(*logprobs_of(hidden, head, packed), streams, packed.samples)

    return loss


def value_loss(config: TrainConfig) -> LossFunction:
    """The same for the critic."""
    objective = value_objective(config)

    def loss(hidden: Tensor, head: Head, packed: Packed, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return objective(_values(hidden, head, packed), streams)

    return loss


def update(engine: MegatronEngine, steps: Steps, loss: LossFunction, routing: Routing | None = None) -> list[Metrics]:
    """All optimizer steps of the round. Returns the metrics of each."""

    def weighed(hidden: Tensor, head: Head, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        assert packed.streams is not None and packed.weights is not None, "not handed out"
        losses, watched = loss(hidden, head, packed, packed.streams)  # [n]
        sums = {name: (packed.weights * values.detach()).sum() for name, values in {"train/loss": losses, **watched}.items()}
        return (packed.weights * losses).sum(), sums

    return over_ranks(engine, [_optimizer_step(engine, microbatches, weighed, routing) for microbatches in steps])


def _optimizer_step(
    engine: MegatronEngine, microbatches: list[Packed], loss_fn: Callable[..., Any], routing: Routing | None
) -> dict[str, Any]:
    """One update. Returns this rank's share of the metrics: sums on the last stage, grad norm and learning rate everywhere."""
    engine.zero_grad()
    outputs = engine.forward_backward(microbatches, loss_fn, forward_only=False, routing=routing)
    learning_rate = engine.lr
    updated, grad_norm = engine.step()
    reach("train-mid-step")  # weights changed, gradients there, the rank unclean; more optimizer steps of this round may follow
    assert updated, "the optimizer skipped a step"
    sums = {name: torch.stack([output[name] for output in outputs]).double().sum() for name in (outputs[0] if outputs else ())}
    return {"sums": sums, "alike": {"train/grad_norm": grad_norm, "train/lr-pg_0": learning_rate}}
