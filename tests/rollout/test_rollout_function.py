"""User-defined functions written as for slime: rollout, evaluation and log functions, and what makes training data of
samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from penstock.engines.serving import endpoints
from penstock.stages.plugins import load_function
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.hooks import make_train_data
from penstock.stages.rollout.plugins.rollout_function import (
    NOT_RETURNED,
    check_rollout_functions,
    find_evaluation_function,
)
from penstock.stages.rollout.rollout import read_resume_point
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.slime.slime_modules import MODULES
from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.experience import Experience
from penstock.stages.train.batching import Batch
from penstock.stages.train.config import TrainConfig
from penstock.storage.commit import Commit
from penstock.storage.errors import PluginError, RunError
from penstock.storage.samples.sample import OVERLONG_PENALTY, TRAIN_REWARD, Sample, Status, to_table
from tests.rollout.scripted_engine import KEYS, Bench, json_server

OLDER = """
import asyncio
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run

async def all_groups(args, groups):
    state = GenerateState(args)
    assert state.tokenizer("1")["input_ids"]
    return await asyncio.gather(*(generate_and_rm_group(args, group, state.sampling_params) for group in groups))

def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    groups = data_buffer.get_samples(args.rollout_batch_size + 2)
    data_buffer.add_samples(groups[-1:])
    return run(all_groups(args, groups[:-2]))
"""
BY_ENGINE = """
from slime.utils.types import Sample

async def generate_rollout(args, rollout_id, data_source):
    samples = [sample for group in data_source.get_samples(4) for sample in group]
    for sample in samples:
        await args.engine.generate(sample)
        sample.reward = {"score": 0.5, "other": 2}
        sample.status = Sample.Status.TRUNCATED
    return samples
"""


def code_of_documentation(name: str) -> str:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")
    return page.partition(f"```python {name}\n")[2].partition("```")[0]


def test_function_of_the_documentation_works(plugin_bench: Any) -> None:
    made = plugin_bench(code_of_documentation("rollout_function"))
    commit = made.round(0)
    samples = made.trained(commit)
    assert len(samples) == 8 and {sample.reward for sample in samples} <= {0.1, 1.1}
    assert all(sum(sample.loss_mask) == 2 for sample in samples)
    assert commit.summary["rollout/num_groups_seen"] == 4 and commit.summary["perf/tokens_per_gpu_per_sec"] > 0


def test_function_of_the_older_generation_hands_groups_back(plugin_bench: Any) -> None:
    made = plugin_bench(OLDER)
    first = made.round(0)
    assert len(made.trained(first)) == 8
    assert [entry["reason"] for entry in first.state["dropped"]] == [NOT_RETURNED]
    [buffered] = {sample.group_id for sample in read_resume_point(made.store, KEYS, 1).buffer}
    assert buffered in {sample.group_id for sample in made.trained(made.round(1))}


def test_samples_that_the_function_generates_itself_are_checked_and_graded_by_it(plugin_bench: Any) -> None:
    made = plugin_bench(BY_ENGINE, reward_key="score")
    samples = made.trained(made.round(0))
    assert [sample.reward for sample in samples] == [0.5] * 8 and samples[0].rewards == {"score": 0.5, "other": 2.0}
    assert {str(sample.status) for sample in samples} == {"truncated"}
    assert samples[0].rollout_logprobs[-2:] == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return built_in(args, rollout_id, data_source).samples[:3]", r"returned 3 groups: return .* \(4\) groups"),
        ("return data_source.get_samples(4)", "its status is pending"),
        ("return [Sample(prompt='x', tokens=[1, 2], response_length=1)]", "which data_source.get_samples did not"),
        ("g = built_in(args, rollout_id, data_source).samples; return [g[0][:1], *g[1:]]", "return all samples of a"),
        ("g = built_in(args, rollout_id, data_source).samples; g[0][0].tokens = [1]; return g", "tokens of the prompt"),
        ("import slime.backends", "slime.backends is not provided"),
    ],
)
def test_wrong_function_fails_the_round_with_its_name(body: str, message: str, plugin_bench: Any) -> None:
    head = (
        "from slime.utils.types import Sample\nfrom slime.rollout.sglang_rollout import generate_rollout as built_in\n"
    )
    made = plugin_bench(f"{head}def generate_rollout(args, rollout_id, data_source):\n    {body}\n")
    with pytest.raises(PluginError, match=message) as raised:
        made.round(0)
    assert "generate_rollout of" in str(raised.value)


@pytest.mark.parametrize(
    ("head", "option", "signature"),
    [
        ("generate_rollout(args)", "rollout_function_path", r"\(args, rollout_id, data_source\)"),
        ("post_process(samples)", "custom_reward_post_process_path", r"\(args, samples\)"),
    ],
)
def test_wrong_signature_is_refused_before_the_run(head: str, option: str, signature: str, plugin_bench: Any) -> None:
    made = plugin_bench(f"def {head}:\n    return []\n", option, head.partition("(")[0])
    with pytest.raises(PluginError, match=f"is called with {signature}"):
        check_rollout_functions(made.config, evaluation="eval" in option)


SOURCE = """
from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample

class Doubled(RolloutDataSource):
    def get_samples(self, num_samples):
        numbers = range(len(self.taken), len(self.taken) + num_samples)
        self.taken += numbers
        made = [[Sample(prompt=f"{i}+{i}=", label=2 * i, metadata={"i": i}) for _ in range(2)] for i in numbers]
        return made

    def __init__(self, args):
        self.taken = []

    def state_dict(self):
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.taken = list(state.get("taken", []))
"""


def test_data_source_may_make_samples_with_slimes_constructor(plugin_bench: Any) -> None:
    made = plugin_bench(SOURCE, "data_source_path", "Doubled")
    first, second = (made.trained(made.round(number)) for number in (0, 1))
    assert sorted({sample.metadata["i"] for sample in second}) == [4, 5, 6, 7]
    assert all("+" in sample.prompt and sample.label == str(2 * sample.metadata["i"]) for sample in first)
    assert len({sample.sample_id for sample in first + second}) == 16


LOGS = """
from slime.utils.logging_utils import log
from slime.utils.metric_utils import compute_statistics, dict_add_prefix

def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    lengths = compute_statistics([sample.response_length for sample in samples])
    log(args, {**dict_add_prefix(lengths, "mine/"), "rollout/step": rollout_id}, step_key="rollout/step")
    rollout_extra_metrics["mine/best"] = max(sample.get_reward_value(args) for sample in samples)
    assert rollout_time > 0
    return True

def log_eval_rollout_data(rollout_id, args, data, extra_metrics):
    [(name, results)] = data.items()
    extra_metrics[f"mine/{name}"] = sum(results["rewards"]) + sum(results["truncated"])
"""


def test_log_function_adds_metrics_to_the_commit(plugin_bench: Any) -> None:
    made = plugin_bench(LOGS, "custom_rollout_log_function_path")
    summary = made.round(0).summary
    assert (summary["mine/mean"], summary["mine/min"], summary["mine/best"] in (0.0, 1.0)) == (2.0, 2.0, True)
    assert "rollout/step" not in summary and "rollout/raw_reward" in summary


def test_log_function_that_adds_text_fails_the_round(plugin_bench: Any) -> None:
    made = plugin_bench(LOGS.replace('best"] = max', 'best"] = "x"; max'), "custom_rollout_log_function_path")
    with pytest.raises(PluginError, match="adds the metric 'mine/best' = 'x': give a finite number"):
        made.round(0)


def test_every_name_of_the_modules_is_importable(tmp_path: Path) -> None:
    for number, (module, names) in enumerate(MODULES.items()):
        code = (
            f"from {module} import {', '.join(names) or '__name__'}\ndef f():\n    return {[*names, '__name__'][0]}\n"
        )
        (tmp_path / f"f{number}.py").write_text(code)
        assert load_function(f"{tmp_path}/f{number}.py:f")() is not None


def test_sample_takes_slimes_names() -> None:
    cls = load_function("slime.utils.types:Sample")
    sample = cls(prompt="p", tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], x=5)
    assert (sample.token_ids, sample.prompt_length, sample.loss_masks, sample.x) == ([1, 2, 3], 1, [0, 1], 5)
    assert sample.effective_response_length == 1 and sample.status is cls.Status.PENDING


def test_requests_are_sent_as_json_and_failed_connections_are_retried() -> None:
    post, get = load_function("slime.utils.http_utils:post"), load_function("slime.utils.http_utils:get")
    with json_server(lambda path, body: (200, body)) as address:
        url = f"{address}/generate"
        assert asyncio.run(post(url, {"input_ids": [1, 2]})) == {"input_ids": [1, 2]}
        assert asyncio.run(get(url)) == [None]
        endpoints.set_api_key(address, "secret-of-a-test")
        assert asyncio.run(get(url)) == ["Bearer secret-of-a-test"]
        endpoints.set_api_key(address, None)
    with pytest.raises(httpx.TransportError):
        asyncio.run(post(url, {}, max_retries=1))


OWN = """
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.async_utils import run

async def one(args, sample):
    return await generate_and_rm(args, sample, {}, evaluation=True)

def eval_rollout(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    name, path = args.eval_prompt_data
    groups = data_source.get_samples(len(data_source.dataset))
    samples = [run(one(args, sample)) for group in groups for sample in group]
    rewards = [rollout_id + index / 16 for index, sample in enumerate(samples)]
    return RolloutFnEvalOutput({name: {"rewards": rewards, "samples": samples}}, metrics={"eval/mine": len(groups)})
"""
EVAL = ("eval_function_path", "eval_rollout")
BY_SLIME = """
from slime.rollout.sglang_rollout import eval_rollout, generate_rollout as built_in
from slime.utils.async_utils import run

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if not evaluation:
        return built_in(args, rollout_id, data_source)
    output, _ = run(eval_rollout(args, rollout_id))
    for sample in output.data["numbers"]["samples"]:
        sample.metadata["seen"] = rollout_id
    return output.data
"""


def evaluate(bench: Bench, version: int = 3) -> tuple[Commit, list[Sample]]:
    commit = bench.evaluate(version, "numbers")
    return commit, bench.trained(commit)


def test_function_generates_an_evaluation_whose_rewards_and_metrics_are_recorded(plugin_bench: Any) -> None:
    commit, samples = evaluate(plugin_bench(OWN, *EVAL, num_rows=5))
    assert commit.kind == "eval" and commit.summary["eval/mine"] == 5
    assert [sample.reward for sample in samples] == [3 + index / 16 for index in range(10)]
    assert commit.summary["eval/numbers"] == pytest.approx(3 + 4.5 / 16)
    assert all(sum(sample.loss_mask) == 2 and sample.group_id.startswith("eval-000003-numbers-") for sample in samples)


def test_overlong_penalty_is_recorded_in_rounds_and_not_in_evaluations(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    """Every response has two tokens, the maximum, so each gets the whole penalty."""
    overlong = {"overlong_buffer_len": 1, "overlong_penalty_factor": 0.25}
    made = Bench(tmp_path, tokenizer, num_rows=5, rollout_max_response_len=2, overlong=overlong)
    commit, (_, evaluated) = made.round(0), evaluate(made)
    samples = made.trained(commit)
    assert len(samples) == 8 and {sample.response_length for sample in [*samples, *evaluated]} == {2}
    assert [sample.rewards for sample in samples] == [{OVERLONG_PENALTY: -0.25}] * 8
    assert {sample.reward for sample in samples} == {-0.25}
    assert commit.summary["rollout/rewards/overlong_penalty"] == -0.25
    assert [sample.rewards for sample in evaluated] == [{}] * 10
    assert {sample.reward for sample in evaluated} == {0.0}


def test_rollout_function_with_the_parameter_evaluation_is_the_default(plugin_bench: Any) -> None:
    made = plugin_bench(BY_SLIME, name="generate_rollout", num_rows=5)
    assert len(made.trained(made.round(0))) == 8
    commit, samples = evaluate(made)
    assert len(samples) == 10 and {sample.metadata["seen"] for sample in samples} == {3}
    built_in = plugin_bench(BY_SLIME, name="generate_rollout", num_rows=5, eval_function_path="built-in")
    again, others = evaluate(built_in, version=4)
    assert all("seen" not in sample.metadata for sample in others)
    names = ("token_ids", "reward", "prompt")
    assert [[getattr(s, name) for name in names] for s in samples] == [
        [getattr(s, name) for name in names] for s in others
    ]
    assert again.summary["eval/numbers"] == commit.summary["eval/numbers"]


def test_rollout_function_without_the_parameter_is_not_called_by_evaluations(plugin_bench: Any) -> None:
    made = plugin_bench("def generate_rollout(args, rollout_id, data_source):\n    1 / 0", num_rows=5)
    assert find_evaluation_function(made.config) is None
    assert len(evaluate(made)[1]) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return RolloutFnEvalOutput({name:", "return RolloutFnEvalOutput({'x':"), "results of x from the evaluation"),
        (('"samples": samples', '"texts": samples'), 'returned no "samples"'),
        (("rewards = [", "rewards = [1.0] + ["), '11 "rewards" for 10 "samples"'),
        (("len(data_source.dataset)", "4"), "returned 4 of the 5 prompts of the data set numbers: return all"),
    ],
)
def test_wrong_result_fails_the_evaluation_with_the_name_of_the_function(
    change: tuple[str, str], message: str, plugin_bench: Any
) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        evaluate(plugin_bench(OWN.replace(*change), *EVAL, num_rows=5))
    assert "eval_rollout of" in str(raised.value)


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


def test_function_of_the_documentation_centers_the_rewards_of_a_round(plugin_bench: Any) -> None:
    made = plugin_bench(code_of_documentation("post_process"), "custom_reward_post_process_path")
    assert sum(sample.rewards[TRAIN_REWARD] for sample in made.trained(made.round(0))) == pytest.approx(0)


def test_post_processed_rewards_are_in_the_shard_and_train_without_normalization(plugin_bench: Any) -> None:
    made = plugin_bench(POST_PROCESS, "custom_reward_post_process_path")
    commit = made.round(0)
    samples = made.trained(commit)
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


def test_conversion_that_splits_samples_is_trained_row_by_row(plugin_bench: Any, tokenizer: PromptTokenizer) -> None:
    made = plugin_bench(CONVERT.replace("CHANGE", ""), "custom_convert_samples_to_train_data_path")
    rows = made.trained(made.round(0))
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
        ("data['metadata'] = [{}] * 16", "returned metadata, which cannot be stored"),
        ("del data['rewards']", "returned no rewards"),
        ("data['truncated'] = 5", "returned truncated, which is a int: it must be a list"),
        ("data['rewards'][3] = float('nan')", "nan is not a finite number"),
        ("data['sample_indices'][0] = 99", "the sample index 99 for 8 samples"),
        ("data['sample_indices'] = [1] * 16", "no row of sample 0, but optimizer steps need a row of every sample"),
        ("data['rollout_ids'] = list(range(16))", "rollout_ids that differ between the rows of one"),
        ("del data['rollout_log_probs']", "row 0: the sample has trained tokens without log-probs"),
    ],
)
def test_conversion_that_cannot_be_recorded_fails_the_round(change: str, message: str, plugin_bench: Any) -> None:
    made = plugin_bench(CONVERT.replace("CHANGE", change), "custom_convert_samples_to_train_data_path")
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
        ("([1.0], [1.0, 2.0])", "returned 2 rewards for 1 samples"),
        ("(['x'], [1.0])", "'x' is not a finite number"),
    ],
)
def test_wrong_rewards_are_refused(result: str, message: str, tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    (tmp_path / "functions.py").write_text(f"def post_process(args, samples):\n    return {result}\n")
    config = RolloutConfig(custom_reward_post_process_path=f"{tmp_path}/functions.py")
    with pytest.raises(PluginError, match=message):
        make_train_data([sample_of(0, reward=1.0)], config, tokenizer)


def test_reward_with_the_reserved_name_is_refused_by_the_trainer() -> None:
    samples = [replace(sample_of(0, reward=1.0), rewards={TRAIN_REWARD: 1.0}), sample_of(1, reward=1.0)]
    with pytest.raises(RunError, match="only some samples of the rollout have the reward component train_reward"):
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
