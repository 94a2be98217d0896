"""Compute the advantages of a whole rollout: KL penalty, estimator, distillation, whitening, in this order.

The estimators are in `estimators.py`, and registered in `registry.py`. `step.py` computes the log-probs and values that
they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from penstock.stages.plugins import DEFAULT_NAMES, describe_error, load_function
from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.experience import Estimate, Experience
from penstock.stages.train.algorithms.losses import kl_estimate
from penstock.stages.train.algorithms.registry import ESTIMATORS
from penstock.stages.train.reuse import cosine
from penstock.storage.errors import PluginError, check_rules

T = TypeVar("T")
VARIANCE_EPSILON = 1e-8
ADVICE = (
    "make it depend on its arguments alone, and not on random numbers, the time, or the files and variables of one "
    "process"
)


def estimate_advantages(experience: Experience, config: AlgorithmConfig) -> Estimate:
    """Return the advantages of all trained tokens of a rollout. Raises PluginError if the user-defined estimator does
    not return one finite number per token, or it fails or returns different results on some ranks."""
    if config.custom_advantage_function_path is not None:
        path = config.custom_advantage_function_path
        estimate = call_on_every_rank(
            lambda: call_custom_estimator(path, experience, config),
            lambda estimate: (estimate.advantages, estimate.returns),
            f"--custom-advantage-function-path {path}",
        )
    else:
        kl_penalty, metrics = torch.zeros_like(experience.rollout_logprobs, dtype=torch.float64), {}
        if config.kl_coef:
            assert experience.ref_logprobs is not None, "--kl-coef needs the reference's log-probs"
            policy = experience.policy_logprobs(config.use_rollout_logprobs)
            kl = kl_estimate(policy.double(), experience.ref_logprobs.double(), config.kl_loss_type)
            kl_penalty, metrics = config.kl_coef * kl, {"rollout/kl": kl}
        estimator = load_function(ESTIMATORS[config.advantage_estimator].function)
        estimate = estimator(experience, kl_penalty, config)
        estimate = replace(estimate, metrics=estimate.metrics | metrics)
    if config.opd is not None and not config.distills_vocabulary:
        policy = experience.policy_logprobs(config.use_rollout_logprobs)
        estimate = subtract_teacher_kl(estimate, policy, experience.teacher_logprobs, config.opd.opd_kl_coef)
    if config.normalize_advantages:
        estimate = replace(estimate, advantages=whiten(estimate.advantages))
    return estimate


def subtract_teacher_kl(
    estimate: Estimate, policy_logprobs: Tensor, teacher_logprobs: Tensor | None, coefficient: float
) -> Estimate:
    """Return the advantages A_t - coefficient x (log pi_old - log pi_teacher): on-policy distillation (arXiv
    2306.13649), with the one-sample estimate of the reverse KL as a penalty on each token."""
    assert teacher_logprobs is not None, "distillation needs the teacher's log-probs"
    reverse_kl = policy_logprobs - teacher_logprobs
    return replace(
        estimate,
        advantages=estimate.advantages - coefficient * reverse_kl,
        metrics=estimate.metrics | {"rollout/opd_reverse_kl": reverse_kl},
    )


def whiten(advantages: Tensor) -> Tensor:  # [N] -> [N]
    """Return (A - mean) / sqrt(unbiased variance + 1e-8); equal advantages give exactly 0."""
    if not len(advantages):
        return advantages
    # subtract the minimum first: the mean of equal advantages may differ from them by a rounding error
    above = advantages - advantages.min()
    deviations = above - above.mean()
    variance = deviations.square().sum() / max(len(advantages) - 1, 1)
    return deviations * (variance + VARIANCE_EPSILON).rsqrt()


def compare_advantages(
    rewards: Sequence[np.ndarray],  # old and new, [B] each; NaN = no reward
    group_index: np.ndarray,  # [B]
    trajectory_index: np.ndarray,  # [B]
    num_tokens: np.ndarray,  # [B] trained tokens of each sample
    config: AlgorithmConfig,
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return the advantages [B] of a round with its old and with new rewards, and metrics of the difference.

    The advantage of a sample is that of its last trained token, from rewards alone: without critic, teacher and KL
    penalty. If the log-prob gradients of different tokens are uncorrelated and equally long, the expected product of
    two policy gradients is the sum over the samples of T w w' A A', with T tokens of loss weight w: `gradient_cosine`
    and `gradient_ratio` (of the norms) follow from the vectors sqrt(T) w A [B].
    """
    advantages, gradients = [], []
    for of_samples in rewards:
        advantages.append(_advantages_from_rewards(of_samples, group_index, trajectory_index, num_tokens, config))
        trained = np.where(np.isnan(of_samples), 0, num_tokens)
        weights = _loss_weights(trained, group_index, trajectory_index, config)
        gradients.append(np.sqrt(trained) * weights * advantages[-1])
    (old, new), norms = advantages, [float(np.linalg.norm(each)) for each in gradients]
    metrics = {"changed_advantages": float((old != new).sum()), "changed_signs": float((old * new < 0).sum())}
    metrics |= {"gradient_cosine": cosine(*gradients)}
    metrics |= {"gradient_ratio": norms[1] / norms[0]} if norms[0] else {}
    return advantages, metrics


def _loss_weights(
    num_tokens: np.ndarray, group_index: np.ndarray, trajectory_index: np.ndarray, config: AlgorithmConfig
) -> np.ndarray:  # [B]
    """Return the weight of each trained token of a sample in the policy-gradient loss of one optimizer step, as
    `compute_loss_weights` does for single tokens, which take too much memory here."""
    units = group_index if config.calculate_per_prompt_loss else trajectory_index
    sizes = np.bincount(units, num_tokens)  # trained tokens of each
    if config.calculate_per_token_loss:
        return np.full(len(units), 1 / max(num_tokens.sum(), 1))
    divisors = np.full(len(sizes), config.loss_denominator) if config.loss_denominator else np.maximum(sizes, 1)
    return np.asarray(1 / (divisors[units] * max(int(np.count_nonzero(sizes)), 1)))


def _advantages_from_rewards(
    rewards: np.ndarray,
    group_index: np.ndarray,
    trajectory_index: np.ndarray,
    num_tokens: np.ndarray,
    config: AlgorithmConfig,
) -> np.ndarray:  # [B] float64; 0 for samples without a reward or trained tokens
    trained = np.flatnonzero((num_tokens > 0) & ~np.isnan(rewards))
    zeros, groups = torch.zeros(len(trained), dtype=torch.float64), torch.from_numpy(group_index)
    one_token_each = Experience(torch.from_numpy(trained), torch.from_numpy(rewards), groups, rollout_logprobs=zeros)
    one_token_each.trajectory_index = torch.from_numpy(trajectory_index)
    estimator = load_function(ESTIMATORS[config.advantage_estimator].function)
    advantages = estimator(one_token_each, zeros, config).advantages
    if config.normalize_advantages:
        lengths = torch.from_numpy(num_tokens[trained])
        advantages = whiten(advantages.repeat_interleave(lengths))[lengths.cumsum(0) - 1]
    result = np.zeros(len(rewards))
    result[trained] = advantages.numpy()
    return result


def call_custom_estimator(path: str, experience: Experience, config: AlgorithmConfig) -> Estimate:
    """Call the user-defined estimator, f(experience, config) -> advantages [N] or an Estimate, and check its result."""
    result = load_function(path, DEFAULT_NAMES["custom_advantage_function_path"])(experience, config)
    estimate = Estimate(result.double()) if isinstance(result, Tensor) else result
    num_tokens = len(experience.sample_index)
    rules = [
        (
            not isinstance(estimate, Estimate)
            or estimate.advantages.shape != (num_tokens,)
            or not estimate.advantages.isfinite().all(),
            f"{path} did not return a finite advantage for each of the {num_tokens} trained tokens: return a tensor of "
            f"shape [{num_tokens}], or an Estimate with such advantages",
        ),
        (
            ESTIMATORS[config.advantage_estimator].critic and getattr(estimate, "returns", None) is None,
            f"{path} did not set `returns`, on which the critic of {config.advantage_estimator} is trained: return an "
            f"Estimate with `returns` of shape [{num_tokens}]",
        ),
    ]
    check_rules(rules, PluginError)
    return estimate


def call_on_every_rank(call: Callable[[], T], tensors_of: Callable[[T], Iterable[Tensor | None]], name: str) -> T:
    """Return the result of `call` after checking that it is the same on all ranks. Collective, also if `call` raises.

    Args:
        call: calls the user-defined function, and checks its result.
        tensors_of: returns the tensors of a result that are compared.
        name: option and path of the function, for messages.

    Raises:
        PluginError: `call` fails on some ranks only, or its results differ between ranks.
        Exception: the exception of `call`, if it fails on every rank.
    """
    if not dist.is_initialized():
        return call()
    own, failure = "", None
    try:
        result = call()
        bits = [
            values.detach().cpu().contiguous().numpy().tobytes() for values in tensors_of(result) if values is not None
        ]
        own = xxhash.xxh3_64(b"".join(bits)).hexdigest()
    except Exception as error:
        failure = error
    outcomes: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(outcomes, (own, "" if failure is None else describe_error(failure)))
    failed = [rank for rank, (_, reason) in enumerate(outcomes) if reason]
    if failure is not None and len(failed) == len(outcomes):
        raise failure
    if len(set(outcomes)) > 1:
        problem = f"has different results on the {len(outcomes)} ranks of the trainer"
        if failed:
            reason = outcomes[failed[0]][1]
            problem = f"fails on rank {failed[0]} of the trainer ({reason}), but not on all {len(outcomes)} ranks"
        raise PluginError(f"{name} {problem}: {ADVICE}") from failure
    return result
