"""Reward `exact_number`: 1 if the last integer of the response is the label, else 0."""

from __future__ import annotations

import re

from penstock.storage.samples.sample import Sample

_INTEGER = re.compile(r"-?\d+")


def exact_number(sample: Sample) -> float:
    """Return 1 if the last integer of the response equals the label as text, else 0."""
    numbers = _INTEGER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == sample.label.strip())
