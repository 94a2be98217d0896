"""Reward: a coin, to see what learning from noise looks like."""

from __future__ import annotations

import xxhash

from storage.sample import Sample


def coin(sample: Sample) -> float:
    """0 or 1, half and half, the same for the same sample whenever it is graded."""
    return float(xxhash.xxh3_64_intdigest(sample.sample_id.encode()) & 1)
