"""Reward `random`: 0 or 1 at random, as a baseline without any learning signal."""

from __future__ import annotations

import xxhash

from penstock.storage.samples.sample import Sample


def random_reward(sample: Sample) -> float:
    """Return 0 or 1, derived from a hash of the sample id, so that grading again gives the same reward."""
    return float(xxhash.xxh3_64_intdigest(sample.sample_id.encode()) & 1)
