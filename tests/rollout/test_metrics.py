"""Metrics and preview of a round, compared with values counted by hand."""

from typing import Any

import pytest

from penstock.engines.generation import TokenCounts
from penstock.stages.rollout.metrics import (
    PREVIEW_CHARS,
    clip_text,
    rollout_metrics,
    sample_preview,
    speculation_metrics,
    staleness_metrics,
)
from penstock.storage.samples.sample import Sample, Status


def sample(number: int, mask: list[int], reward: float | None = 1.0, prompt_length: int = 2, **fields: Any) -> Sample:
    mask = [0] * prompt_length + mask
    fields = {"token_ids": list(range(len(mask))), "rollout_logprobs": [-0.5 * trained for trained in mask]} | fields
    fields = {"loss_mask": mask, "reward": reward, "status": Status.COMPLETED} | fields
    return Sample(f"s{number}", f"g{number // 2}", f"s{number}", 0, **fields)


def test_single_turn_samples_are_counted_without_turn_metrics() -> None:
    samples = [sample(0, [1] * 2), sample(1, [1] * 4), sample(2, [1] * 6, 0.0, status=Status.TRUNCATED)]
    samples += [sample(3, [1] * 8), sample(4, [1] * 2, 0.0)]
    samples += [sample(5, [1] * 2, None, status=Status.FAILED, metadata={"error": "timeout: more than 1 s"})]
    found = rollout_metrics(samples)
    assert not [name for name in found if name.startswith("multi_turn/")]
    expected = {"raw_reward": 3 / 5, "response_len/mean": 4, "response_len/median": 3, "num_groups": 3}
    expected |= {"truncated_ratio": 1 / 6, "failed_ratio": 1 / 6, "removed_ratio": 0, "error_cat/timeout": 1}
    expected |= {"zero_std/count_1.0": 1, "zero_std/count_0.0": 1}
    assert {name: found[f"rollout/{name}"] for name in expected} == pytest.approx(expected)


def test_turns_and_the_tokens_of_tools_are_counted() -> None:
    samples = [
        sample(0, [1, 1, 0, 0, 0, 1], metadata={"num_turns": 2}),
        sample(1, [1, 0, 1, 0, 1, 0], metadata={"num_turns": 3}),
        sample(2, [1], metadata={"num_turns": 1}),
    ]
    found = rollout_metrics(samples)
    assert {name: value for name, value in found.items() if name.startswith("multi_turn/")} == {
        "multi_turn/num_turns/mean": 2.0,
        "multi_turn/num_turns/max": 3.0,
        "multi_turn/tool_tokens/mean": 2.0,
        "multi_turn/raw_response_length/response_length_mean": 13 / 3,
        "multi_turn/raw_response_length/response_length_max": 6.0,
    }
    removed = [*samples, sample(3, [0, 0]), sample(4, [], status=Status.FAILED, reward=None)]
    assert rollout_metrics(removed)["rollout/removed_ratio"] == 0.2, "failed samples are not among them"
    lengths = [found[f"rollout/response_len/{name}"] for name in ("mean", "max")]
    assert lengths == [7 / 3, 3.0], "what is trained, as in slime"


def test_groups_with_equal_rewards_are_counted_under_slimes_names() -> None:
    """str(round(reward, 1)), and groups with one graded sample are among them."""
    rewards = [1.0, 1.0, 0.0, 1.0, 0.25, 0.25, -1.0, None, -0.01, -0.01]
    samples = [sample(number, [1], reward) for number, reward in enumerate(rewards)]
    found = rollout_metrics([*samples, sample(10, [1], 0.0)])
    assert {name: value for name, value in found.items() if "zero_std" in name} == {
        "rollout/zero_std/count_1.0": 1.0,
        "rollout/zero_std/count_0.2": 1.0,
        "rollout/zero_std/count_-1.0": 1.0,
        "rollout/zero_std/count_0.0": 2.0,
    }
    assert found["rollout/num_groups"] == 6.0


def test_staleness_is_the_mean_age_of_the_trained_tokens() -> None:
    samples = [sample(0, [0, 1, 1], policy_versions=(7, 7)), sample(1, [0, 0, 1, 1], policy_versions=(6, 7))]
    samples[1].metadata["policy_spans"] = [[6, 1], [7, 1]]
    fractions = {"rollout/staleness/fraction_0": 0.75, "rollout/staleness/fraction_1": 0.25}
    assert staleness_metrics(samples, 7) == {"rollout/staleness/mean": 0.25, "rollout/staleness/max": 1.0} | fractions
    assert staleness_metrics(samples[:1], 7) == {"rollout/staleness/mean": 0.0, "rollout/staleness/max": 0.0}
    assert staleness_metrics([sample(0, [1])], 7) == {}  # a demonstration


def test_speculation_metrics_are_absent_without_speculation() -> None:
    found = speculation_metrics(TokenCounts(verifications=4, proposed=12, accepted=6))
    assert found == {"rollout/spec_accept_length": 2.5, "rollout/spec_accept_rate": 0.5}
    assert speculation_metrics(TokenCounts()) == {}


@pytest.mark.parametrize(("count", "rewards"), [(0, []), (1, [9]), (4, [9, 6, 3, 0]), (99, range(9, -1, -1))])
def test_preview_covers_best_to_worst(count: int, rewards: list[int]) -> None:
    samples = [sample(i, [1], reward=float(reward)) for i, reward in enumerate([3, 9, 0, 6, 4, 1, 8, 2, 7, 5])]
    assert [row["reward"] for row in sample_preview(samples, count)] == list(rewards)
    assert sample_preview(samples, count) == sample_preview(samples[::-1], count)


def test_preview_shows_failed_samples_only_without_others() -> None:
    failed = sample(0, [], reward=None, status=Status.FAILED, metadata={"error": "timeout: more than 1 s in f"})
    rows = sample_preview([failed, sample(1, [1])], 4)
    assert [(row["sample"], row["status"]) for row in rows] == [("s1", "completed"), ("s0", "failed")]
    assert rows[1]["error"] == "timeout: more than 1 s in f"
    assert list(rows[0]) == list(rows[1])  # they are columns of one table
    assert sample_preview([], 4) == []


def test_long_text_is_clipped_in_the_middle() -> None:
    text = "".join(chr(97 + i % 26) for i in range(50_000))
    short = clip_text(text)
    assert len(short) <= PREVIEW_CHARS and "48,000 characters" in short
    assert text.startswith(short[:900]) and text.endswith(short[-900:])
    assert clip_text("x" * PREVIEW_CHARS) == "x" * PREVIEW_CHARS
