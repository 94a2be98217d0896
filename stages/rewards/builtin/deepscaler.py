"""Reward `deepscaler`: 1 if the boxed answer after `</think>` equals the label, else 0 (DeepScaleR's rule).

A response without `</think>` and without `###Response` (Alpaca's format) gets 0, even if its answer is correct; use
`math` for models that do not think.
"""

from __future__ import annotations

from penstock.stages.rewards.builtin.answer_text import THINK_END
from penstock.stages.rewards.builtin.math_answer import grade_math
from penstock.storage.samples.sample import Sample

_ALPACA_RESPONSE = "###Response"


def deepscaler(sample: Sample, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer after `</think>` is mathematically equal to the label, else 0."""
    if THINK_END in sample.response:
        solution = sample.response.rpartition(THINK_END)[2]
    elif _ALPACA_RESPONSE in sample.response:
        solution = sample.response.split(_ALPACA_RESPONSE)[1]
    else:
        return 0.0
    return grade_math(solution, sample.label, evaluated_integers)
