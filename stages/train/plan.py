"""Who trains which sample, in which step, in which micro-batch. Functions of lengths alone, so every rank comes to the same plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np

from storage.errors import OptionError


def optimizer_steps(trajectory_index: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """Sample rows of each optimizer step: consecutive blocks of `global_batch_size` trajectories, siblings together.

    Raises:
        OptionError: a remainder would be left over; nothing is dropped silently.
    """
    num_trajectories = int(trajectory_index.max(initial=-1)) + 1
    if num_trajectories == 0 or num_trajectories % global_batch_size:
        raise OptionError(
            f"the rollout holds {num_trajectories} trajectories, which --global-batch-size {global_batch_size} does not "
            "divide: choose it so that rollout batch x samples per prompt is a multiple of it"
        )
    step_of_row = trajectory_index // global_batch_size
    return [np.flatnonzero(step_of_row == step) for step in range(num_trajectories // global_batch_size)]


def fixed_microbatches(num_samples: int, size: int, multiple_of: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch: `size` at a time, and empty ones up to a multiple of `multiple_of`."""
    bins = [list(range(start, min(start + size, num_samples))) for start in range(0, num_samples, size)]
    return bins + [[] for _ in range(-len(bins) % multiple_of if bins else multiple_of)]


def filled_microbatches(lengths: Sequence[int], capacity: int, multiple_of: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch.

    One first-fit pass in order of arrival; a sample longer than `capacity` sits alone. The number of micro-batches is then raised
    to a multiple of `multiple_of` (data-parallel ranks x pipeline group) by splitting the heaviest one that has several samples,
    and by empty ones when there is nothing left to split.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    while not bins or len(bins) % multiple_of:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b), default=None)
        if heaviest is None:
            bins.append([])
        else:
            bins[bins.index(heaviest) : bins.index(heaviest) + 1] = _halves(heaviest, lengths)
    return bins


def _halves(samples: list[int], lengths: Sequence[int]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    weights = [0, 0]
    for index in sorted(samples, key=lambda i: -lengths[i]):  # longest first, into the lighter half
        lighter = int(weights[1] < weights[0])
        halves[lighter].append(index)
        weights[lighter] += lengths[index]
    return [sorted(half) for half in halves]


def balanced_shares(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Deal items out in shares of equal count and nearly equal cost.

    Differencing (Karmarkar & Karp 1982) with equal counts: `num_shares` items at a time begin as one of each share, and the two most
    uneven partial deals are merged, the heaviest share of one with the lightest of the other, until one deal is left.

    Args:
        costs: of the items; a multiple of `num_shares` of them.
        num_shares: how many shares.
    """
    assert len(costs) % num_shares == 0, f"{len(costs)} items in {num_shares} shares"
    order, turn = sorted(range(len(costs)), key=lambda item: -costs[item]), count()
    deals = []
    for start in range(0, len(order), num_shares):
        deal = [(costs[item], [item]) for item in order[start : start + num_shares]]  # heaviest share first
        deals.append((deal[-1][0] - deal[0][0], next(turn), deal))
    heapq.heapify(deals)
    while len(deals) > 1:
        first, second = heapq.heappop(deals)[2], heapq.heappop(deals)[2]
        merged = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(first, reversed(second))]
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(deals, (merged[-1][0] - merged[0][0], next(turn), merged))
    return sorted(sorted(items) for _, items in deals[0][2])
