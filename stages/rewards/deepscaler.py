"""Reward: a response that has thought, or follows the Alpaca form, boxes the label (the rule of DeepScaleR).

A response without `</think>` and without `###Response` gets 0, however right it is: a model that does not think wants `math`.
"""

from __future__ import annotations

from stages.rewards.answer_text import THOUGHT_ENDS
from stages.rewards.math_answer import math_answer_of
from storage.sample import Sample

_ALPACA = "###Response"


def deepscaler(sample: Sample, evaluated_integers: bool = False) -> float:
    """1 if the last boxed answer after the thought is mathematically the label (boxed or plain), else 0."""
    if THOUGHT_ENDS in sample.response:
        solution = sample.response.rpartition(THOUGHT_ENDS)[2]
    elif _ALPACA in sample.response:
        solution = sample.response.split(_ALPACA)[1]
    else:
        return 0.0
    return math_answer_of(solution, sample.label, evaluated_integers)
