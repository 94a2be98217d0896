"""Losses of the policy (ratio, clip, corrections, entropy, KL), the critic and SFT, and the call of user-defined
losses.

A loss function takes the n trained tokens of a micro-batch, and returns a loss per token [n] and metrics ([n] each).
The last section computes the weights of the tokens: the loss of an optimizer step, which `step.py` computes, is the sum
of weight x token loss.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.stages.plugins import DEFAULT_NAMES, load_function
from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.experience import SegmentReducer, TokenFields
from penstock.storage.errors import PluginError

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_BOUND = 10.0
# exp(40) is 2e17: the product of two such ratios and an advantage still fits into float32
MAX_LOG_RATIO = 40.0

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]  # loss [n]; metric -> values [n]


def policy_loss(
    logprobs: Tensor,  # [n] of the current policy, with gradient
    entropy: Tensor,  # [n] of the current policy, with gradient if --entropy-coef is not 0
    fields: TokenFields,
    samples: SegmentReducer,
    config: AlgorithmConfig,
) -> LossAndMetrics:
    """Return importance weight x policy-gradient loss - entropy bonus + KL to the reference + divergence from a
    teacher.

    A correction that rejects tokens (--tis-veto) masks them in all four terms. The loss is not renormalized, so
    rejecting tokens shrinks the gradient.
    """
    use_engine = config.use_rollout_logprobs
    trainer_logprobs = logprobs.detach() if use_engine or fields.old_logprobs is None else fields.old_logprobs
    old_logprobs = fields.rollout_logprobs if use_engine else trainer_logprobs

    token_loss = TOKEN_LOSSES[config.policy_loss_name]
    pg_loss, log_ratio, clipped = token_loss(logprobs, old_logprobs, fields.advantages, samples, config)

    weights, mask, metrics = importance_weights(logprobs, old_logprobs, trainer_logprobs, fields, samples, config)
    pg_loss = pg_loss * weights * mask
    loss = pg_loss

    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy * mask

    if config.use_kl_loss:
        assert fields.ref_logprobs is not None, "--use-kl-loss needs the reference's log-probs"
        ratio = bounded_exp(logprobs - old_logprobs) if config.use_unbiased_kl else None
        kl = kl_estimate(logprobs, fields.ref_logprobs, config.kl_loss_type, ratio)
        if config.kl_loss_coef:
            loss = loss + config.kl_loss_coef * kl * mask
        metrics |= {"train/kl_loss": kl, "rollout/ref_log_probs": fields.ref_logprobs}

    if fields.divergence is not None and config.opd is not None:
        loss = loss + config.opd.opd_kl_coef * fields.divergence * mask
        metrics["train/opd_divergence"] = fields.divergence

    return loss, metrics | {
        "train/pg_loss": pg_loss,
        "train/pg_clipfrac": clipped,
        "train/ppo_kl": -log_ratio,
        "train/ois": bounded_exp(log_ratio),
        "train/entropy_loss": entropy,
        "train/train_rollout_logprob_abs_diff": (trainer_logprobs - fields.rollout_logprobs).abs(),
        "rollout/log_probs": trainer_logprobs,
        "rollout/rollout_log_probs": fields.rollout_logprobs,
    }


# ---- policy-gradient losses: a row each in TOKEN_LOSSES, and one with its options in registry.POLICY_LOSSES ----------


class TokenLoss(NamedTuple):
    """A policy-gradient loss per token, before weights and masks."""

    loss: Tensor  # [n] with gradient
    log_ratio: Tensor  # [n] log pi - log pi_old of the token; for gspo, its mean over the sample
    clipped: Tensor  # [n] 1.0 where the clip took effect


def ppo_clip_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Clip the ratio of each token (PPO, arXiv 1707.06347)."""
    return _clipped_surrogate(logprobs - old_logprobs, advantages, config)


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Clip the geometric mean of the ratios of the sample, with gradient through the mean (GSPO, arXiv 2507.18071)."""
    return _clipped_surrogate(samples.mean(logprobs - old_logprobs), advantages, config)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> TokenLoss:
    """Return max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A).

    The bounds may differ (DAPO's clip-higher, arXiv 2503.14476). With dual clip c = eps_clip_c, the loss of a negative
    advantage is at most -c A, however large the ratio (arXiv 1912.09729).
    """
    ratio = bounded_exp(log_ratio)
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - config.eps_clip, 1.0 + _upper_clip(config)) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    if config.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.eps_clip_c * advantages), loss)
    return TokenLoss(loss, log_ratio, (clipped_loss > unclipped_loss).to(loss.dtype))


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Weight log pi by the clipped, detached ratio: clipped tokens keep a gradient (CISPO, arXiv 2506.13585)."""
    log_ratio = logprobs - old_logprobs
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1.0 - config.eps_clip, 1.0 + _upper_clip(config))
    return TokenLoss(-weight * advantages * logprobs, log_ratio, (weight != ratio).to(weight.dtype))


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Replace the clip by a gate, whose gradient falls smoothly as the ratio leaves 1 (SAPO, arXiv 2511.20347, Eq. 5):
    the loss is -4/tau x sigmoid(tau (ratio - 1)) A, with tau = sapo_tau_pos where A > 0 and sapo_tau_neg elsewhere."""
    log_ratio = logprobs - old_logprobs
    tau = torch.full_like(logprobs, config.sapo_tau_neg).masked_fill(advantages > 0, config.sapo_tau_pos)
    gate = 4.0 / tau * torch.sigmoid(tau * (bounded_exp(log_ratio) - 1.0))
    return TokenLoss(-gate * advantages, log_ratio, torch.zeros_like(log_ratio))


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Multiply A by the geometric mean of the sample's clipped ratios, with gradient through the mean (GMPO, arXiv
    2507.20673). Log-ratios above eps_clip_high are clipped where A > 0, and those below -eps_clip elsewhere."""
    log_ratio = logprobs - old_logprobs
    above, below = log_ratio.clamp(max=_upper_clip(config)), log_ratio.clamp(min=-config.eps_clip)
    clipped = torch.where(advantages > 0, above, below)
    loss = -bounded_exp(samples.mean(clipped)) * advantages
    return TokenLoss(loss, log_ratio, (clipped != log_ratio).to(loss.dtype))


def dppo_tv_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Mask tokens by the total variation |pi - pi_old| of the sampled token (DPPO with binary TV, arXiv 2602.04879)."""
    return _divergence_masked(logprobs, old_logprobs, advantages, (logprobs.exp() - old_logprobs.exp()).abs(), config)


def dppo_kl_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> TokenLoss:
    """Mask tokens by the KL(pi_old || pi) over two outcomes, the sampled token and any other token (DPPO with binary
    KL, arXiv 2602.04879)."""
    probs, old_probs = -torch.expm1(logprobs), -torch.expm1(old_logprobs)  # of any other token
    smallest = torch.finfo(probs.dtype).eps  # 0 has no logarithm
    log_ratio = old_probs.clamp(min=smallest).log() - probs.clamp(min=smallest).log()
    divergence = old_logprobs.exp() * (old_logprobs - logprobs) + old_probs * log_ratio
    return _divergence_masked(logprobs, old_logprobs, advantages, divergence, config)


def _divergence_masked(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, divergence: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """Weight log pi by the detached ratio, at most eps_clip_c, and mask tokens that the update would move further from
    the old policy although their divergence is above a bound: eps_clip_high where A > 0, eps_clip where A < 0."""
    log_ratio = logprobs - old_logprobs
    rises = (advantages > 0) & (log_ratio > 0) & (divergence > _upper_clip(config))
    falls = (advantages < 0) & (log_ratio < 0) & (divergence > config.eps_clip)
    ratio = bounded_exp(log_ratio.detach())
    if config.eps_clip_c is not None:
        ratio = ratio.clamp(max=config.eps_clip_c)
    masked = (rises | falls).to(ratio.dtype)
    return TokenLoss(-(1.0 - masked) * ratio * advantages * logprobs, log_ratio, masked)


def _upper_clip(config: AlgorithmConfig) -> float:
    return config.eps_clip if config.eps_clip_high is None else config.eps_clip_high


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) with the log-ratio clamped to +-40, which never overflows; clamped entries have no
    gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


TOKEN_LOSSES = {  # --policy-loss -> (log-probs [n], old log-probs [n], advantages [n], samples, config) -> TokenLoss
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
}

# ---- importance weights and masks ------------------------------------------------------------------------------------


def importance_weights(
    logprobs: Tensor,  # [n] of the current policy
    old_logprobs: Tensor,  # [n] of the policy before the update, by the trainer or the engine
    trainer_logprobs: Tensor,  # [n] by the trainer, without gradient
    fields: TokenFields,
    samples: SegmentReducer,
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return weights [n] of the policy-gradient loss, a mask [n] of the whole loss, and metrics.

    The weights are the product of the off-policy sequence mask (--use-opsm), the correction for the mismatch between
    engine and trainer (--use-tis), and the scale from --loss-denominator or --custom-pg-loss-reducer-function-path.
    """
    weights = mask = torch.ones_like(old_logprobs)
    metrics = {}
    if config.opsm is not None:
        kept = off_policy_mask(logprobs, old_logprobs, fields.advantages, samples, config.opsm.opsm_delta)
        weights, metrics["train/opsm_clipfrac"] = weights * kept, 1.0 - kept
    if config.use_tis or config.get_mismatch_metrics:
        correct = mismatch_correction if config.custom_tis_function_path is None else custom_correction
        correction, accepted, tis_metrics = correct(trainer_logprobs, fields.rollout_logprobs, samples, config)
        metrics |= {f"train/{name}": values for name, values in tis_metrics.items()}
        if config.use_tis:  # --get-mismatch-metrics alone measures and changes nothing
            weights = weights * correction
            mask = mask if accepted is None else accepted
    if fields.pg_scale is not None:
        weights = weights * fields.pg_scale
    return weights, mask, metrics


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,  # [n] of the current policy
    old_logprobs: Tensor,  # [n] before the update
    advantages: Tensor,  # [n]
    samples: SegmentReducer,
    delta: float,
) -> Tensor:  # [n] 1.0 where the token is kept, else 0.0
    """Return 0 for tokens with A < 0 in samples whose mean of log pi_old - log pi is above `delta`, else 1: off-policy
    sequence masking (DeepSeek-V3.2, arXiv 2512.02556)."""
    mean_log_ratio = samples.mean(old_logprobs - logprobs)
    return 1.0 - ((advantages < 0) & (mean_log_ratio > delta)).to(logprobs.dtype)


@torch.no_grad()
def mismatch_correction(
    trainer_logprobs: Tensor,  # [n] before the update
    rollout_logprobs: Tensor,  # [n] the engine's, at sampling
    samples: SegmentReducer,
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return weights [n] that correct for the mismatch between engine and trainer, a mask [n] or None, and metrics.

    --tis-mode truncate is truncated importance sampling (fengyao.notion.site/off-policy-rl). --tis-mode mask is IcePop
    (arXiv 2510.18855) with --tis-level token, and masked importance sampling with the other levels.
    """
    log_ratio = trainer_logprobs - rollout_logprobs
    if config.tis_level == "token":
        level_log_ratio = log_ratio
    elif config.tis_level == "sequence":  # the product of the sample's ratios
        level_log_ratio = samples.at_tokens(samples.total(log_ratio)).to(log_ratio.dtype)
    else:  # the geometric mean of the sample's ratios
        level_log_ratio = samples.mean(log_ratio)
    ratio = bounded_exp(level_log_ratio)

    if config.tis_mode == "truncate":
        weights = ratio.clamp(config.tis_clip_low, config.tis_clip)
    else:
        weights = torch.where((ratio >= config.tis_clip_low) & (ratio <= config.tis_clip), ratio, 0.0)
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
    if config.tis_veto is None:
        return weights, None, metrics

    # reject whole samples in which the ratio of any token is below the threshold
    num_vetoed = samples.total((log_ratio < math.log(config.tis_veto)).to(log_ratio.dtype))
    mask = samples.at_tokens(num_vetoed == 0).to(log_ratio.dtype)
    return weights, mask, metrics | {"tis_veto_frac": 1.0 - mask}


@torch.no_grad()
def custom_correction(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, samples: SegmentReducer, config: AlgorithmConfig
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Call the user-defined correction, which has the interface of `mismatch_correction`."""
    path = config.custom_tis_function_path
    assert path is not None
    function = load_function(path, DEFAULT_NAMES["custom_tis_function_path"])
    weights, mask, metrics = function(trainer_logprobs, rollout_logprobs, samples, config)
    _check_per_token(path, {"weights": weights, "a mask": mask, **metrics}, len(trainer_logprobs))
    return weights, mask, metrics


def _check_per_token(path: str, results: dict[str, Tensor | None], num_tokens: int) -> None:
    for name, values in results.items():
        if values is not None and values.shape != (num_tokens,):
            raise PluginError(
                f"{path} returned {name} of shape {list(values.shape)}: return one number for each of the "
                f"{num_tokens} trained tokens"
            )


# ---- KL to the reference ---------------------------------------------------------------------------------------------


def kl_estimate(
    logprobs: Tensor,  # [n] of the policy
    ref_logprobs: Tensor,  # [n] of the reference
    kind: KLType,
    ratio: Tensor | None = None,  # [n] pi / pi_old, with gradient
) -> Tensor:  # [n]
    """Estimate KL(policy || reference) from sampled tokens (joschu.net/blog/kl-approx.html).

    With d = log pi - log pi_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, low_var_kl = k3 clamped to +-10. The
    estimate is multiplied by `ratio`, if given, before it is clamped. This corrects for tokens that the policy before
    the update sampled, and makes the gradient of k3 an unbiased estimate of the KL's gradient (DeepSeek-V3.2, arXiv
    2512.02556).
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = difference.square() / 2
    else:
        estimate = bounded_exp(-difference) - 1 + difference
    if ratio is not None:
        estimate = ratio * estimate
    return estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else estimate


# ---- other losses ----------------------------------------------------------------------------------------------------


def sft_loss(
    logprobs: Tensor, entropy: Tensor, fields: TokenFields, samples: SegmentReducer, config: AlgorithmConfig
) -> LossAndMetrics:
    """Return the negative log-prob of each token of the demonstrations, and the probability of the whole demonstration:
    how often the policy, sampled at temperature 1, would answer exactly so."""
    sample_prob = samples.at_tokens(samples.total(logprobs.detach()).exp()).to(logprobs.dtype)
    return -logprobs, {"train/entropy_loss": entropy, "train/sample_prob": sample_prob}


def custom_loss(
    logprobs: Tensor, entropy: Tensor, fields: TokenFields, samples: SegmentReducer, config: AlgorithmConfig
) -> LossAndMetrics:
    """Call the user-defined loss, which has the interface of `policy_loss`."""
    path = config.custom_loss_function_path
    assert path is not None, "--loss-type custom_loss needs --custom-loss-function-path"
    function = load_function(path, DEFAULT_NAMES["custom_loss_function_path"])
    loss, metrics = function(logprobs, entropy, fields, samples, config)
    _check_per_token(path, {"a loss": loss, **metrics}, len(logprobs))
    return loss, {name if "/" in name else f"train/{name}": values for name, values in metrics.items()}


LOSSES = {"policy_loss": policy_loss, "sft_loss": sft_loss, "custom_loss": custom_loss}  # --loss-type


def value_loss(values: Tensor, fields: TokenFields, config: AlgorithmConfig) -> LossAndMetrics:
    """Return PPO's clipped value loss max((V - R)^2, (V_old + clip(V - V_old, +-value_clip) - R)^2), without a factor
    1/2."""
    assert fields.values is not None and fields.returns is not None, "the critic needs its old values and the returns"
    change = values - fields.values
    clipped_values = fields.values + change.clamp(-config.value_clip, config.value_clip)
    loss = torch.maximum((values - fields.returns).square(), (clipped_values - fields.returns).square())
    clipped = (change.detach().abs() > config.value_clip).to(loss.dtype)
    return loss, {"train/value_loss": loss, "train/value_clipfrac": clipped}


# ---- aggregation -----------------------------------------------------------------------------------------------------
# The weights of a step's tokens contain all denominators, and are computed once for the whole optimizer step. The loss
# of the step is the plain sum of weight x loss over all tokens on all ranks, so it does not depend on micro-batches,
# packing or the parallel layout. Samples and trajectories without trained tokens are not counted in any denominator.


def per_sample_weights(
    trajectory_index: Tensor,  # [N] trajectory of each trained token of the step, 0 .. num_trajectories-1
    num_trajectories: int,
) -> Tensor:  # [N] float64, sums to 1
    """Return the weights for the mean over trajectories of the mean over the trained tokens of a trajectory. All
    samples of one agent execution belong to one trajectory. With the prompts of the tokens in place of their
    trajectories, it is the mean over prompts (--calculate-per-prompt-loss)."""
    num_tokens = torch.bincount(trajectory_index, minlength=num_trajectories)
    num_trained = (num_tokens > 0).sum().clamp(min=1)
    return (1.0 / (num_tokens.double() * num_trained))[trajectory_index]


def per_token_weights(trajectory_index: Tensor, num_trajectories: int) -> Tensor:  # [N] float64, sums to 1
    """Return the weights for the mean over all trained tokens of the step (--calculate-per-token-loss)."""
    num_tokens = len(trajectory_index)
    return torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64)


def constant_weights(trajectory_index: Tensor, denominator: int) -> Tensor:  # [N] float64
    """Return the weights for the mean over trajectories of the sum over the trained tokens of a trajectory, divided by
    a constant in place of their number (--loss-denominator; Dr. GRPO, arXiv 2503.20783)."""
    num_trained = max(len(trajectory_index.unique()), 1)
    return torch.full(trajectory_index.shape, 1.0 / (num_trained * denominator), dtype=torch.float64)


def custom_weights(path: str, trajectory_index: Tensor, sample_index: Tensor, num_trajectories: int) -> Tensor:
    """Call the user-defined reducer, which returns the weights [N] of the tokens of one optimizer step in the
    policy-gradient loss. Raises PluginError if the reducer does not return one finite number per token."""
    function = load_function(path, DEFAULT_NAMES["custom_pg_loss_reducer_function_path"])
    weights: Tensor = function(trajectory_index, sample_index, num_trajectories)
    if weights.shape != trajectory_index.shape or not weights.isfinite().all():
        raise PluginError(
            f"{path} returned weights of shape {list(weights.shape)}: return a finite number for each of the "
            f"{len(trajectory_index)} trained tokens"
        )
    return weights.double()
