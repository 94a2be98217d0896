"""What the built-in rewards say about answers."""

import pytest

from stages.rewards.answer_tokens import tokens_of
from stages.rewards.boxed import last_boxed
from stages.rewards.hub import REWARDS, reward_named
from stages.rewards.latex import NotAnExpression, parse
from stages.rewards.math_answer import same_answer
from storage.sample import Sample


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
def test_exact_number(response: str, label: str, reward: float) -> None:
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
def test_last_boxed(text: str, answer: str | None) -> None:
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
def test_same_answers(answer: str, label: str) -> None:
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
def test_different_answers(answer: str, label: str) -> None:
    assert not same_answer(answer, label) and not same_answer(label, answer)


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "a.b", "f'(x)", "()", "x_", "1 2", "stop"])
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(NotAnExpression):
        parse(tokens_of(text))


def test_math_needs_a_box() -> None:
    grade = REWARDS["math"].function
    assert grade(sample(r"thus \boxed{0.5}", r"\frac{1}{2}")) == 1
    assert grade(sample(r"thus \boxed{0.5}", r"we get \boxed{\frac{1}{2}}")) == 1
    assert grade(sample("thus 0.5", "0.5")) == 0


def test_boxed_prefix_grades_the_box_alone() -> None:
    assert reward_named("boxed_exact_number").function(sample(r"\boxed{7} 8", "7")) == 1
    assert reward_named("boxed_exact_number").function(sample("7", "7")) == 0


def test_coin_is_fair_and_repeatable() -> None:
    tosses = [REWARDS["random"].function(sample("", sample_id=f"{i}")) for i in range(1000)]
    assert set(tosses) == {0.0, 1.0} and 430 < sum(tosses) < 570
    assert tosses == [REWARDS["random"].function(sample("", sample_id=f"{i}")) for i in range(1000)]


def test_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean exact_number"):
        reward_named("exact_numbers")
