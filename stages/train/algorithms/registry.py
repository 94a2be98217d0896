"""Names and properties of advantage estimators, policy losses and divergences from a teacher. The configuration imports
them, so torch is not imported here.

To add one, write a function in `advantages.py`, `losses.py` or `divergences.py`, add it to the table of that file, and
a row here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """Properties of an advantage estimator."""

    group_relative: bool = False  # compares a sample's reward with the rewards of the prompt's other samples
    per_token: bool = False  # the tokens of a sample have different advantages, so --kl-coef applies
    whitened: bool = False  # requires --normalize-advantages
    critic: bool = False  # needs a value model
    policy_loss: str = "ppo_clip"  # default of --policy-loss with this estimator


ESTIMATORS = {
    "grpo": Estimator(group_relative=True),
    "gspo": Estimator(group_relative=True, policy_loss="gspo"),
    "cispo": Estimator(group_relative=True, policy_loss="cispo"),
    "rloo": Estimator(group_relative=True),
    "maxrl": Estimator(group_relative=True),
    "gdpo": Estimator(group_relative=True),
    "ppo": Estimator(per_token=True, critic=True),
    "reinforce_plus_plus": Estimator(per_token=True, whitened=True),
    "reinforce_plus_plus_baseline": Estimator(group_relative=True, per_token=True, whitened=True),
}


# Policy-gradient loss -> the fields of AlgorithmConfig that it reads. Options that only other losses read are refused.
POLICY_LOSSES = {
    "ppo_clip": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "gspo": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "cispo": ("eps_clip", "eps_clip_high"),
    "sapo": ("sapo_tau_pos", "sapo_tau_neg"),
    "gmpo": ("eps_clip", "eps_clip_high"),
    "dppo_tv": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "dppo_kl": ("eps_clip", "eps_clip_high", "eps_clip_c"),
}

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # --opd-divergence
