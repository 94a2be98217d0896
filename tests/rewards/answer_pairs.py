"""Pairs of answers with a label by construction: two spellings of one value, or spellings of two values."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import isfunction
from random import Random

from tests.rewards import answer_kinds, answer_kinds_algebra, answer_kinds_collections

SEED = 20240


@dataclass(frozen=True)
class Pair:
    """Two answers, and whether they are the same."""

    kind: str
    left: str
    right: str
    equal: bool


KINDS = [
    kind
    for module in (answer_kinds, answer_kinds_collections, answer_kinds_algebra)
    for kind in vars(module).values()
    if isfunction(kind) and kind.__module__ == module.__name__ and kind.__annotations__.get("return") == "Spellings"
]


def made_pairs(per_kind: int = 42, seed: int = SEED) -> list[Pair]:
    """`per_kind` pairs of every kind, the first half equal; the same for the same seed."""
    pairs = []
    for kind in KINDS:
        draw = Random(f"{seed} {kind.__name__}")
        for number in range(per_kind):
            same, others = kind(draw)
            equal = number < per_kind // 2
            left, right = draw.sample(same, 2) if equal else (draw.choice(same), draw.choice(others))
            if draw.random() < 0.5:
                left, right = right, left
            pairs.append(Pair(kind.__name__, left, right, equal))
    return pairs
