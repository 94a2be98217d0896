"""Built-in rewards: exact_number, random, the boxed_ prefix, and answers that math compares."""

import pytest

from penstock.stages.rewards.builtin.math_answer import last_boxed, same_answer
from penstock.stages.rewards.hub import REWARDS, get_builtin_reward
from penstock.stages.rewards.math.latex import ExpressionError, parse_expression
from penstock.stages.rewards.math.tokens import tokenize
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample


def sample(response: str, label: str = "", sample_id: str = "0") -> Sample:
    return Sample(sample_id, "g", sample_id, 0, response=response, label=label)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("45<|end|>", "45", 1),
        ("the sum is 40, no, 45.", " 45 ", 1),
        ("45 or 46", "45", 0),
        ("-3", "-3", 1),
        ("-3", "3", 0),
        ("045", "45", 0),
        ("none", "45", 0),
        ("", "", 0),
    ],
)
def test_exact_number_compares_the_last_integer(response: str, label: str, reward: float) -> None:
    assert REWARDS["exact_number"].function(sample(response, label)) == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}{c{d}}}e", "a{b}{c{d}}"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{5} and an open \boxed{6", "5"),
        ("42", None),
    ],
)
def test_last_boxed_returns_the_last_complete_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("42", "42.0"),
        (r"\dfrac{1}{2}", "0.5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\left( 1, 2 \right]", "(1,2]"),
        (r"(1, \frac{2}{4})", "(1,0.5)"),
        (r"x = 5\text{ cm}", "5"),
        (r"1{,}234", "1234"),
        ("10,000", "10000"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\sqrt[3]{27}", "3"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{\pi}{2}", "0.5\\pi"),
        (r"2^{10}", "1024"),
        ("3!", "6"),
        (r"-\frac{1}{3}", r"\frac{-1}{3}"),
        (r"\text{East}", "East"),
        ("1, 2", "1,2"),
        (r"\sin^2(x)+1", r"\sin^2(x)+1"),
    ],
)
def test_equal_answers_are_equal_both_ways(answer: str, label: str) -> None:
    assert same_answer(answer, label) and same_answer(label, answer)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("42", "43"),
        ("(1,2]", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("1,2", "1,2,3"),
        ("stop", "pots"),
        (r"\text{East}", r"\text{West}"),
        ("0.33", r"\frac{1}{3}"),
        ("x", "y"),
        ("", "0"),
        ("1/0", "5"),
        ("__import__('os').system('x')", "0"),
        ("9" * 400, "8" * 400),
    ],
)
def test_different_answers_are_different_both_ways(answer: str, label: str) -> None:
    assert not same_answer(answer, label) and not same_answer(label, answer)


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "a.b", "f'(x", "()", "x_", "1 2", "stop"])
def test_parse_of_an_invalid_expression_raises(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(tokenize(text))


def test_math_without_a_box_gets_0() -> None:
    grade = REWARDS["math"].function
    assert grade(sample(r"thus \boxed{0.5}", r"\frac{1}{2}")) == 1
    assert grade(sample(r"thus \boxed{0.5}", r"we get \boxed{\frac{1}{2}}")) == 1
    assert grade(sample("thus 0.5", "0.5")) == 0


def test_boxed_prefix_grades_only_the_box() -> None:
    assert get_builtin_reward("boxed_exact_number").function(sample(r"\boxed{7} 8", "7")) == 1
    assert get_builtin_reward("boxed_exact_number").function(sample("7", "7")) == 0


def test_zero_reward_is_zero() -> None:
    assert REWARDS["zero"].function(sample("42")) == 0.0


def test_random_reward_is_fair_and_repeatable() -> None:
    tosses = [REWARDS["random"].function(sample("", sample_id=f"{i}")) for i in range(1000)]
    assert set(tosses) == {0.0, 1.0} and 430 < sum(tosses) < 570
    assert tosses == [REWARDS["random"].function(sample("", sample_id=f"{i}")) for i in range(1000)]


def test_unknown_reward_suggests_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"exact_number\?"):
        get_builtin_reward("exact_numbers")
