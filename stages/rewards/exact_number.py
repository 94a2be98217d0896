"""Reward: the last number of the response is the label."""

from __future__ import annotations

import re

from storage.sample import Sample

_INTEGER = re.compile(r"-?\d+")


def exact_number(sample: Sample) -> float:
    """1 if the last whole number of the response equals the label, digit for digit, else 0."""
    numbers = _INTEGER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == sample.label.strip())
