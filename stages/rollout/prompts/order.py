"""Compute the order in which rows and entries of --prompt-data are visited, with pure functions of seeds and counters.
The results must never change, because a resumed run continues in the same order."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

WHOLE = 1 << 32  # sum of the shares of all sources: a share is a sampling weight as an integer fraction of WHOLE
_ROUNDS = 6  # rounds of the Feistel network


def permutation(seed: int, epoch: int, segment: int, rows: int) -> np.ndarray:
    """Return a random permutation of 0 .. rows - 1, seeded with (seed, epoch, segment). [rows], uint32."""
    # RandomState, not Generator: NumPy guarantees that RandomState's stream never changes (NEP 19). Shuffled in place:
    # RandomState.permutation returns the same order, but with 8 bytes per row.
    order = np.arange(rows, dtype=np.uint32)
    np.random.RandomState([seed, epoch, segment]).shuffle(order)
    return order


def permuted_index(position: int, seed: int, epoch: int, segment: int, rows: int) -> int:
    """Return element `position` of a random permutation of 0 .. rows - 1 without computing the whole permutation. It is
    not the permutation that `permutation` returns.

    A Feistel network permutes all numbers of 2 x `half` bits. While the result is `rows` or more, the network is
    applied to the result again (cycle walking: Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    half = ((rows - 1).bit_length() + 1) // 2 or 1
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for number in range(_ROUNDS):
            key = struct.pack("<5Q", seed, epoch, segment, number, right)
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key) & mask)
        position = left << half | right
        if position < rows:
            return position


def weights_to_shares(weights: Sequence[float]) -> list[int]:
    """Convert sampling weights to integers (shares) that sum to WHOLE, so that arithmetic with shares is exact."""
    total = sum(weights)
    rounded = [round(weight / total * WHOLE) for weight in weights]
    largest = rounded.index(max(rounded))
    rounded[largest] += WHOLE - sum(rounded)
    return rounded


def select_sources(credits: Sequence[int], shares: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the source (index of an entry of --prompt-data) for each of the next `count` prompts, and the credit of
    every source after these prompts (smooth weighted round robin).

    For every prompt, the credit of each source grows by its share; the source with the highest credit provides the
    prompt, and its credit falls by WHOLE. So every source provides its share of the prompts as evenly as possible. If
    the shares change in a resumed run, the new shares apply to future prompts only.
    """
    now = list(credits)
    active = [source for source, share in enumerate(shares) if share]
    order = []
    for _ in range(count):
        for source in active:
            now[source] += shares[source]
        chosen = max(active, key=lambda source: (now[source], -source))
        now[chosen] -= WHOLE
        order.append(chosen)
    return order, now
