"""Confidence intervals of means by the percentile bootstrap over prompts (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13).

Prompts are resampled with all of their samples: the samples of a prompt are correlated, so resampling single samples
would make the intervals too narrow. The seed is fixed, so equal values give equal intervals.
"""

from __future__ import annotations

import numpy as np

NUM_RESAMPLES = 1000
LEVEL = 0.95
_SEED = 0
_MAX_COUNTS = 1 << 22  # maximum number of resampling counts in memory at a time (32 MB)


def bootstrap_intervals(sums: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of the 95% confidence intervals of several metrics, each a mean over the same prompts.

    Args:
        sums: [prompts, metrics], the sum of each prompt's values.
        weights: [prompts, metrics], the number of each prompt's values; None = 1.

    Returns:
        Lower and upper bounds, [metrics] each.
    """
    num_prompts = len(sums)
    weights = np.ones_like(sums) if weights is None else weights
    random = np.random.default_rng(_SEED)
    means = []
    step = max(1, _MAX_COUNTS // num_prompts)
    for start in range(0, NUM_RESAMPLES, step):
        size = min(step, NUM_RESAMPLES - start)
        counts = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size)  # [size, prompts]
        means.append((counts @ sums) / (counts @ weights))
    tail = (1 - LEVEL) / 2
    lower, upper = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return lower, upper
