"""Draw numbers as a line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as at most `width` block characters, from the lowest (▁) to the highest (█).

    Longer sequences are averaged over equal parts. Values that are not finite are left out; equal values are drawn in
    the middle.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    size = min(width, len(finite))
    bounds = [len(finite) * part // size for part in range(size + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[len(BLOCKS) // 2] * size
    return "".join(BLOCKS[min(int((mean - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)
