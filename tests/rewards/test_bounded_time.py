"""Every built-in grader on long texts that are expensive for careless parsers: 64 kB, and some of 256 kB.

The bound is a multiple of the CPU time of a loop over the characters of a text, measured in the same process. The
slowest grader takes about 30 times this time; quadratic time would be thousands of times. A timer of CPU time raises in
a grader that exceeds the bound.
"""

from __future__ import annotations

import csv
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from penstock.stages.rewards.builtin import MAX_LENGTH, same_answer
from penstock.stages.rewards.hub import get_builtin_reward
from penstock.stages.rewards.instructions.text import CHECKS
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample
from tests.rewards.adversarial import adversarial_texts, builtin_graders

BOUND = 200  # times the CPU time of a loop over SIZE characters
SIZE = 256_000
TEXTS = adversarial_texts(SIZE // 4)
LARGE_TEXTS = adversarial_texts(SIZE)
GRADERS = list(builtin_graders())
IN_EVERY_RUN = [
    *(f"{piece!r} repeated" for piece in ("[", "\n", "a. ")),
    *(r"'\\boxed{' nested", "' ' between 'answer is' and '!'", "random mixture 0"),
]
CASES = [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.full) for name in TEXTS]


@cache
def bound() -> float:
    """Return the CPU seconds that a grader may take. One loop takes milliseconds, which some clocks do not resolve."""
    start = time.process_time()
    for character in "a" * (20 * SIZE):
        character.isspace()
    return BOUND * (time.process_time() - start) / 20


@contextmanager
def bounded_cpu_time() -> Iterator[None]:
    """Raise TimeoutError in the body if it takes more than `bound` CPU seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError("the grader exceeded its bound")

    limit = bound()
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(TEXTS[case.values[0]], marks=case.marks, id=case.values[0]) for case in CASES),
        *(pytest.param(LARGE_TEXTS[name], marks=pytest.mark.full, id=f"{name}, 256 kB") for name in IN_EVERY_RUN),
    ],
)
def test_every_grader_scores_a_large_text_in_bounded_time(text: str) -> None:
    for grader, grade in GRADERS:
        with bounded_cpu_time():
            score = grade(text)
        for number in score.values() if isinstance(score, dict) else [score]:
            assert -1 <= float(number) <= 1, grader


def test_texts_of_every_run_exist() -> None:
    assert set(IN_EVERY_RUN) <= set(TEXTS)


@pytest.mark.parametrize("name", CASES)
def test_math_compares_the_longest_parsed_answers_in_bounded_time(name: str) -> None:
    """Only answers of up to MAX_LENGTH characters are parsed. Compare each text also with itself, so that all is
    evaluated."""
    text = adversarial_texts(MAX_LENGTH - 1)[name]
    for other in ("5", "x_1+1", "1,2", "(1,2)", "x>3", text + " ", text[::-1]):
        with bounded_cpu_time():
            same_answer(text, other)
            same_answer(other, text)


@pytest.mark.parametrize(
    "answer",
    [r"x\in,", "①", "5①", r"x_\ud800", "\ud800", "²²", r"\frac①2", r"\pm", r"\begin{pmatrix}\end{pmatrix}", r"\{|\}",
     "=x", r"\cup", "{" * 480 + "7" + "}" * 480, r"\{" * 300 + r"\}" * 300, "(" * 480 + "1,2" + ")" * 480,
     r"\begin{pmatrix}" * 30 + "7" + r"\end{pmatrix}" * 30, "1_①", r"\sqrt[①]{2}", "Q=M2:3"],
)  # fmt: skip
def test_malformed_answer_gets_0_without_an_exception(answer: str) -> None:
    grade = get_builtin_reward("math").function
    for label in ("5", "x_1", r"\frac12", "(1,2)", "x>3", "1,2", "12_8", r"\{1\}", "East", "2:3"):
        assert grade(Sample("0", "g", "0", 0, response=rf"\boxed{{{answer}}}", label=label)) == 0.0, label
        assert not same_answer(label, answer), label


@pytest.mark.parametrize(
    ("instruction", "arguments", "text", "followed"),
    [
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[" * 500 + "]\n[a]", True),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a\n] [b] ]", False),
        ("detectable_content:number_placeholders", {"num_placeholders": 3}, "[a][b] [c[d]]", True),
        ("detectable_format:json_format", {}, "[" * 100_000 + "]" * 100_000, False),
        ("detectable_format:json_format", {}, '{"a":' * 50_000 + "1" + "}" * 50_000, False),
        ("detectable_format:json_format", {}, "9" * 5000, True),
        ("detectable_format:json_format", {}, '{"a": ' + "9" * 5000 + "}", True),
        ("detectable_format:json_format", {}, "[" * 50 + "]" * 50, True),
        ("detectable_format:title", {}, "<<" * 500 + "\n>>", False),
        ("detectable_format:title", {}, "a << b >> c >>", True),
        ("detectable_format:title", {}, "<<>>>", False),
        ("detectable_format:title", {}, ">> a <<", False),
        ("format:thesis", {}, "<i> a </em> b", True),
        ("format:thesis", {}, "</i><i>a", False),
        ("format:thesis", {}, "<i><i>a</i>", False),
        ("custom:csv_city", {}, "a" * (csv.field_size_limit() + 1), False),
        ("custom:csv_quotes", {}, '"' + "a" * (csv.field_size_limit() + 1) + '"', False),
        ("custom:csv_special_character", {}, '"' + "!," * csv.field_size_limit() + '"', False),
        ("custom:reverse_newline", {}, "Zimbabwe\u0301\u0316", False),
    ],
)
def test_check_of_an_unusual_text_returns_a_result(
    instruction: str, arguments: dict[str, object], text: str, followed: bool
) -> None:
    assert CHECKS[instruction](text, **arguments) is followed


@pytest.mark.parametrize("label", ["9" * SIZE, "$" * SIZE, r"\boxed{" * 30_000, " " * SIZE, r"\text{" * 40_000])
def test_dapo_rejects_a_long_label_in_bounded_time(label: str) -> None:
    with bounded_cpu_time(), pytest.raises(RewardError):
        get_builtin_reward("dapo").function(Sample("0", "g", "0", 0, response="Answer: 5", label=label))


def test_gpqa_accepts_a_label_that_is_a_digit_but_no_number() -> None:
    sample = Sample("0", "g", "0", 0, response="it is ²", label="²", metadata={"choices": ["²", "³"]})
    assert get_builtin_reward("gpqa").function(sample) in (0.0, 1.0)
