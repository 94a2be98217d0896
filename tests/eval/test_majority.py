"""majority@k, compared with the hypergeometric distribution, and the extraction of answers."""

import math

import numpy as np
import pytest

from penstock.stages.eval.scores import (
    MAX_SUBSETS,
    compute_eval_metrics,
    majority_pass_rate,
    majority_rates,
    voted_answer,
)
from penstock.storage.samples.sample import Sample, Status


def make(response: str, label: str = "", **fields) -> Sample:
    return Sample("s", "g", "s", 0, response=response, label=label, status=Status.COMPLETED, **fields)


@pytest.mark.parametrize(
    ("response", "label", "answer"),
    [
        (r"so \boxed{1,234}.", "5", "1234"),
        (r"\boxed{1} no, \boxed{ \frac12 }", "", r"\frac{1}{2}"),
        (r"<think>\boxed{7}</think>it is \boxed{8}<|im_end|>", "", "8"),
        (r"<think>\boxed{7}</think>Answer: B.", "A", "b"),
        ("Let me see.\nThe answer is **Paris**.\nBye", "Paris", "paris"),
        ("Answer: 12 apples\nwhich are 2 dozen", "12", "12"),
        ("3 + 4 = 7<|im_end|>", "7", "7"),
        ("3 + 4 = 7.50", "-7.5", "7.5"),
        ("seven", "7", None),
        ("  A  Single line. ", "", "asingleline"),
        ("two\nlines", "", None),
        ("", "", None),
    ],
)
def test_what_counts_as_the_answer(response: str, label: str, answer: str | None) -> None:
    assert voted_answer(make(response, label)) == answer


def test_an_extracted_answer_has_priority() -> None:
    assert voted_answer(make(r"\boxed{1}", rewards={"answer": 1234567.0})) == "1234567.0"
    assert voted_answer(make(r"\boxed{1}", metadata={"extracted_answer": " Yes "})) == "yes"
    assert voted_answer(make(r"\boxed{1}", metadata={"answer": "5"})) == "1", (
        "a row's own answer column is the label, not an answer"
    )


@pytest.mark.parametrize(("n", "right", "k"), [(4, 3, 4), (8, 5, 4), (8, 3, 8), (9, 4, 8), (9, 6, 4)])
def test_two_answers_are_drawn_without_replacement(n: int, right: int, k: int) -> None:
    votes = [("r", True)] * right + [("w", False)] * (n - right)
    assert math.comb(n, k) <= MAX_SUBSETS
    expected = 0.0
    for drawn in range(max(0, k - (n - right)), min(k, right) + 1):
        chance = math.comb(right, drawn) * math.comb(n - right, k - drawn) / math.comb(n, k)
        expected += chance * (1.0 if 2 * drawn > k else 0.5 if 2 * drawn == k else 0.0)
    assert majority_rates([votes])[k][0] == pytest.approx(expected)


def test_many_subsets_are_sampled_with_a_fixed_seed() -> None:
    votes = [("r", True)] * 10 + [("w", False)] * 6
    found, again = majority_rates([votes] * 2), majority_rates([votes])
    assert list(found) == [4, 8, 16] and found[16][0] == 1.0
    chances = [math.comb(10, i) * math.comb(6, 4 - i) / math.comb(16, 4) for i in range(5)]
    assert found[4][0] == pytest.approx(chances[4] + chances[3] + chances[2] / 2, abs=0.08)
    assert np.array_equal(found[4], [again[4][0]] * 2)


def test_ties_and_missing_answers() -> None:
    assert majority_pass_rate([("a", True), ("b", False)]) == 0.5
    assert majority_pass_rate([("a", True), ("a", False), ("b", False)]) == 0.5  # graders need not agree
    assert majority_pass_rate([(None, True), (None, True), ("b", False)]) == majority_pass_rate([(None, True)]) == 0.0


def test_a_majority_can_be_right_where_half_of_the_samples_are() -> None:
    """Wrong answers scatter, right ones agree."""
    samples = []
    for prompt in range(3):
        for index, answer in enumerate(["42", "42", "1", "2"]):
            sample = make(f"\\boxed{{{answer}}}", "42", reward=float(answer == "42"))
            sample.group_id, sample.sample_id = f"{prompt}", f"{prompt}-{index}"
            sample.token_ids = sample.loss_mask = [1]
            samples.append(sample)
    found = compute_eval_metrics(samples, "x")
    assert (found["eval/x-pass@1"], found["eval/x-majority@4"], found["eval/x-majority@4-ci_low"]) == (0.5, 1.0, 1.0)
    for sample in samples:
        sample.response = "a\nb"
        sample.label = ""
    assert not any("majority" in name for name in compute_eval_metrics(samples, "x")), "no sample has an answer"
