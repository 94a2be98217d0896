"""Policy-gradient losses of recent papers as user-defined losses: `--loss-type custom_loss
--custom-loss-function-path examples/policy_losses/losses.py:NAME`.

Each function gets the n trained tokens of a micro-batch and returns a loss per token. The constants are those of the
papers. Statistics over tokens (`clip_cov`, `kl_cov`, `m2po`) are computed over the tokens of a micro-batch on one rank.
"""

import torch

from penstock.stages.train.algorithms.losses import bounded_exp, gspo_loss, ppo_clip_loss

CLIP_COV_FRACTION, CLIP_COV_BOUNDS = 2e-4, (1.0, 5.0)
KL_COV_FRACTION, KL_COV_COEF = 2e-4, 1.0
VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)  # exponents where A >= 0, and where A < 0
TRUST_REGION_DELTA = 0.05
M2PO_THRESHOLD = 0.04


def clip_cov(logprobs, entropy, fields, samples, options):
    """PPO's loss without some random tokens whose log-prob covaries with the advantage (Clip-Cov, arXiv 2505.22617).

    Of the tokens that PPO does not clip and whose covariance is within CLIP_COV_BOUNDS, a fraction CLIP_COV_FRACTION of
    all tokens, and at least one, gets the loss 0.
    """
    loss, log_ratio, clipped = ppo_clip_loss(
        logprobs, before_update(logprobs, fields), fields.advantages, samples, options
    )
    covariances = covariance(logprobs, fields.advantages)
    low, high = CLIP_COV_BOUNDS
    candidates = ((covariances > low) & (covariances < high) & (clipped == 0)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(len(loss)))  # the same in a replay
    dropped = candidates[order.to(candidates.device)[: num_selected(loss, CLIP_COV_FRACTION)]]
    kept = torch.ones_like(clipped).index_fill(0, dropped, 0.0)
    return loss * kept, {"pg_clipfrac": clipped, "cov_clipfrac": 1.0 - kept, "ppo_kl": -log_ratio.detach()}


def kl_cov(logprobs, entropy, fields, samples, options):
    """REINFORCE's loss -ratio A, and a KL penalty for the tokens whose log-prob covaries most with the advantage
    (KL-Cov, arXiv 2505.22617): KL_COV_COEF x |log ratio| for a fraction KL_COV_FRACTION of the tokens, at least one."""
    log_ratio = logprobs - before_update(logprobs, fields)
    covariances = covariance(logprobs, fields.advantages)
    chosen = covariances.topk(min(num_selected(covariances, KL_COV_FRACTION), len(covariances))).indices
    penalized = torch.zeros_like(covariances).index_fill(0, chosen, 1.0)
    loss = -bounded_exp(log_ratio) * fields.advantages + KL_COV_COEF * penalized * log_ratio.abs()
    return loss, {"penalized": penalized, "ppo_kl": -log_ratio.detach()}


def vespo(logprobs, entropy, fields, samples, options):
    """Weight log pi by W^a exp(b (1 - W)), detached, where W is the product of the sample's ratios to the engine's
    probabilities (VESPO, arXiv 2602.10693). W is clamped to exp(+-20)."""
    log_weight = samples.total((logprobs - fields.rollout_logprobs).detach()).clamp(-20.0, 20.0)
    log_weight = samples.at_tokens(log_weight).to(logprobs.dtype)
    a, b = (torch.where(fields.advantages >= 0, x, y) for x, y in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True))
    weights = (a * log_weight + b * (1.0 - log_weight.exp())).exp()
    return -weights * fields.advantages * logprobs, {"vespo_weight": weights}


def luspo(logprobs, entropy, fields, samples, options):
    """GSPO's loss multiplied by the number of trained tokens of the sample, so that long samples do not have smaller
    gradients per token (LUSPO, arXiv 2602.05261)."""
    old_logprobs = before_update(logprobs, fields)
    loss, log_ratio, clipped = gspo_loss(logprobs, old_logprobs, fields.advantages, samples, options)
    return loss * samples.at_tokens(samples.num_tokens), {"pg_clipfrac": clipped, "ppo_kl": -log_ratio.detach()}


def trust_region_masking(logprobs, entropy, fields, samples, options):
    """The loss -ratio A without samples that have left the trust region (arXiv 2512.23075, Algorithm 1 with its
    criterion of the maximum): those in which (log ratio)^2 / 2 of any token is above TRUST_REGION_DELTA. The ratio is
    that to the engine's probabilities."""
    log_ratio = logprobs - fields.rollout_logprobs
    violations = (log_ratio.detach().square() / 2 > TRUST_REGION_DELTA).to(logprobs.dtype)
    kept = samples.at_tokens(samples.total(violations) == 0).to(logprobs.dtype)
    return -kept * bounded_exp(log_ratio) * fields.advantages, {"masked": 1.0 - kept}


def m2po(logprobs, entropy, fields, samples, options):
    """The loss -ratio A without the tokens that move furthest from the engine's probabilities (M2PO, arXiv 2510.01161,
    Algorithm 1).

    Of the tokens with A > 0 and ratio > 1, or A < 0 and ratio < 1, those with the largest (log ratio)^2 are masked
    until the mean of the others is at most M2PO_THRESHOLD.
    """
    log_ratio = logprobs - fields.rollout_logprobs
    moving = (log_ratio.detach() * fields.advantages > 0).nonzero()[:, 0]
    squares, order = log_ratio.detach()[moving].square().sort()
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)  # ascending
    masked = moving[order[means > M2PO_THRESHOLD]]
    kept = torch.ones_like(log_ratio).index_fill(0, masked, 0.0)
    return -kept * bounded_exp(log_ratio) * fields.advantages, {"masked": 1.0 - kept}


def before_update(logprobs, fields):
    """Return the log-probs of the policy before the update; they are not computed if the round has one step."""
    return logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs


def covariance(logprobs, advantages):
    """Return each token's share of the covariance of log-prob and advantage."""
    logprobs = logprobs.detach()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def num_selected(tokens, fraction):
    """Return the number of tokens that are selected: a fraction of them, at least one."""
    return max(1, int(len(tokens) * fraction))
