"""Compute a stored case: what the algorithms return for a seeded rollout, in float64.

A case is JSON: the public option names of the trainer's configuration, the sizes of a rollout (or of logits), and a
seed. When functions of the product are renamed, adapt this file, and neither the cases nor their outputs
(`make_stored_cases.py`).
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.experience import Estimate, Experience, TokenFields
from penstock.stages.train.algorithms.logprobs import token_logprobs
from penstock.stages.train.algorithms.losses import LOSSES, value_loss
from penstock.stages.train.batching import Batch
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import compute_loss_weights, plan_steps
from penstock.stages.train.step import needs_old_logprobs
from penstock.storage.errors import PluginError

Case = dict[str, Any]
Outputs = dict[str, np.ndarray]


def compute(case: Case, group: dist.ProcessGroup | None = None) -> Outputs:
    """Return all numbers of a case, each a flat float64 array.

    Args:
        case: described in make_stored_cases.py.
        group: the two ranks that share each sequence, or the vocabulary if the case is about logits.
    """
    try:
        outputs = _logits_case(case, group) if "logits" in case else _rollout_case(case, group)
    except PluginError:
        outputs = {"plugin_error": torch.ones(1)}
    return {name: tensor.detach().double().flatten().numpy() for name, tensor in outputs.items()}


def _rollout_case(case: Case, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return advantages, losses, gradients and metrics of every optimizer step, as step.py does."""
    config = TrainConfig(**case["options"])
    batch, numbers = make_rollout(Rollout(**case["rollout"]), case["seed"])
    steps, weights = plan_steps(_engine(group), batch, config), compute_loss_weights(batch, config)
    experience = Experience(
        sample_index=torch.from_numpy(batch.sample_index),
        rewards=torch.from_numpy(batch.rewards),
        group_index=torch.from_numpy(batch.group_index),
        trajectory_index=torch.from_numpy(batch.trajectory_index),
        reward_components={
            name: torch.from_numpy(batch.rewards**power) for power, name in enumerate(config.gdpo_reward_weights, 1)
        },
        rollout_logprobs=numbers["rollout_logprobs"],
        ref_logprobs=numbers["ref_logprobs"] if config.uses_reference else None,
        teacher_logprobs=numbers["teacher_logprobs"] if config.opd else None,
        values=numbers["values"] if config.uses_critic else None,
    )
    if config.use_rollout_logprobs:
        experience.old_logprobs = experience.rollout_logprobs
    elif needs_old_logprobs(config, len(steps)):
        experience.old_logprobs = numbers["old_logprobs"]
    estimated = estimate_advantages(experience, config)

    fields = {
        **{name: getattr(experience, name) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")},
        **{"advantages": estimated.advantages, "returns": estimated.returns, "pg_scale": weights.pg_scale},
    }
    fields = {name: values for name, values in fields.items() if values is not None}
    losses_of: dict[str, Any] = {"policy": lambda *args: LOSSES[config.loss_type](*args, config)}
    inputs = {"policy": [numbers["logprobs"], numbers["entropy"]]}
    if config.uses_critic:
        losses_of["critic"] = lambda values, fields, samples: value_loss(values, fields, config)
        inputs["critic"] = [numbers["new_values"]]

    per_token: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(len(steps), dtype=torch.float64))
    for model, loss_of in losses_of.items():
        leaves = [values.clone().requires_grad_() for values in inputs[model]]
        losses = per_token[f"{model} loss"] = torch.zeros(len(leaves[0]), dtype=torch.float64)
        for step, packed in ((step, packed) for step, microbatches in enumerate(steps) for packed in microbatches):
            token_fields = TokenFields(**{name: values[packed.ordinal] for name, values in fields.items()})
            loss, metrics = loss_of(*(leaf[packed.ordinal] for leaf in leaves), token_fields, packed.samples)
            token_weights = weights.weights[packed.ordinal]
            (token_weights * loss).sum().backward()
            losses[packed.ordinal] = loss.detach()
            for name, values in {f"{model} mean loss": loss, **metrics}.items():
                sums[name][step] += (token_weights * values.detach()).sum()
        for name, leaf in zip(("gradient", "entropy gradient"), leaves, strict=False):
            per_token[f"{model} {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if group is not None:  # each rank has added its own tokens to zeros
        for tensor in (*per_token.values(), *sums.values()):
            dist.all_reduce(tensor, group=group)
    means = {name: torch.tensor([weights.mean_over_steps(values)]) for name, values in estimated.metrics.items()}
    returns = {} if estimated.returns is None else {"returns": estimated.returns}
    return {"advantages": estimated.advantages, **returns, **per_token, **sums, **means}


def _engine(group: dist.ProcessGroup | None) -> Any:
    """Return the engine that `plan` needs: one data-parallel rank; context-parallel ranks have a half of the tokens."""

    def pack_stream(packed: Any) -> Any:
        middle, total = len(packed.token_ids) // 2, len(packed.token_ids)
        halves = [slice(0, middle), slice(middle, total)]
        return SimpleNamespace(pack_slice=slice(0, total) if group is None else halves[dist.get_rank(group)])

    return SimpleNamespace(
        data_parallel_rank_and_size=(0, 1),
        device=torch.device("cpu"),
        pack_stream=pack_stream,
        context_group=group,
    )


def _logits_case(case: Case, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return log-probs and entropies of tokens, and gradients with regard to hidden states and output layer."""
    sizes, random = case["logits"], Numbers(case["seed"])
    tokens, vocab, width = sizes["tokens"], sizes["vocab"], sizes["hidden"]
    hidden = random.normal(tokens * width).view(tokens, width).requires_grad_()
    weight = (sizes["scale"] * random.normal(vocab * width)).view(vocab, width).requires_grad_()
    padding = torch.zeros(vocab, dtype=torch.float64)
    padding[vocab - sizes["padded"] :] = -1e30
    targets = random.integers(vocab - sizes["padded"], tokens)
    slice_size = vocab if group is None else vocab // dist.get_world_size(group)
    here = slice(*(slice_size * (edge + (0 if group is None else dist.get_rank(group))) for edge in (0, 1)))
    logprobs, entropy = token_logprobs(
        hidden,
        lambda chunk: chunk @ weight[here].T + padding[here],
        targets,
        temperature=sizes["temperature"],
        chunk_size=sizes["chunk"],
        group=group,
        entropy_gradient=sizes["entropy_gradient"],
    )
    total = (random.normal(tokens) * logprobs).sum()
    if sizes["entropy_gradient"]:
        total = total + (random.normal(tokens) * entropy).sum()
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    if group is not None:
        dist.all_reduce(hidden.grad, group=group)
        dist.all_reduce(weight.grad, group=group)
    return {"logprobs": logprobs, "entropy": entropy, "hidden gradient": hidden.grad, "head gradient": weight.grad}


# ---- two ranks -------------------------------------------------------------------------------------------------------


def compute_on_two_ranks(cases: list[Case], directory: Path) -> list[Outputs]:
    """Return `compute` of every case, by two processes that share each sequence or the vocabulary."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_run_rank, args=(rank, cases, directory, sender), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    sender.close()  # or a rank that dies would never be noticed
    results = receiver.recv()
    for process in ranks:
        process.join()
    return results


def _run_rank(rank: int, cases: list[Case], directory: Path, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/two-ranks", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    group = dist.new_group([0, 1])
    results = [compute(case, group) for case in cases]
    if rank == 0:
        sender.send(results)
    dist.barrier()
    dist.destroy_process_group()


# ---- inputs ----------------------------------------------------------------------------------------------------------


class Numbers:
    """Numbers that depend on the seed alone: PCG64's raw stream, which NumPy keeps stable, as multiples of 2**-20."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def uniform(self, count: int) -> Tensor:
        """Return float64 numbers in [0, 1)."""
        return torch.from_numpy((self.bits.random_raw(count) >> np.uint64(44)).astype(np.float64) * 2.0**-20)

    def normal(self, count: int) -> Tensor:
        """Return sums of 12 uniform numbers less 6: nearly a standard normal distribution, without rounding errors."""
        return self.uniform(12 * count).view(count, 12).sum(1) - 6.0

    def integers(self, bound: int, count: int) -> Tensor:
        """Return int64 numbers in [0, bound)."""
        return torch.from_numpy((self.bits.random_raw(count) % np.uint64(bound)).astype(np.int64))


@dataclass
class Rollout:
    """The sizes of a rollout. Each sample has one prompt token."""

    groups: list[int]  # prompt of each sample
    lengths: list[int]  # response tokens of each sample
    trajectories: list[int] | None = None  # of each sample; one each if not given
    holes: bool = False  # every third response token is a tool's, and not trained
    masked: tuple[int, ...] = ()  # samples that are not trained
    ungraded: tuple[int, ...] = ()  # samples without reward, which are not trained
    rewards: str = "real"  # or "binary", "equal", "none"
    drift: float = 0.2  # standard deviation of the log ratio to the old policy; at 0 the critic is unchanged, too
    mismatch: float = 0.1  # standard deviation of the log ratio of the trainer to the engine


def make_rollout(sizes: Rollout, seed: int) -> tuple[Batch, dict[str, Tensor]]:
    """Return a rollout, and its numbers per trained token: log-probs, entropies, values."""
    random, count = Numbers(seed), len(sizes.groups)
    rewards = {
        "real": lambda: (random.normal(count) * 8).round() / 8,
        "binary": lambda: random.integers(2, count).double(),
        "equal": lambda: torch.full((count,), 0.9, dtype=torch.float64),
        "none": lambda: torch.full((count,), torch.nan, dtype=torch.float64),
    }[sizes.rewards]()
    rewards[list(sizes.ungraded)] = torch.nan
    offsets = np.cumsum([0, *(length + 1 for length in sizes.lengths)])
    loss_mask = np.ones(offsets[-1], dtype=bool)
    for start, end in itertools.pairwise(offsets):
        if sizes.holes:
            loss_mask[start + 2 : end : 3] = False
        loss_mask[start] = False
    for sample in (*sizes.masked, *sizes.ungraded):
        loss_mask[offsets[sample] : offsets[sample + 1]] = False

    n = int(loss_mask.sum())
    numbers = {"old_logprobs": -2.0 * random.uniform(n) - 0.125}
    numbers["logprobs"] = numbers["old_logprobs"] + sizes.drift * random.normal(n)
    numbers["rollout_logprobs"] = numbers["old_logprobs"] - sizes.mismatch * random.normal(n)
    for name in ("ref_logprobs", "teacher_logprobs"):
        numbers[name] = numbers["old_logprobs"] + 0.5 * random.normal(n)
    numbers["entropy"] = 2.0 * random.uniform(n)
    numbers["values"] = random.normal(n)
    numbers["new_values"] = numbers["values"] + (0.25 * random.normal(n) if sizes.drift else 0.0)

    rollout_logprobs = np.zeros(len(loss_mask))
    rollout_logprobs[loss_mask] = numbers["rollout_logprobs"].numpy()
    batch = Batch(
        offsets=offsets,
        token_ids=random.integers(32, len(loss_mask)).numpy(),
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        rewards=rewards.numpy(),
        group_index=np.array(sizes.groups),
        trajectory_index=np.arange(count) if sizes.trajectories is None else np.array(sizes.trajectories),
    )
    return batch, numbers


# ---- user-defined functions, with the interface of docs/algorithms.md ------------------------------------------------


def custom_advantages(experience: Any, options: Any) -> Tensor:
    """Return the reward of the sample, less a part of the token's log-prob."""
    return experience.rewards[experience.sample_index] - 0.25 * experience.old_logprobs


def custom_advantages_and_returns(experience: Any, options: Any) -> Estimate:
    """Return the same with returns for a critic."""
    advantages = custom_advantages(experience, options)
    return Estimate(advantages, returns=advantages + experience.values)


def custom_advantages_of_wrong_shape(experience: Any, options: Any) -> Tensor:
    """Return a number per sample, which is an error."""
    return experience.rewards


def custom_loss(
    logprobs: Tensor, entropy: Tensor, fields: Any, samples: Any, options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return REINFORCE with a bonus, and metrics with and without a prefix."""
    loss = -fields.advantages * samples.mean(logprobs) - 0.125 * entropy
    return loss, {"surprise": -logprobs, "custom/gap": logprobs - fields.rollout_logprobs}


def custom_loss_of_wrong_shape(
    logprobs: Tensor, entropy: Tensor, fields: Any, samples: Any, options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one number, which is an error."""
    return logprobs.sum(), {}


def custom_correction(
    old: Tensor, rollout: Tensor, samples: Any, options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weight tokens by the gap to the engine, and reject samples with a large mean gap."""
    gap = (old - rollout).abs()
    return 1 / (1 + gap), (samples.mean(gap) < 0.1).to(gap.dtype), {"gap": gap}


def custom_correction_of_wrong_shape(
    old: Tensor, rollout: Tensor, samples: Any, options: Any
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """Return one weight, which is an error."""
    return old.mean(), None, {}


def custom_weights(trajectory_index: Tensor, sample_index: Tensor, num_trajectories: int) -> Tensor:
    """Weight later samples more."""
    return (1.0 + sample_index) / (8.0 * num_trajectories)


def custom_weights_of_wrong_shape(trajectory_index: Tensor, sample_index: Tensor, num_trajectories: int) -> Tensor:
    """Return one weight, which is an error."""
    return torch.ones(1 + len(sample_index))
