"""One round of training on one rank: plan, log-probs and values before the update, advantages, optimizer steps.

This module and influence.py are the only ones that use both the algorithms and the training engine. The engine adds up
gradients over micro-batches and ranks without averaging, and does not scale the loss: the token weights contain all
denominators, so the sum of weight x value over all tokens is the mean over the optimizer step. Every rank holds the
data of all N trained tokens of the rollout, so every rank computes the same advantages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.training import OutputHead, Routing, TrainEngine
from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.divergences import (
    DIVERGENCE_TERMS,
    Teacher,
    TeacherHidden,
    TeacherTopK,
    replace_rows,
    top_k,
    vocabulary_divergence,
)
from penstock.stages.train.algorithms.experience import Estimate, Experience, TokenFields
from penstock.stages.train.algorithms.logprobs import LMHead, in_chunks, logits_logprobs, token_logprobs
from penstock.stages.train.algorithms.losses import LOSSES, value_loss
from penstock.stages.train.algorithms.postprocess import postprocess_rollout
from penstock.stages.train.batching import Batch, PackedMicrobatch, train_flops
from penstock.stages.train.build import Models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import (
    LossWeights,
    Steps,
    compute_loss_weights,
    count_sample_uses,
    order_steps,
    plan_steps,
)
from penstock.storage.errors import RunError
from penstock.storage.failpoints import failpoint

Metrics = dict[str, float]
PHASES = {  # phase -> name of the metric with its wall-clock seconds
    "old_logprobs": "perf/log_probs_time",
    "ref_logprobs": "perf/ref_log_probs_time",
    "teacher_logprobs": "perf/teacher_log_probs_time",
    "values": "perf/values_time",
    "critic": "perf/critic_train_time",
    "update": "perf/actor_train_time",
}
Forward = Callable[[Tensor, LMHead, PackedMicrobatch], Tensor]  # hidden [r, H] -> one number per trained token [n]
MicrobatchLoss = Callable[[Tensor, LMHead, PackedMicrobatch, TokenFields], tuple[Tensor, dict[str, Tensor]]]
Trace = Callable[[str], AbstractContextManager[object]]  # part of a round -> block in which the part may be profiled


@dataclass
class TrainedRound:
    """Metrics and phase times of one round of training, and the data that it was trained on."""

    metrics: Metrics  # means over the optimizer steps
    steps: list[Metrics]  # metrics of each optimizer step, in order
    seconds: dict[str, float]  # phase -> wall-clock seconds
    batch: Batch  # the rollout, with the loss masks that were applied
    experience: Experience
    estimate: Estimate
    tokens: dict[str, Tensor]  # column of trained-tokens.parquet -> [N] float64; only what this round has computed
    sample_uses: np.ndarray  # [B] number of optimizer steps that each sample was trained in


class PreparedRound(NamedTuple):
    """What a round trains on. The micro-batches of `steps` have their loss inputs."""

    batch: Batch  # the rollout, with the loss masks that are applied
    steps: Steps
    weights: LossWeights
    experience: Experience
    estimate: Estimate


def train_rollout(
    models: Models,
    batch: Batch,
    config: TrainConfig,
    *,
    temperature: float = 1.0,
    critic_only: bool = False,
    trace: Trace = nullcontext,
    keep_tokens: bool = False,
) -> TrainedRound:
    """Train on all samples of a rollout and return the metrics.

    Args:
        models: policy, and the critic, reference and teacher that `config` requires.
        batch: the whole rollout, the same on every rank.
        temperature: sampling temperature of the rollout; the policy's logits are divided by it.
        critic_only: train only the critic; the policy is not updated.
        trace: wraps the parts "train_log_probs" (before the update) and "train_actor" (the update).
        keep_tokens: also return log-probs and entropies of the update, if they are to be stored.
    """
    clock = Clock()
    for engine in (models.policy, models.critic) if config.reset_optimizer_states else ():
        if engine is not None:
            engine.reset_optimizer_states()
    batch, steps, weights, experience, estimate = prepare_round(models, batch, config, temperature, clock, trace)
    has_old_logprobs = experience.old_logprobs is not None and not config.use_rollout_logprobs
    only_now = {  # values of the tokens that exist in the update only -> whether they are stored
        "step_logprobs": config.loss_type != "sft_loss" and (config.keep_step_logprobs or not has_old_logprobs),
        "entropy": config.entropy_coef != 0 or config.loss_type == "custom_loss",
        "divergence": config.distills_vocabulary,
    }
    names = [name for name, is_stored in only_now.items() if is_stored and keep_tokens and not critic_only]
    kept = {name: torch.zeros(len(batch.trained_positions), device=models.policy.device) for name in names}
    logprobs_of = partial(policy_logprobs, engine=models.policy, config=config, temperature=temperature)
    loss = partial(policy_microbatch_loss, logprobs_of=logprobs_of, config=config, kept=kept)
    order = order_steps(len(steps), config, batch.rollout_id)
    with trace("train_actor"):
        per_step = train_models(models, [steps[step] for step in order], config, loss, clock, critic_only)
    kept = {name: sum_token_values(models.policy, values) for name, values in kept.items()}
    metrics = {name: float(np.mean([step[name] for step in per_step])) for name in per_step[0]}
    metrics |= {name: value for name, value in per_step[-1].items() if "lr-pg" in name}
    rollout_metrics = {"rollout/advantages": estimate.advantages, **estimate.metrics}
    metrics |= {name: weights.mean_over_steps(values) for name, values in rollout_metrics.items()}
    metrics |= speed_metrics(models.policy, batch, clock.seconds, config.ppo_epochs, not config.freeze_vision)
    tokens, uses = token_columns(config, experience, estimate, kept), count_sample_uses(batch, config, order)
    return TrainedRound(metrics, per_step, clock.seconds, batch, experience, estimate, tokens, uses)


def train_models(
    models: Models, steps: Steps, config: TrainConfig, policy_loss: MicrobatchLoss, clock: Clock, critic_only: bool
) -> list[Metrics]:
    """Run the optimizer steps of the critic, if there is one, and of the policy, unless `critic_only`. Return the
    metrics of each step."""
    per_step: list[Metrics] = [{} for _ in steps]
    if models.critic is not None:
        with clock("critic"):
            critic_steps = run_optimizer_steps(
                models.critic,
                steps,
                lambda hidden, head, packed, fields: value_loss(critic_values(hidden, head, packed), fields, config),
            )
        per_step = [
            {name.replace("train/", "train/critic-"): value for name, value in step.items()} for step in critic_steps
        ]
    if not critic_only:
        with clock("update"):
            policy_steps = run_optimizer_steps(
                models.policy, steps, policy_loss, routing=choose_update_routing(config, len(steps))
            )
        per_step = [critic | policy for critic, policy in zip(per_step, policy_steps)]
    return per_step


# ---- before the update -----------------------------------------------------------------------------------------------


def prepare_round(
    models: Models, batch: Batch, config: TrainConfig, temperature: float, clock: Clock, trace: Trace = nullcontext
) -> PreparedRound:
    """Return what a round trains on: plan its optimizer steps, compute the log-probs and values that are needed before
    the update, and the advantages, and set the loss inputs of all micro-batches."""
    with clock("plan"):
        steps, weights = plan_steps(models.policy, batch, config), compute_loss_weights(batch, config)
    with trace("train_log_probs"):
        experience = gather_experience(models, steps, batch, config, temperature, clock)
    with clock("advantages"):
        estimate = estimate_advantages(experience, config)
        if path := config.rollout_data_postprocess_path:
            masked, experience, estimate = postprocess_rollout(path, batch, experience, estimate, config)
            if masked is not batch:
                batch, steps = masked, plan_steps(models.policy, masked, config)
                weights = compute_loss_weights(batch, config)
        attach_token_fields(steps, experience, estimate, weights, models.policy.device)
    return PreparedRound(batch, steps, weights, experience, estimate)


def gather_experience(
    models: Models, steps: Steps, batch: Batch, config: TrainConfig, temperature: float, clock: Clock
) -> Experience:
    """Run the forward passes that the algorithm needs before any update: log-probs of reference, teacher and policy,
    and values of the critic."""
    experience = stored_experience(batch)

    def logprobs(hidden: Tensor, head: LMHead, packed: PackedMicrobatch) -> Tensor:
        return policy_logprobs(hidden, head, packed, models.policy, config, temperature)[0]

    def compute_logprobs(routing: Routing | None = None) -> Tensor:
        return forward_all_tokens(models.policy, steps, len(batch.trained_positions), logprobs, routing)

    if (using_reference := models.using_reference()) is not None:
        with clock("ref_logprobs"), using_reference:
            experience.ref_logprobs = compute_logprobs()
    if config.distills_vocabulary:
        with clock("teacher_logprobs"):
            attach_teachers(models, steps, batch, config, temperature)
    elif config.loads_teacher or config.hinted:
        with clock("teacher_logprobs"):
            experience.teacher_logprobs = torch.zeros(len(batch.trained_positions), dtype=torch.float64)
            for is_own, using_teacher in zip(_teacher_masks(batch, config), models.using_teachers(config)):
                with using_teacher:
                    asked = forward_all_tokens(models.policy, _seen_by_teacher(steps), len(is_own), logprobs)
                experience.teacher_logprobs = torch.where(is_own, asked, experience.teacher_logprobs)
    if models.critic is not None:
        with clock("values"):
            experience.values = forward_all_tokens(models.critic, steps, len(batch.trained_positions), critic_values)
    if config.use_rollout_logprobs:
        experience.old_logprobs = experience.rollout_logprobs
    elif needs_old_logprobs(config, len(steps)):
        with clock("old_logprobs"):
            routing = "record" if config.use_routing_replay else choose_update_routing(config, len(steps))
            experience.old_logprobs = compute_logprobs(routing=routing)
    if batch.num_new is not None and experience.old_logprobs is not None:
        experience.old_logprobs = _with_stored_logprobs(batch, experience)
    return experience


def _with_stored_logprobs(batch: Batch, experience: Experience) -> Tensor:  # [N]
    """Return the old log-probs, which for replayed samples are those of the engine at sampling. Raises RunError if the
    samples have none."""
    assert experience.old_logprobs is not None and batch.num_new is not None
    is_replayed, sampled = experience.sample_index >= batch.num_new, experience.rollout_logprobs
    if is_replayed.any() and not sampled[is_replayed].any():
        raise RunError(
            "the stored samples that --replay-share replays have no log-probs of the policy that generated them: fork "
            "the run without --replay-share, or return log-probs from the user-defined rollout"
        )
    return torch.where(is_replayed, sampled, experience.old_logprobs)


def stored_experience(batch: Batch) -> Experience:
    """Return what the samples themselves tell about a rollout: rewards, groups, log-probs of engine and teacher."""
    positions, teacher = batch.trained_positions, batch.teacher_logprobs
    return Experience(
        sample_index=torch.from_numpy(batch.sample_index),
        rewards=torch.from_numpy(batch.rewards if batch.train_rewards is None else batch.train_rewards),
        reward_components={name: torch.from_numpy(values) for name, values in batch.reward_components.items()},
        normalize_rewards=batch.train_rewards is None,
        group_index=torch.from_numpy(batch.group_index),
        trajectory_index=torch.from_numpy(batch.trajectory_index),
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[positions]).double(),
        teacher_logprobs=None if teacher is None else torch.from_numpy(teacher[positions]).double(),
    )


def needs_old_logprobs(config: TrainConfig, num_steps: int) -> bool:
    """Return whether the policy's log-probs before the update need a separate forward pass. With one optimizer step and
    one epoch they equal the log-probs of the training pass, so the separate pass is needed only if the advantages
    depend on them, or if replayed samples have others. `num_steps`: optimizer steps per epoch."""
    functions = (config.custom_advantage_function_path, config.rollout_data_postprocess_path)
    subtracts_log_ratio = config.opd is not None and not config.distills_vocabulary
    needed = config.kl_coef > 0 or subtracts_log_ratio or any(functions) or config.replay is not None
    return config.loss_type != "sft_loss" and (num_steps * config.ppo_epochs > 1 or needed)


def choose_update_routing(config: TrainConfig, num_steps: int) -> Routing | None:
    """Return the expert routing of the update: "replay" for recorded expert ids, None if the routers choose again."""
    recorded = config.use_routing_replay and not config.use_rollout_logprobs and needs_old_logprobs(config, num_steps)
    return "replay" if recorded or config.use_rollout_routing_replay else None


def forward_all_tokens(
    engine: TrainEngine, steps: Steps, num_tokens: int, forward: Forward, routing: Routing | None = None
) -> Tensor:  # [N] float64
    """Run `forward` on all micro-batches and return its results for all N trained tokens of the rollout, on every rank.

    Each token is computed on one rank and all-reduced with the zeros of the other ranks, which is exact, so every rank
    gets the same bits.
    """
    result = torch.zeros(num_tokens, device=engine.device)

    def store_results(hidden: Tensor, head: LMHead, packed: PackedMicrobatch) -> tuple[None, dict[str, Tensor]]:
        result[packed.ordinal] = forward(hidden, head, packed)
        return None, {}

    for microbatches in steps:
        engine.forward_backward(microbatches, store_results, forward_only=True, routing=routing)
    return sum_token_values(engine, result)


def sum_token_values(engine: TrainEngine, values: Tensor) -> Tensor:  # [N] -> [N] float64
    """Return the values of all trained tokens of the rollout. In `values` each rank has only the values that it
    computed, and zeros elsewhere."""
    if engine.tensor_group is not None and engine.tensor_group.rank() > 0:
        values.zero_()  # all tensor-parallel ranks hold the same values: add only those of rank 0
    dist.all_reduce(values)
    return values.cpu().double()


def attach_teachers(models: Models, steps: Steps, batch: Batch, config: TrainConfig, temperature: float) -> None:
    """Set the teacher's distribution at every trained token of every micro-batch: those that the samples store, or
    those that the teachers in the trainer compute now. A micro-batch whose teachers see other prompts has the same
    tokens in the same order as the one that the policy sees."""
    assert config.opd is not None
    if batch.teacher_top_k is not None:
        for packed in (packed for microbatches in steps for packed in microbatches):
            ids, logprobs = (torch.from_numpy(values)[packed.ordinal.cpu()] for values in batch.teacher_top_k)
            packed.teacher = TeacherTopK.from_logprobs(ids.long(), logprobs)
        return
    policy, k, heads = models.policy, config.opd.opd_top_k, list[OutputHead]()
    teacher = torch.zeros(len(batch.trained_positions), dtype=torch.int64)
    for number, mask in enumerate(_teacher_masks(batch, config)):
        teacher[mask] = number

    def store(hidden: Tensor, head: LMHead, packed: PackedMicrobatch, number: int) -> tuple[None, dict[str, Tensor]]:
        of_tokens, asked = teacher[packed.ordinal.cpu()], hidden[packed.trained]
        if k is None:
            new: Teacher = TeacherHidden(asked.cpu(), heads, of_tokens)
        else:
            parts = [top_k(head(rows), k, temperature, policy.tensor_group) for rows in asked.split(chunk_size)]
            new = TeacherTopK(*(torch.cat(part).cpu() for part in zip(*((part.ids, part.logprobs) for part in parts))))
        packed.teacher = replace_rows(packed.teacher, new, of_tokens == number)
        return None, {}

    chunk_size = config.log_probs_chunk_size
    for number, using_teacher in enumerate(models.using_teachers(config)):
        with using_teacher:
            if k is None and policy.is_last_stage:
                heads.append(policy.copy_head())
            for microbatches in _seen_by_teacher(steps):
                policy.forward_backward(microbatches, partial(store, number=number), forward_only=True)
    for packed in (packed for microbatches in steps for packed in microbatches):
        packed.teacher = (packed.hinted or packed).teacher


def _seen_by_teacher(steps: Steps) -> Steps:
    """Return the micro-batches with the prompts that the teacher sees."""
    return [[packed.hinted or packed for packed in microbatches] for microbatches in steps]


def _teacher_masks(batch: Batch, config: TrainConfig) -> list[Tensor]:  # [N] bool each
    """Return for each teacher in the trainer which trained tokens it has."""
    index = np.zeros(len(batch.lengths), np.int64) if batch.teacher_index is None else batch.teacher_index
    return [torch.from_numpy(index[batch.sample_index] == number) for number in range(len(config.teacher_names))]


def policy_logprobs(
    hidden: Tensor,
    head: LMHead,
    packed: PackedMicrobatch,
    engine: TrainEngine,
    config: TrainConfig,
    temperature: float,
) -> tuple[Tensor, ...]:  # [n], [n]; in the update with --opd-divergence a third [n]
    """Return the log-prob of each trained token, the entropy of the distribution at its position, in nats, and its
    divergence from the teacher's distribution."""
    inputs = hidden[packed.trained], packed.targets  # the LM head runs only on trained positions, never on the prompt
    group, chunk_size, entropy_gradient = engine.tensor_group, config.log_probs_chunk_size, config.entropy_coef != 0
    teacher = packed.teacher if torch.is_grad_enabled() else None
    if teacher is None or config.opd is None or config.opd.opd_divergence is None:
        return token_logprobs(
            inputs[0],
            head,
            inputs[1],
            temperature=temperature,
            chunk_size=chunk_size,
            group=group,
            entropy_gradient=entropy_gradient,
        )
    divergence = partial(DIVERGENCE_TERMS[config.opd.opd_divergence], beta=config.opd.opd_jsd_beta)

    def compute_chunk(hidden: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden)
        distance = vocabulary_divergence(logits, rows, teacher, divergence, temperature, group)
        return *logits_logprobs(logits, targets, temperature, group, entropy_gradient), distance

    return in_chunks(compute_chunk, chunk_size, *inputs, torch.arange(len(packed.targets), device=hidden.device))


def critic_values(hidden: Tensor, head: LMHead, packed: PackedMicrobatch) -> Tensor:  # [n] float32
    """Return the critic's value at the position before each trained token; the temperature is not applied."""
    return head(hidden[packed.trained])[:, 0].float()


# ---- the update ------------------------------------------------------------------------------------------------------


def attach_token_fields(
    steps: Steps, experience: Experience, estimate: Estimate, weights: LossWeights, device: torch.device
) -> None:
    """Set the loss inputs (`fields`) and the loss weights (`weights`) of every micro-batch, as float32 on `device`."""
    optional_fields = {
        **{name: getattr(experience, name) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")},
        "advantages": estimate.advantages,
        "returns": estimate.returns,
        "pg_scale": weights.pg_scale,
    }
    fields = {name: values.to(device, torch.float32) for name, values in optional_fields.items() if values is not None}
    loss_weights = weights.weights.to(device, torch.float32)
    for packed in (packed for microbatches in steps for packed in microbatches):
        packed.fields = TokenFields(**{name: values[packed.ordinal] for name, values in fields.items()})
        packed.weights = loss_weights[packed.ordinal]


def policy_microbatch_loss(
    hidden: Tensor,
    head: LMHead,
    packed: PackedMicrobatch,
    fields: TokenFields,
    *,
    logprobs_of: Callable[[Tensor, LMHead, PackedMicrobatch], tuple[Tensor, ...]],
    config: TrainConfig,
    kept: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss [n] and metrics ([n] each) of a micro-batch, computed from the policy's hidden states.
    The tensors of `kept` ([N] each) get the values of this micro-batch's tokens where they are 0: later epochs do not
    change them."""
    computed = dict(zip(("step_logprobs", "entropy", "divergence"), logprobs_of(hidden, head, packed)))
    logprobs, entropy = computed["step_logprobs"], computed["entropy"]
    fields = replace(fields, divergence=computed.get("divergence"))
    for name, values in kept.items():
        before, now = values[packed.ordinal], computed[name].detach().to(values.dtype)
        values[packed.ordinal] = torch.where(before == 0, now, before)
    return LOSSES[config.loss_type](logprobs, entropy, fields, packed.samples, config)


def run_optimizer_steps(
    engine: TrainEngine, steps: Steps, loss: MicrobatchLoss, routing: Routing | None = None
) -> list[Metrics]:
    """Run all optimizer steps of the round and return the metrics of each step, summed over all ranks."""

    def weighted_loss(hidden: Tensor, head: LMHead, packed: PackedMicrobatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert packed.fields is not None and packed.weights is not None, "attach_token_fields was not called"
        losses, metrics = loss(hidden, head, packed, packed.fields)  # [n]
        sums = {
            name: (packed.weights * values.detach()).sum() for name, values in {"train/loss": losses, **metrics}.items()
        }
        return (packed.weights * losses).sum(), sums

    results = []
    for microbatches in steps:
        outputs = engine.forward_backward(microbatches, weighted_loss, routing=routing)
        updated, grad_norm, learning_rates = engine.optimizer_step()
        failpoint("train-mid-step")  # weights changed, PolicyState.clean is False, more optimizer steps may follow
        assert updated, "the optimizer skipped the step"
        names = outputs[0] if outputs else ()  # only the last pipeline stage has outputs
        sums: dict[str, Any] = {name: torch.stack([out[name] for out in outputs]).double().sum() for name in names}
        replicated = {f"train/lr-pg_{index}": rate for index, rate in enumerate(learning_rates)}
        replicated["train/grad_norm"] = grad_norm
        results.append({"partial_sums": sums, "replicated": replicated})
    return sum_over_ranks(engine, results)


# ---- what is stored of the trained tokens ----------------------------------------------------------------------------


def token_columns(
    config: TrainConfig, experience: Experience, estimate: Estimate, kept: dict[str, Tensor]
) -> dict[str, Tensor]:  # [N] each
    """Return the columns of trained-tokens.parquet. Without the trainer's log-probs before the update, those of the
    update take their place."""
    columns = {"advantages": estimate.advantages.cpu(), **kept, "values": experience.values}
    columns |= {"ref_logprobs": experience.ref_logprobs, "trainer_logprobs": experience.old_logprobs}
    columns["trainer_teacher_logprobs"] = None if config.reads_teacher_logprobs else experience.teacher_logprobs
    if config.use_rollout_logprobs or experience.old_logprobs is None:
        columns["trainer_logprobs"] = columns.pop("step_logprobs", None)
    return {name: values for name, values in columns.items() if values is not None}


# ---- metrics ---------------------------------------------------------------------------------------------------------


def sum_over_ranks(engine: TrainEngine, steps: list[dict[str, Any]]) -> list[Metrics]:
    """Sum the metrics of every optimizer step over all ranks, with one all-gather for the whole round. The ranks of a
    tensor-parallel group hold the same values; only its first rank is counted.

    Args:
        engine: its parallel layout tells which ranks are counted.
        steps: one dictionary per optimizer step: {"partial_sums": metric -> this rank's part of the sum,
            "replicated": metric -> value that is equal on all ranks}.
    """
    counted = engine.tensor_group is None or engine.tensor_group.rank() == 0
    own = [{name: float(value) for name, value in step["partial_sums"].items()} if counted else {} for step in steps]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    shares = [share for share in shares if share[0]]
    return [
        {name: sum(share[i][name] for share in shares) for name in shares[0][i]} | step["replicated"]
        for i, step in enumerate(steps)
    ]


def speed_metrics(
    engine: TrainEngine, batch: Batch, seconds: dict[str, float], num_epochs: int, trains_vision: bool
) -> Metrics:
    """Return the seconds of each phase and, for the policy update, tokens/s (all GPUs), TFLOP/s per GPU and MFU. The
    update trains on each token in `num_epochs` optimizer steps."""
    metrics = {metric: seconds[name] for name, metric in PHASES.items() if name in seconds}
    if "update" not in seconds:
        return metrics
    num_tokens = num_epochs * len(batch.token_ids)
    samples, frozen = np.arange(len(batch.lengths)), engine.lora is not None
    flops = train_flops(engine.shape, batch, samples, frozen=frozen, trains_vision=trains_vision)
    rate = num_epochs * flops / dist.get_world_size() / seconds["update"]
    metrics |= {"perf/actor_train_tok_per_s": num_tokens / seconds["update"], "perf/actor_train_tflops": rate / 1e12}
    peak = engine.peak_flops
    return metrics | ({"perf/actor_train_mfu": rate / peak} if peak else {})


class Clock:
    """Timer of phases: `with clock("update"):` stores the phase's wall-clock seconds after synchronizing the GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start
