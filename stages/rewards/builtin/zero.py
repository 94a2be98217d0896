"""Reward `zero`: no reward, for training by a teacher alone (--use-opd)."""

from __future__ import annotations

from penstock.storage.samples.sample import Sample


def zero_reward(sample: Sample) -> float:
    """Return 0."""
    return 0.0
