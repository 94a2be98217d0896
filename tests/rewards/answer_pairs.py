"""Generation of answer pairs whose equality is known by construction: spellings of one value, or of two values."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import isfunction
from random import Random

from tests.rewards import answer_kinds, answer_kinds_everyday, answer_kinds_notation

SEED = 20240


@dataclass(frozen=True)
class AnswerPair:
    """Two answers, and whether they are equal."""

    kind: str
    left: str
    right: str
    equal: bool


KINDS = [
    kind
    for module in (answer_kinds, answer_kinds_notation, answer_kinds_everyday)
    for kind in vars(module).values()
    if isfunction(kind) and kind.__module__ == module.__name__ and kind.__annotations__.get("return") == "Spellings"
]


def generate_pairs(per_kind: int = 42, seed: int = SEED) -> list[AnswerPair]:
    """Return `per_kind` pairs of every kind, the first half of them equal. The result depends only on the seed."""
    pairs = []
    for kind in KINDS:
        draw = Random(f"{seed} {kind.__name__}")
        for number in range(per_kind):
            same, others = kind(draw)
            equal = number < per_kind // 2
            left, right = draw.sample(same, 2) if equal else (draw.choice(same), draw.choice(others))
            if draw.random() < 0.5:
                left, right = right, left
            pairs.append(AnswerPair(kind.__name__, left, right, equal))
    return pairs
