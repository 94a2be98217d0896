"""User-defined evaluations (--eval-function-path), written as for slime."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.stages.eval.scores import compute_eval_metrics
from penstock.stages.rollout.plugins.function_check import check_rollout_functions
from penstock.stages.rollout.plugins.rollout_function import find_evaluation_function
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from tests.rollout.scripted_engine import KEYS, Bench

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


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(code: str, option: str = "eval_function_path", **options: Any) -> Bench:
        (tmp_path / "functions.py").write_text(code)
        monkeypatch.delitem(sys.modules, "functions", raising=False)
        name = "eval_rollout" if "def eval_rollout" in code else "generate_rollout"
        return Bench(tmp_path, tokenizer, num_rows=5, **{option: f"{tmp_path}/functions.py:{name}", **options})

    return make


def evaluate(bench: Bench, version: int = 3) -> tuple[Commit, list[Sample]]:
    source = bench.source()
    context = RolloutContext(bench.store, bench.config, source, bench.tokenizer, ["http://engine"])
    commit = rollout_stage(
        replace(context, connect=partial(bench.connect, version=version)),
        KEYS.eval_prefix(version, "numbers"),
        RolloutRound("run", version, version, kind="eval", id_prefix=f"eval-{version:06d}-numbers-"),
        num_prompts=len(source),
        summarize=partial(compute_eval_metrics, name="numbers"),
    )
    return commit, list(read_samples(bench.store, commit))


def test_function_generates_an_evaluation_whose_rewards_and_metrics_are_recorded(bench: Any) -> None:
    commit, samples = evaluate(bench(OWN))
    assert commit.kind == "eval" and commit.summary["eval/mine"] == 5
    assert [sample.reward for sample in samples] == [3 + index / 16 for index in range(10)]
    assert commit.summary["eval/numbers"] == pytest.approx(3 + 4.5 / 16)
    assert all(sum(sample.loss_mask) == 2 and sample.group_id.startswith("eval-000003-numbers-") for sample in samples)


def test_rollout_function_with_the_parameter_evaluation_is_the_default(bench: Any) -> None:
    made = bench(BY_SLIME, "rollout_function_path")
    assert len(list(read_samples(made.store, made.round(0)))) == 8
    commit, samples = evaluate(made)
    assert len(samples) == 10 and {sample.metadata["seen"] for sample in samples} == {3}
    built_in = bench(BY_SLIME, "rollout_function_path", eval_function_path="built-in")
    again, others = evaluate(built_in, version=4)
    assert all("seen" not in sample.metadata for sample in others)
    names = ("token_ids", "reward", "prompt")
    assert [[getattr(s, name) for name in names] for s in samples] == [
        [getattr(s, name) for name in names] for s in others
    ]
    assert again.summary["eval/numbers"] == commit.summary["eval/numbers"]


def test_rollout_function_without_the_parameter_is_not_called_by_evaluations(bench: Any) -> None:
    made = bench("def generate_rollout(args, rollout_id, data_source):\n    1 / 0", "rollout_function_path")
    assert find_evaluation_function(made.config) is None
    assert len(evaluate(made)[1]) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return RolloutFnEvalOutput({name:", "return RolloutFnEvalOutput({'x':"), "results of x from the evaluation"),
        (('"samples": samples', '"texts": samples'), 'without "samples"'),
        (("rewards = [", "rewards = [1.0] + ["), '11 "rewards" beside 10 "samples"'),
        (("index / 16", "float('nan')"), 'returned nan in "rewards": return finite numbers'),
        (("len(data_source.dataset)", "4"), "returned 4 of the 5 prompts of the data set numbers: return all"),
    ],
)
def test_wrong_result_fails_the_evaluation_with_the_name_of_the_function(
    change: tuple[str, str], message: str, bench: Any
) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        evaluate(bench(OWN.replace(*change)))
    assert "eval_rollout of" in str(raised.value)


def test_wrong_signature_is_refused_before_an_evaluation(bench: Any) -> None:
    made = bench("def eval_rollout(args, rollout_id):\n    return []\n")
    with pytest.raises(PluginError, match=r"is called with \(args, rollout_id, data_source\)"):
        check_rollout_functions(made.config, evaluation=True)
