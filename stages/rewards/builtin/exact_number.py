"""Reward `exact_number`: 1 if the last integer of the response is the label, else 0."""

from __future__ import annotations

import re

from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample

_INTEGER = re.compile(r"-?\d+")
_WHOLE_NUMBER = re.compile(r"\s*\+?(-?\d{1,300})(?:\.0*)?\s*")


def exact_number(sample: Sample) -> float:
    """Return 1 if the last integer of the response equals the label digit by digit, else 0.

    Raises:
        RewardError: there is a label, but it is not an integer, so that no response could equal it.
    """
    numbers = _INTEGER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == (sample.label and to_integer(sample.label)))


def to_integer(label: str) -> str:
    """Return the digits of a label, with 2.00 as 2. Raises RewardError if the label is not an integer."""
    match = _WHOLE_NUMBER.fullmatch(label)
    if match is None:
        raise RewardError(
            f"the label {label[:100]!r} is not an integer, and no response can equal it with the reward exact_number: "
            "write the label in digits only, or use --rm-type math"
        )
    return match[1]
