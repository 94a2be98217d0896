"""Built-in rewards on cases written by hand."""

import random
from typing import Any

import pytest

from penstock.stages.rewards.builtin import answer_text
from penstock.stages.rewards.grading import check_reward_options
from penstock.stages.rewards.hub import REWARDS, get_builtin_reward
from penstock.stages.rewards.math.expressions import ExpressionError, parse_expression
from penstock.stages.rewards.math.tokens import tokenize
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample


def graded(name: str, response: str, label: str = "", **metadata: Any) -> Any:
    return get_builtin_reward(name).function(
        Sample("0", "g", "0", 0, response=response, label=label, metadata=metadata)
    )


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        *(("45<|end|>", "45", 1), ("the sum is 40, no, 45.", " 45 ", 1), ("45 or 46", "45", 0), ("-3", "-3", 1)),
        *(("-3", "3", 0), ("045", "45", 0), ("none", "45", 0), ("", "", 0)),
    ],
)
def test_exact_number_compares_the_last_integer(response: str, label: str, reward: float) -> None:
    assert graded("exact_number", response, label) == reward


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "a.b", "x_", "1 2"])
def test_parse_of_an_invalid_expression_raises(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(tokenize(text))


@pytest.mark.parametrize(
    ("name", "response", "label", "reward"),
    [
        ("math", r"thus \boxed{0.5}", r"we get \boxed{\frac{1}{2}}", 1),
        ("math", "thus 0.5", "0.5", 0),
        ("boxed_exact_number", r"\boxed{7} 8", "7", 1),
        ("boxed_exact_number", "7", "7", 0),
        ("zero", "42", "", 0),
    ],
)
def test_math_and_boxed_rewards_grade_only_the_box(name: str, response: str, label: str, reward: float) -> None:
    assert graded(name, response, label) == reward


def test_random_reward_is_fair_and_repeatable() -> None:
    toss = REWARDS["random"].function
    tosses = [[toss(Sample(f"{i}", "g", f"{i}", 0)) for i in range(1000)] for _ in range(2)]
    assert set(tosses[0]) == {0.0, 1.0} and 430 < sum(tosses[0]) < 570 and tosses[0] == tosses[1]


def test_unknown_reward_suggests_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"exact_number\?"):
        get_builtin_reward("exact_numbers")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("one</think>two</think> three</s>\n", " three"),
        ("plain <|eot_id|><|end_of_text|>", "plain"),
        ("a <|x|> b", "a <|x|> b"),
        ("done<｜end▁of▁sentence｜>", "done"),
    ],
)
def test_answer_text_drops_thought_and_end_tokens(response: str, answer: str) -> None:
    assert answer_text(response) == answer


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{42}", "42", 0),  # no thought
        (r"<think>\boxed{42}</think> I do not know", "42", 0),
        (r"<think>\boxed{1}</think> \boxed{41} or \boxed{42}<|im_end|>", "42", 1),
        (r"###Response: \boxed{\frac{1}{2}}", "0.5", 1),
        (r"###Instruction \boxed{3} ###Response \boxed{4}", "3", 0),
        (r"</think>\boxed{5}", r"the answer is \boxed{5}", 1),
        (r"</think>\boxed{5}", "", 0),
        (r"</think>\boxed{}", "", 0),
    ],
)
def test_deepscaler_grades_the_box_after_the_thought(response: str, label: str, reward: float) -> None:
    assert graded("deepscaler", response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        *(("answer :34", "34", 1), ("Answer: 33\nAnswer: 34<|im_end|>", "34", 1)),
        *(("Answer: 34\nAnswer: 33", "34", -1), ("the answer is 34", "34", -1), (r"Answer: $\boxed{34}$", "34", 1)),
        *((r"Answer: $x = 34$", "34", 1), (r"Answer: $34$.", "34", 1), (r"Answer: 1,234 dollars", "1234", 1)),
        *((r"Answer: \$34", "34", 1), (r"Answer: 34^\circ", "34", 1), (r"Answer: 34 \text{ cm}", "34", 1)),
        *((r"Answer: \text{34}", "34", 1), ("Answer: 34", "34.0", 1), ("Answer: 34.0", "34", -1)),
        *(("Answer: thirty", "34", -1), ("Answer: -0.25", "-0.25", 1)),
        ("Answer: 12345678901234567891", "12345678901234567891", 1),  # more digits than a float has
        ("Answer: 12345678901234567168", "12345678901234567891", -1),
        ("Answer: 34" + "\n" + "x" * 300, "34", -1),  # too far from the end
    ],
)
def test_dapo_compares_the_last_answer_line(response: str, label: str, score: float) -> None:
    assert graded("dapo", response, label) == {"score": score, "acc": float(score == 1)}


def test_dapo_without_a_number_as_label_or_a_reward_key_is_rejected() -> None:
    for label in ("East", "", "nan", "1e999999999"):
        with pytest.raises(RewardError):
            graded("dapo", "Answer: East", label)
    with pytest.raises(RewardError, match=r"score, acc.*--reward-key"):
        check_reward_options(RolloutConfig(rm_type="boxed_dapo"))
    check_reward_options(RolloutConfig(rm_type="dapo", reward_key="score"))


@pytest.mark.parametrize(
    ("response", "label", "f1"),
    [
        ("the tower", "Eiffel tower", 2 / 3),  # precision 1, recall 1/2
        ("red red blue", "red green", 2 / 5),  # one of three, one of two
        ("the", "a", 0),  # only articles
        *(("The Eiffel Tower!", "eiffel tower", 1), ("Paris", "London", 0), ("yes", "Yes.", 1), ("", "Paris", 0)),
        *(("yes it is", "yes", 0), ("no", "no way", 0), ("noanswer", "noanswer", 1), ("Paris<|im_end|>", "Paris", 1)),
    ],
)
def test_f1_compares_normalized_words(response: str, label: str, f1: float) -> None:
    assert graded("f1", response, label) == pytest.approx(f1)


FOUR = {"choices": ["red blood cell", "the Sun", "ion", "Moon"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is (B) because A is wrong", "B", FOUR, 1),
        ("answer: c", "C", FOUR, 1),
        (r"The final answer is $\boxed{D}$.", "D", FOUR, 1),
        ("D is the correct one", "D", FOUR, 1),
        ("Not A. Not B. C", "C", FOUR, 1),  # the last capital
        ("The answer is a matter of taste: C", "C", FOUR, 1),
        ("<think>The answer is A.</think>The answer is B.", "B", FOUR, 1),
        ("The answer is A.", "B", FOUR, 0),
        ("The answer is B.", "the sun", FOUR, 1),  # the label is the text of a choice
        ("The answer is B.", "1", FOUR, 1),  # or its index
        ("it is the sun, clearly", "B", FOUR, 1),  # text instead of a letter
        ("it is sunny", "B", FOUR, 0),
        ("surely unlisted things", "unlisted", {}, 1),
        ("The answer is B", "", {"correct_letter": "b"}, 1),
        ("The answer is Z", "Y", {"valid_letters": ["Y", "Z"]}, 0),
        ("The answer is Y", "y", {"valid_letters": ["Y", "Z"]}, 1),
        ("The answer is Q", "Q", {"choices": {"P": "one", "Q": "two"}}, 1),
        ("", "B", FOUR, 0),
        ("ionic", "", {"choices": ["ion"], "correct_answer": "ion"}, 0),
        ("it is an ion", "", {"choices": ["ion"], "correct_answer": "ion"}, 1),
    ],
)
def test_gpqa_compares_the_chosen_letter_or_text(
    response: str, label: str, metadata: dict[str, Any], reward: float
) -> None:
    assert graded("gpqa", response, label, **metadata) == reward


@pytest.mark.parametrize("name", [name for name, reward in REWARDS.items() if not reward.remote])
def test_any_response_gets_a_reward_between_minus_1_and_1(name: str) -> None:
    """Compose responses from the pieces that graders search for."""
    pieces = [r"\boxed{", "}", "</think>", "Answer:", "answer is", "A", "(B)", " ", "\n", "$", r"\frac", r"\text{"]
    pieces += ["1", "/0", "^", "é", "✓", '"', "###Response"]
    draw = random.Random(0)
    for _ in range(60):
        response = "".join(draw.choices(pieces, k=draw.randrange(12)))
        value = graded(name, response, "7", instruction_id_list=["punctuation:no_comma"], kwargs=[{}])
        numbers = value.values() if isinstance(value, dict) else [value]
        assert all(-1 <= number <= 1 for number in numbers), response
