"""Registries of advantage estimators, policy losses and divergences from a teacher. The configuration imports them, so
torch is not imported here.

To add one, write a function in a file of this folder and add a row here.
"""

from __future__ import annotations

from dataclasses import dataclass

_HERE = "penstock.stages.train.algorithms"


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: a function (experience, kl_penalty [N], config) -> Estimate, and its properties."""

    function: str  # pkg.module:name, imported when advantages are computed
    group_relative: bool = False  # compares a sample's reward with the rewards of the prompt's other samples
    per_token: bool = False  # the tokens of a sample have different advantages, so --kl-coef applies
    whitened: bool = False  # requires --normalize-advantages
    critic: bool = False  # needs a value model
    policy_loss: str = "ppo_clip"  # default of --policy-loss with this estimator


ESTIMATORS = {
    "grpo": Estimator(f"{_HERE}.estimators:grpo", group_relative=True),
    "gspo": Estimator(f"{_HERE}.estimators:grpo", group_relative=True, policy_loss="gspo"),
    "cispo": Estimator(f"{_HERE}.estimators:grpo", group_relative=True, policy_loss="cispo"),
    "rloo": Estimator(f"{_HERE}.estimators:rloo", group_relative=True),
    "maxrl": Estimator(f"{_HERE}.estimators:maxrl", group_relative=True),
    "gdpo": Estimator(f"{_HERE}.estimators:gdpo", group_relative=True),
    "ppo": Estimator(f"{_HERE}.estimators:gae", per_token=True, critic=True),
    "reinforce_plus_plus": Estimator(f"{_HERE}.estimators:reinforce_plus_plus", per_token=True, whitened=True),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_HERE}.estimators:reinforce_plus_plus_baseline", group_relative=True, per_token=True, whitened=True
    ),
}


@dataclass(frozen=True)
class PolicyLoss:
    """A policy-gradient loss: a function (log-probs [n], old log-probs [n], advantages [n], samples, config) ->
    TokenLoss, and the options that it reads. Options that only other losses read are refused with it."""

    function: str  # pkg.module:name, imported when the loss is computed
    options: tuple[str, ...]  # fields of AlgorithmConfig


POLICY_LOSSES = {
    "ppo_clip": PolicyLoss(f"{_HERE}.losses:ppo_clip_loss", ("eps_clip", "eps_clip_high", "eps_clip_c")),
    "gspo": PolicyLoss(f"{_HERE}.losses:gspo_loss", ("eps_clip", "eps_clip_high", "eps_clip_c")),
    "cispo": PolicyLoss(f"{_HERE}.losses:cispo_loss", ("eps_clip", "eps_clip_high")),
    "sapo": PolicyLoss(f"{_HERE}.losses:sapo_loss", ("sapo_tau_pos", "sapo_tau_neg")),
    "gmpo": PolicyLoss(f"{_HERE}.losses:gmpo_loss", ("eps_clip", "eps_clip_high")),
    "dppo_tv": PolicyLoss(f"{_HERE}.losses:dppo_tv_loss", ("eps_clip", "eps_clip_high", "eps_clip_c")),
    "dppo_kl": PolicyLoss(f"{_HERE}.losses:dppo_kl_loss", ("eps_clip", "eps_clip_high", "eps_clip_c")),
}

DIVERGENCES = {  # --opd-divergence -> pkg.module:name of a function (log p, log q [t, outcomes], beta) -> Terms
    "forward_kl": f"{_HERE}.divergences:forward_kl",
    "reverse_kl": f"{_HERE}.divergences:reverse_kl",
    "jsd": f"{_HERE}.divergences:jsd",
}
