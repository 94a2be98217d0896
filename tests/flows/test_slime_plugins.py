"""A plug-in package written for slime runs unchanged on real engines, and its metrics are tracked."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from penstock_command import penstock

from penstock.engines.network import reserve_free_port
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_samples, read_trained_tokens
from penstock.storage.store import Store

FILES = {
    "__init__.py": "",
    "agent.py": """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload)
    tokens = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [token for _, token, *_ in tokens]
    sample.rollout_log_probs = [logprob for logprob, *_ in tokens]
    sample.response_length = len(tokens)
    sample.response += output["text"]
    sample.loss_mask = [1] * len(tokens)
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample
""",
    "reward.py": """
async def reward_func(args, sample, **kwargs):
    return float(len(sample.response) % 3 + sample.metadata.get("bonus", 0))
""",
    "filters.py": """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def check(args, samples: list[Sample], **kwargs):
    return DynamicFilterOutput(keep=all(sample.reward is not None for sample in samples), reason="no_reward")
""",
    "source.py": """
from slime.rollout.data_source import RolloutDataSourceWithBuffer


class Source(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["bonus"] = 1
        return groups
""",
    "rollout.py": """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as built_in


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = built_in(args, rollout_id, data_source, evaluation=evaluation)
    return RolloutFnTrainOutput(samples=output.samples, metrics={"rollout/bonus": args.bonus})
""",
    "train.py": """
import torch


def post_process(args, samples):
    rewards = torch.tensor([sample.get_reward_value(args) for sample in samples])
    return rewards.tolist(), (rewards - rewards.mean()).tolist()


def postprocess(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[:2] = 0
""",
    "logs.py": """
from slime.utils.logging_utils import log


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    log(args, {"mine/responses": len({sample.response for sample in samples})}, step_key="rollout/step")
    return False
""",
}


class Scraper(threading.Thread):
    """Keeps the last answer of a Prometheus endpoint."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.text, self.done = port, "", threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as response:
                    self.text = response.read().decode()
            except OSError:  # before the start and after the end of the run
                time.sleep(0.1)


@pytest.mark.integration
def test_package_for_slime_runs_unchanged_and_its_metrics_are_tracked(
    prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    package = tmp_path / "my_plugins"
    package.mkdir()
    for name, text in FILES.items():
        (package / name).write_text(text)
    data = make_tiny_data(tmp_path / "data")
    scraper = Scraper(reserve_free_port())
    words = f"""
        --run r --store {tmp_path / "store"} --hf-checkpoint {tiny_model} --prompt-data {data["train"]} --num-rollout 2
        --prompt-key prompt --label-key label --apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 2
        --rollout-max-response-len 8 --lr 1e-3 --trainer-threads 1 --check-logits false
        --custom-generate-function-path my_plugins.agent.generate --custom-rm-path my_plugins.reward.reward_func
        --dynamic-sampling-filter-path my_plugins.filters.check --data-source-path my_plugins.source.Source
        --rollout-function-path my_plugins.rollout.generate_rollout --plugin-args bonus=7
        --custom-rollout-log-function-path my_plugins.logs.log_rollout_data
        --custom-reward-post-process-path my_plugins.train.post_process
        --rollout-data-postprocess-path my_plugins.train.postprocess
        --mlflow-tracking-uri sqlite:///{tmp_path / "mlflow.db"} --prometheus-port {scraper.port}
        --log-format json
    """.split()
    scraper.start()
    result = penstock("train", *words, env=prefect_api, cwd=tmp_path)
    scraper.done.set()

    store, keys = Store(str(tmp_path / "store")), RunKeys("r")
    for number in range(2):
        rollout, step = store.committed(keys.rollout_prefix(number)), store.committed(keys.step_prefix(number))
        assert rollout is not None and step is not None
        assert rollout.summary["rollout/bonus"] == 7 and rollout.summary["mine/responses"] >= 1
        assert 1 <= rollout.summary["rollout/raw_reward"] <= 3  # the bonus of the data source
        assert step.summary["train/train_rollout_logprob_abs_diff"] < 1e-3
        assert abs(rollout.summary["rollout/rewards/train_reward"]) < 1e-6
        advantages = read_trained_tokens(store, step)["advantages"].to_pylist()
        expected = [sample.rewards["train_reward"] for sample in read_samples(store, rollout)]
        assert [row[:2] for row in advantages] == [[0.0] * len(row[:2]) for row in advantages]
        assert [row[-1] for row in advantages if len(row) > 2] == pytest.approx(
            [reward for reward, row in zip(expected, advantages) if len(row) > 2]
        )
    replayed = penstock("replay", "r", "--store", str(tmp_path / "store"), env=prefect_api, cwd=tmp_path)
    assert "2 of 2 rounds are equal bit for bit" in replayed.stdout

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select m.key, m.step from metrics m join runs r using (run_uuid) where r.name = 'r'")
        assert {("train/loss", 1), ("mine/responses", 0)} <= set(rows)

    for name in ("train_loss", "perf_actor_train_tok_per_s", "system_cpu_utilization", "system_system_memory", "round"):
        assert f"penstock_{name}" in scraper.text, scraper.text
    lines = [json.loads(line) for line in result.stdout.splitlines() if line]
    assert {line["run"] for line in lines} == {"r"} and {0, 1} <= {line["round"] for line in lines}
    assert any(line["stage"] == "train" for line in lines), {line["stage"] for line in lines}
