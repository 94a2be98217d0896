"""Corrections for the gap between the engine that sampled and the trainer that learns: weights of tokens, and rejections.

A correction gets the trainer's log-probs before the update and the engine's at sampling. Its weights multiply the policy
gradient; its mask takes tokens out of the whole loss. Denominators stay what they were: fewer tokens make a smaller step, not a
louder one. Without gradient throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from stages.plugins import load_function
from stages.train.algorithms.ratios import bounded_exp
from stages.train.algorithms.sequences import SampleSums
from storage.errors import PluginError

TISMode = Literal["truncate", "mask"]
TISLevel = Literal["token", "sequence", "geometric"]

# old log-probs [n], rollout log-probs [n], samples -> weights [n], mask [n] or None, metrics [n] each
Correction = Callable[[Tensor, Tensor, SampleSums], tuple[Tensor, Tensor | None, dict[str, Tensor]]]


class CorrectionOptions(Protocol):
    """Fields of the configuration read here."""

    use_tis: bool
    get_mismatch_metrics: bool
    tis_clip: float
    tis_clip_low: float
    tis_mode: TISMode
    tis_level: TISLevel
    tis_veto: float | None
    custom_tis_function_path: str | None


def correction(options: CorrectionOptions) -> Correction | None:
    """The configured correction, or None where the gap is neither corrected nor measured."""
    if not (options.use_tis or options.get_mismatch_metrics):
        return None
    if options.custom_tis_function_path is not None:
        return _custom(options.custom_tis_function_path, options)

    @torch.no_grad()
    def correct(old: Tensor, rollout: Tensor, samples: SampleSums) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        log_ratio = old - rollout
        ratio = bounded_exp(LEVELS[options.tis_level](log_ratio, samples))
        weights = MODES[options.tis_mode](ratio, options.tis_clip_low, options.tis_clip)
        metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
        mask = None if options.tis_veto is None else veto_mask(log_ratio, samples, options.tis_veto)
        return weights, mask, metrics | ({} if mask is None else {"tis_veto_frac": 1.0 - mask})

    return correct


def truncated(ratio: Tensor, low: float, high: float) -> Tensor:  # [n] -> [n]
    """Truncated importance sampling (fengyao.notion.site/off-policy-rl): the ratio, within bounds."""
    return ratio.clamp(low, high)


def masked(ratio: Tensor, low: float, high: float) -> Tensor:  # [n] -> [n]
    """IcePop (arXiv 2510.18855), at other levels masked importance sampling: the ratio where it is within bounds, else 0."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def veto_mask(log_ratio: Tensor, samples: SampleSums, threshold: float) -> Tensor:  # [n] -> [n]
    """0 on all tokens of a sample in which any token's ratio is below `threshold`, else 1."""
    catastrophic = samples.total((log_ratio < math.log(threshold)).to(log_ratio.dtype))
    return samples.at_tokens(catastrophic == 0).to(log_ratio.dtype)


def _of_token(log_ratio: Tensor, samples: SampleSums) -> Tensor:
    return log_ratio


def _of_sequence(log_ratio: Tensor, samples: SampleSums) -> Tensor:
    return samples.at_tokens(samples.total(log_ratio)).to(log_ratio.dtype)


def _geometric(log_ratio: Tensor, samples: SampleSums) -> Tensor:
    return samples.mean(log_ratio)


MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {"truncate": truncated, "mask": masked}
# Log ratios [n] of tokens -> [n]: of each token, of its whole sample (a product of ratios), or their geometric mean.
LEVELS: dict[str, Callable[[Tensor, SampleSums], Tensor]] = {
    "token": _of_token,
    "sequence": _of_sequence,
    "geometric": _geometric,
}


def _custom(path: str, options: CorrectionOptions) -> Correction:
    function = load_function(path, usual_name="correction")

    @torch.no_grad()
    def correct(old: Tensor, rollout: Tensor, samples: SampleSums) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        weights, mask, metrics = function(old, rollout, samples, options)
        for name, found in {"weights": weights, "a mask": mask, **metrics}.items():
            if found is not None and found.shape != old.shape:
                raise PluginError(
                    f"{path} returned {name} of shape {list(found.shape)}: return one number for each of {len(old)} tokens"
                )
        return weights, mask, metrics

    return correct
