"""Comparison of mathematical answers: near misses and unusual spellings by kind, written by hand."""

import pytest

from penstock.stages.rewards.builtin.math_answer import same_answer
from tests.rewards.answer_near_misses import KINDS

REFUSED = {  # equal, but the grader does not know
    (r"[1,2]\cup[2,3]", "[1,3]"), (r"\pm 0", "0"), (r"180^\circ-x", "180-x"), (r"7\bmod 3", "1"),
    (r"\max(a,b)", r"\max\{a,b\}"), (r"\vec{AB}", r"\overrightarrow{AB}"), ("The area is 12", "12"), ("half", "1/2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_spellings_of_one_answer_are_equal_both_ways(kind: str) -> None:
    equal = [pair for pair in KINDS[kind][0] if pair not in REFUSED]
    assert [pair for pair in equal if not (same_answer(*pair) and same_answer(*pair[::-1]))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_differ_in_one_detail_are_different_both_ways(kind: str) -> None:
    assert [pair for pair in KINDS[kind][1] if same_answer(*pair) or same_answer(*pair[::-1])] == []
