"""User-defined functions between samples and training data, written as for slime."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.function_check import check_rollout_functions
from penstock.stages.rollout.plugins.hooks import make_train_data
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.experience import Experience
from penstock.stages.train.batching import Batch
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import PluginError, RunError
from penstock.storage.samples.sample import TRAIN_REWARD, Sample, Status, to_table
from penstock.storage.samples.shards import read_samples
from tests.rollout.scripted_engine import Bench

POST_PROCESS = """
def post_process(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [10 * reward + index for index, reward in enumerate(raw)]
"""
# as slime's default conversion, but every second token of a response becomes a row of its own
CONVERT = """
def convert(args, samples):
    data = {name: [] for name in ("tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices",
                                  "loss_masks", "rollout_log_probs", "rollout_ids")}
    for sample in samples:
        for end in range(1, sample.response_length + 1):
            data["tokens"].append(sample.tokens[:len(sample.tokens) - sample.response_length + end])
            data["response_lengths"].append(1)
            data["rewards"].append(sample.reward / sample.response_length)
            data["raw_reward"].append(sample.reward)
            data["truncated"].append(1)
            data["sample_indices"].append(sample.index)
            data["loss_masks"].append([1])
            data["rollout_log_probs"].append([sample.rollout_log_probs[len(data["tokens"][-1]) - 1]])
            data["rollout_ids"].append(sample.index)
    CHANGE
    return data
"""


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(option: str, code: str) -> Bench:
        (tmp_path / "functions.py").write_text(code)
        monkeypatch.delitem(sys.modules, "functions", raising=False)
        return Bench(tmp_path, tokenizer, **{option: f"{tmp_path}/functions.py"})

    return make


def advantages_of(samples: list[Sample]) -> torch.Tensor:
    batch = Batch.from_table(to_table(samples), needs_rewards=True)
    assert batch.train_rewards is not None
    experience = Experience(
        sample_index=torch.from_numpy(batch.sample_index),
        rewards=torch.from_numpy(batch.train_rewards),
        group_index=torch.from_numpy(batch.group_index),
        rollout_logprobs=torch.zeros(len(batch.sample_index), dtype=torch.float64),
        normalize_rewards=False,
    )
    return estimate_advantages(experience, TrainConfig(advantage_estimator="grpo")).advantages


def test_post_processed_rewards_are_in_the_shard_and_train_without_normalization(bench: Any) -> None:
    made = bench("custom_reward_post_process_path", POST_PROCESS)
    commit = made.round(0)
    samples = list(read_samples(made.store, commit))
    expected = [10 * (sample.reward or 0) + index for index, sample in enumerate(samples)]
    assert [sample.rewards[TRAIN_REWARD] for sample in samples] == expected
    assert commit.summary["rollout/rewards/train_reward"] == np.mean(expected)
    assert 0 <= commit.summary["rollout/raw_reward"] <= 1
    assert advantages_of(samples).tolist() == [reward for reward in expected for _ in range(2)]  # two tokens each


def test_samples_without_a_reward_are_neither_passed_nor_trained(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    (tmp_path / "functions.py").write_text(POST_PROCESS)
    config = RolloutConfig(custom_reward_post_process_path=f"{tmp_path}/functions.py")
    graded = sample_of(0, reward=2.0)
    failed = replace(sample_of(1, reward=None), status=Status.FAILED, metadata={"error": "no answer"})
    samples = make_train_data([failed, graded], config, tokenizer)
    assert [sample.rewards for sample in samples] == [{}, {TRAIN_REWARD: 20.0}]
    assert advantages_of(samples).tolist() == [20.0, 20.0]


def test_conversion_that_splits_samples_is_trained_row_by_row(bench: Any, tokenizer: PromptTokenizer) -> None:
    made = bench("custom_convert_samples_to_train_data_path", CONVERT.replace("CHANGE", ""))
    rows = list(read_samples(made.store, made.round(0)))
    assert len(rows) == 16 and len({row.sample_id for row in rows}) == 16
    assert len({row.trajectory_id for row in rows}) == 8  # the loss averages over samples, not over their rows
    first, second = rows[:2]
    assert second.token_ids[:-1] == first.token_ids and second.sample_id == f"{first.sample_id}.1"
    assert [row.rollout_logprobs[-1] for row in (first, second)] == [-0.5, -0.25]
    assert [sum(row.loss_mask) for row in rows] == [1] * 16
    assert second.response == tokenizer.decode([second.token_ids[-1:]], skip_special_tokens=False)[0]
    assert second.prompt.startswith(first.prompt) and {row.status for row in rows} == {Status.TRUNCATED}
    assert advantages_of(rows).tolist() == [(row.reward or 0) / 2 for row in rows]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data['metadata'] = [{}] * 16", "returned metadata, which shards have no column for"),
        ("data['round_number'] = data['truncated']", "returned round_number, which shards have no column for"),
        ("del data['rewards']", "returned no rewards"),
        ("data['rewards'].pop()", r"lists of different lengths \(16 tokens"),
        ("data['rewards'][3] = float('nan')", "rewards that are not finite"),
        ("data['sample_indices'][0] = 99", "the sample index 99 for 8 samples"),
        ("data['sample_indices'] = [1] * 16", "no row of sample 0, but optimizer steps need all"),
        ("data['rollout_ids'] = list(range(16))", "rollout_ids that are not one per sample"),
        ("data['loss_masks'][2] = [1, 1]", "row 2: loss_mask has 2 entries for a response of 1"),
        ("del data['rollout_log_probs']", "row 0: the sample has trained tokens without log-probs"),
        ("data['response_lengths'][1] = 0", "row 1: response_lengths is 0"),
        ("return [1]", "returned list: return a dictionary of lists"),
        ("1 / 0", "raises ZeroDivisionError"),
    ],
)
def test_conversion_that_cannot_be_recorded_fails_the_round(change: str, message: str, bench: Any) -> None:
    made = bench("custom_convert_samples_to_train_data_path", CONVERT.replace("CHANGE", change))
    with pytest.raises(PluginError, match=message) as raised:
        made.round(0)
    assert "convert of" in str(raised.value)


def test_conversion_without_a_change_keeps_what_it_does_not_return(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    (tmp_path / "functions.py").write_text(
        "def convert(args, samples):\n"
        "    return {'tokens': [s.tokens for s in samples], 'response_lengths': [2 for s in samples],\n"
        "            'rewards': [1.5 for s in samples], 'loss_masks': [[0, 1] for s in samples]}\n"
    )
    config = RolloutConfig(custom_convert_samples_to_train_data_path=f"{tmp_path}/functions.py:convert")
    sample = replace(sample_of(0, reward=2.0), teacher_logprobs=[0.0, -1.0, -2.0], rewards={"style": 1.0})
    [row] = make_train_data([sample], config, tokenizer)
    rewards = {"style": 1.0, TRAIN_REWARD: 1.5}
    assert row == replace(sample, loss_mask=[0, 0, 1], rollout_logprobs=[0.0, 0.0, -0.25], rewards=rewards)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[1.0]", "returned list: return the two lists"),
        ("([1.0], [1.0, 2.0])", "returned 2 rewards for 1 samples"),
        ("(['x'], [1.0])", "rewards that are not numbers"),
    ],
)
def test_wrong_rewards_are_refused(result: str, message: str, tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    (tmp_path / "functions.py").write_text(f"def post_process(args, samples):\n    return {result}\n")
    config = RolloutConfig(custom_reward_post_process_path=f"{tmp_path}/functions.py")
    with pytest.raises(PluginError, match=message):
        make_train_data([sample_of(0, reward=1.0)], config, tokenizer)


def test_functions_are_checked_before_the_run(bench: Any) -> None:
    made = bench("custom_reward_post_process_path", "def post_process(samples): pass")
    with pytest.raises(PluginError, match=r"is called with \(args, samples\)"):
        check_rollout_functions(made.config)
    with pytest.raises(ValueError, match="--custom-reward-post-process-path is not called with"):
        RolloutConfig(custom_reward_post_process_path="a.py", custom_convert_samples_to_train_data_path="a.py")


def test_reward_with_the_reserved_name_is_refused_by_the_trainer() -> None:
    samples = [replace(sample_of(0, reward=1.0), rewards={TRAIN_REWARD: 1.0}), sample_of(1, reward=1.0)]
    with pytest.raises(RunError, match="samples with and without a train_reward"):
        Batch.from_table(to_table(samples), needs_rewards=True)


def sample_of(number: int, *, reward: float | None) -> Sample:
    return Sample(
        *(f"g-{number}", "g", f"g-{number}", 0, "p", "r", ""),
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        rollout_logprobs=[0.0, -0.5, -0.25],
        reward=reward,
        status=Status.COMPLETED,
        policy_versions=(0, 0),
    )


def test_function_of_the_documentation_centers_the_rewards_of_a_round(bench: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")
    code = page.partition("```python post_process\n")[2].partition("```")[0]
    made = bench("custom_reward_post_process_path", code)
    samples = list(read_samples(made.store, made.round(0)))
    assert sum(sample.rewards[TRAIN_REWARD] for sample in samples) == pytest.approx(0)
