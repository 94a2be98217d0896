"""In which order rows and sources are visited: pure functions of seeds and counters. Nothing here may ever change: resumed runs live on it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

WHOLE = 1 << 32  # all shares together
_ROUNDS = 6


def permutation(seed: int, epoch: int, segment: int, rows: int) -> np.ndarray:
    """A random order of 0 .. rows - 1, [rows] uint32: 4 bytes per row."""
    # RandomState, not Generator: NumPy promises that its stream never changes (NEP 19). Shuffled in place, for
    # RandomState.permutation gives the same order in 8 bytes per row.
    order = np.arange(rows, dtype=np.uint32)
    np.random.RandomState([seed, epoch, segment]).shuffle(order)
    return order


def scattered(position: int, seed: int, epoch: int, segment: int, rows: int) -> int:
    """Row number `position` of a random order of 0 .. rows - 1, without making the order: no memory at all.

    A Feistel network is a permutation of all numbers of 2 x `half` bits; what falls outside is sent through again until it falls inside
    (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
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


def shares(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers that sum to WHOLE, so that counting with them is exact."""
    total = sum(weights)
    rounded = [round(weight / total * WHOLE) for weight in weights]
    largest = rounded.index(max(rounded))
    rounded[largest] += WHOLE - sum(rounded)
    return rounded


def turns(credits: Sequence[int], shares: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Which source is asked for each of the next `count` prompts, and the credits after that.

    Every prompt gives each source its share as credit; the source with most credit is asked and pays for a whole prompt. So each gets
    its share as evenly as whole prompts allow, and changed shares ask for nothing to be made up (smooth weighted round robin).
    """
    now = list(credits)
    active = [source for source, share in enumerate(shares) if share]
    asked = []
    for _ in range(count):
        for source in active:
            now[source] += shares[source]
        chosen = max(active, key=lambda source: (now[source], -source))
        now[chosen] -= WHOLE
        asked.append(chosen)
    return asked, now
