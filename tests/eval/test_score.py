"""Metrics of an evaluation, compared with brute force, and bootstrap intervals, compared with the theory."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from penstock.stages.eval import scores as module
from penstock.stages.eval.config import EvalConfig, is_eval_metric
from penstock.stages.eval.scores import bootstrap_intervals, compute_eval_metrics, pass_rates
from penstock.storage.samples.sample import Sample, Status


def test_pass_at_k_is_the_fraction_of_draws_with_a_pass() -> None:
    for c, n in [(right, size) for size in range(1, 7) for right in range(size + 1)]:
        group = [True] * c + [False] * (n - c)
        for k, rate in pass_rates([group]).items():
            draws = list(itertools.combinations(group, k))
            assert rate[0] == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_rates_use_the_groups_own_size() -> None:
    rates = pass_rates([[True, False, False, False], [False] * 5])
    assert {k: rate.mean() for k, rate in rates.items()} == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})


def make(group: str, reward: float | None, status: Status = Status.COMPLETED, tokens: int = 2) -> Sample:
    return Sample("s", group, "s", 0, token_ids=[1] * tokens, loss_mask=[1] * tokens, reward=reward, status=status)


def test_score() -> None:
    found = compute_eval_metrics(
        [make("a", 1.0), make("a", 0.0, Status.TRUNCATED, 6), make("b", None, Status.FAILED), make("b", 1.0)], "aime"
    )
    assert found["eval/aime"] == 0.5
    assert found["eval/aime-truncated_ratio"] == found["eval/aime-failed_ratio"] == 0.25
    assert found["eval/aime/response_len/mean"] == 3 and found["eval/aime/response_len/max"] == 6
    assert found["eval/aime-pass@1"] == 0.5 and found["eval/aime-pass@2"] == 1.0


def parts(group: str, reward: float | None, rewards: dict[str, float]) -> Sample:
    return dataclasses.replace(make(group, reward), rewards=rewards)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([parts("a", 1.0, {"correct": 1.0, "format": 0.5}), parts("a", 0.0, {"correct": 0.0, "format": 0.0})],
         {"correct": 0.5, "format": 0.25}),
        ([parts("a", 1.0, {"correct": 1.0}), parts("b", None, {})], {"correct": 0.5}),
        ([parts("a", 1.0, {"correct": 1.0}), parts("b", 1.0, {"style": 3.0})], {"correct": 1.0, "style": 3.0}),
        ([parts("a", 1.0, {}), parts("b", None, {})], {}),
    ],
    ids=["two parts", "failed sample", "different parts", "numbers"],
)  # fmt: skip
def test_parts_of_a_dictionary_reward_have_means(samples: list[Sample], expected: dict[str, float]) -> None:
    metrics = compute_eval_metrics(samples, "aime")
    prefix = "eval/aime/rewards/"
    assert {name.removeprefix(prefix): v for name, v in metrics.items() if name.startswith(prefix)} == expected
    assert all(is_eval_metric(name, "aime") for name in metrics)


def test_keep_best_accepts_every_metric_of_an_evaluation_and_nothing_else() -> None:
    samples = [make(f"{i % 2}", float(i % 3 == 0)) for i in range(16)]
    for sample in samples:
        sample.rewards = {"correct": sample.reward or 0.0}
        sample.metadata["answer"] = "1"
    metrics = compute_eval_metrics(samples, "gsm8k")
    assert {"eval/gsm8k", "eval/gsm8k-pass@8", "eval/gsm8k-pass@2-ci_low"} <= metrics.keys()
    assert all(is_eval_metric(metric, "gsm8k") for metric in [*metrics, "eval/gsm8k-majority@4-ci_high"])
    typos = ["eval/gsm8k2", "eval/gsm8k-pas@1", "eval/gsm8k-pass@", "eval/gsm8k/", "eval/gsm", "gsm8k", "eval/gsm8k-"]
    assert [typo for typo in typos if is_eval_metric(typo, "gsm8k")] == []
    assert is_eval_metric("eval/gsm8k-mine", "gsm8k", any_suffix=True)
    assert not is_eval_metric("eval/gsm8k2", "gsm8k", any_suffix=True)


def test_order_of_samples_does_not_matter() -> None:
    rng = random.Random(0)
    samples = [make(f"{i % 5}", float(rng.random() < 0.4), tokens=rng.randint(1, 9)) for i in range(20)]
    expected = compute_eval_metrics(samples, "x")
    rng.shuffle(samples)
    assert compute_eval_metrics(samples, "x") == pytest.approx(expected)


def test_undefined_pass_rates_are_omitted_or_an_error() -> None:
    graded = [make("a", -1.0), make("a", 1.0)]
    assert not any("pass@" in name for name in compute_eval_metrics(graded, "x"))
    with pytest.raises(ValueError, match=r"data set x has the reward -1.*--pass-threshold"):
        compute_eval_metrics(graded, "x", require_pass_rate=True)
    assert compute_eval_metrics(graded, "x", pass_threshold=1.0)["eval/x-pass@1"] == 0.5


@pytest.mark.parametrize(
    "given", [[["a", "x.jsonl"], ["b", "y.jsonl"]], ["a", "x.jsonl", "b", "y.jsonl"], {"a": "x.jsonl", "b": "y.jsonl"}]
)
def test_data_sets_are_accepted_in_every_spelling(given: object) -> None:
    assert EvalConfig(eval_prompt_data=given).eval_prompt_data == [("a", "x.jsonl"), ("b", "y.jsonl")]


def test_missing_settings_are_inherited_from_the_rollout() -> None:
    fixed = {"prompt_data": ["x.jsonl"], "rollout_shuffle": False, "n_samples_per_prompt": 1, "group_rm": False}
    fixed |= {"opd_teacher_key": None, "opd_hint_key": None}  # an evaluation has no teacher
    assert EvalConfig().rollout_overrides("x.jsonl") == fixed
    said = EvalConfig(
        eval_temperature=0.0, eval_top_p=0.7, n_samples_per_eval_prompt=16, eval_max_response_len=9
    ).rollout_overrides("x")
    assert (said["rollout_temperature"], said["rollout_top_p"], said["rollout_max_response_len"]) == (0.0, 0.7, 9)
    assert said["n_samples_per_prompt"] == 16


def test_a_reward_entry_correct_defines_passing() -> None:
    samples = [make("a", -1.0), make("a", 1.0), make("b", None, Status.FAILED), make("b", -1.0)]
    for sample, correct in zip(samples, (0.0, 1.0, None, 1.0)):
        sample.rewards = {} if correct is None else {"correct": correct}
    found = compute_eval_metrics(samples, "x")
    assert (found["eval/x"], found["eval/x-pass@1"], found["eval/x-pass@2"]) == (-0.25, 0.5, 1.0)
    assert compute_eval_metrics(samples, "x", pass_threshold=2.0)["eval/x-pass@1"] == 0.0, (
        "a threshold that is said goes first"
    )
    samples[0].rewards = {}
    assert "eval/x-pass@1" not in compute_eval_metrics(samples, "x"), "known of some samples is not known"


def test_every_mean_has_an_interval_around_it() -> None:
    rng = random.Random(1)
    samples = [make(f"{i % 40:02d}", float(rng.random() < 0.4)) for i in range(160)]
    found = compute_eval_metrics(samples, "x")
    for name in ("eval/x", "eval/x-pass@1", "eval/x-pass@2", "eval/x-pass@4"):
        assert found[f"{name}-ci_low"] < found[name] < found[f"{name}-ci_high"]
    assert found["eval/x-ci_low"] == found["eval/x-pass@1-ci_low"], "the same numbers, the same interval"
    assert not any("ci_" in name for name in compute_eval_metrics(samples[:1], "x")), "one prompt has no interval"


def test_means_of_uneven_groups_are_over_samples() -> None:
    samples = [make("a", 1.0), make("a", 1.0), make("a", 1.0), make("b", 0.0)]
    found = compute_eval_metrics(samples, "x")
    assert found["eval/x"] == 0.75 and found["eval/x-pass@1"] == 0.5
    assert (found["eval/x-ci_low"], found["eval/x-ci_high"]) == (0.0, 1.0)


def test_intervals_of_many_prompts_match_the_normal_approximation() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, size=(500, 1))
    low, high = bootstrap_intervals(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert low[0] == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high[0] == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_prompts_are_resampled_with_all_of_their_samples() -> None:
    """Eight equal samples of a prompt give the same interval as one."""
    passes = (np.random.default_rng(1).random((50, 1)) < 0.5).astype(float)
    one, eight = bootstrap_intervals(passes), bootstrap_intervals(8 * passes, np.full((50, 1), 8.0))
    assert one[0] == pytest.approx(eight[0]) and one[1] == pytest.approx(eight[1])


def test_equal_values_have_an_empty_interval_and_results_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = bootstrap_intervals(np.full((9, 1), 0.25))
    assert low == pytest.approx(0.25) and high == pytest.approx(0.25)
    values = np.random.default_rng(2).random((30, 3))
    before = bootstrap_intervals(values)
    monkeypatch.setattr(module, "_MAX_COUNTS", 30 * 7)  # in many pieces
    after = bootstrap_intervals(values)
    assert np.allclose(before, after, rtol=0, atol=1e-15)
