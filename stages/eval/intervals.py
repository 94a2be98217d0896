"""How sure a mean is: percentile bootstrap over the prompts (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

Prompts are drawn with replacement, each with all of its samples: samples of one prompt are alike, so drawing samples would promise too
much. The seed is fixed: the same numbers give the same interval, whoever asks.
"""

from __future__ import annotations

import numpy as np

NUM_RESAMPLES = 1000
LEVEL = 0.95
_SEED = 0
_NUMBERS_AT_ONCE = 1 << 22  # 32 MB of drawn counts


def intervals(sums: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the interval that holds the mean with probability LEVEL, for several quantities over the same prompts.

    Args:
        sums: [prompts, quantities], the sum of a prompt's values (its value, if it has one).
        weights: the same shape, how many values these are; 1 if not given.

    Returns:
        lower and upper bounds, [quantities] each.
    """
    num_prompts = len(sums)
    weights = np.ones_like(sums) if weights is None else weights
    random = np.random.default_rng(_SEED)
    means = []
    step = max(1, _NUMBERS_AT_ONCE // num_prompts)
    for start in range(0, NUM_RESAMPLES, step):
        size = min(step, NUM_RESAMPLES - start)
        drawn = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size)  # [size, prompts] how often
        means.append((drawn @ sums) / (drawn @ weights))
    outside = (1 - LEVEL) / 2
    lower, upper = np.quantile(np.concatenate(means), [outside, 1 - outside], axis=0)
    return lower, upper
