"""User-defined rollout functions and log functions, written as for slime."""

from __future__ import annotations

import asyncio
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from penstock.engines.serving import endpoints
from penstock.stages.plugins import load_function
from penstock.stages.rollout.plugins.function_check import check_rollout_functions
from penstock.stages.rollout.plugins.rollout_function import NOT_RETURNED
from penstock.stages.rollout.rollout import read_resume_point
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.slime.slime_modules import MODULES
from penstock.storage.commit import Commit
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from tests.rollout.scripted_engine import KEYS, Bench

WRAPPER = """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as built_in

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = built_in(args, rollout_id, data_source, evaluation)
    for group in output.samples:
        for sample in group:
            sample.reward += 1
            sample.metadata["seen"] = rollout_id
    return RolloutFnTrainOutput(output.samples, metrics={"rollout/mine": 3})
"""
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


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(code: str, **options: Any) -> Bench:
        (tmp_path / "functions.py").write_text(code)
        monkeypatch.delitem(sys.modules, "functions", raising=False)
        path = f"{tmp_path}/functions.py"
        return Bench(tmp_path, tokenizer, **{"rollout_function_path": path, **options})

    return make


def samples_of(bench: Bench, commit: Commit) -> list[Sample]:
    return list(read_samples(bench.store, commit))


def test_function_that_wraps_the_builtin_rollout_changes_its_samples(bench: Any) -> None:
    made = bench(WRAPPER, dynamic_sampling_filter_path=None)
    commit = made.round(0)
    samples = samples_of(made, commit)
    assert len(samples) == 8 and all(sample.reward in (1.0, 2.0) for sample in samples)
    assert all(sample.metadata["seen"] == 0 and sum(sample.loss_mask) == 2 for sample in samples)
    assert commit.summary["rollout/mine"] == 3.0 and commit.summary["perf/tokens_per_gpu_per_sec"] > 0


def test_function_of_the_documentation_works(bench: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")
    code = page.partition("```python rollout_function\n")[2].partition("```")[0]
    made = bench(code)
    commit = made.round(0)
    assert {sample.reward for sample in samples_of(made, commit)} <= {0.1, 1.1}
    assert commit.summary["rollout/num_groups_seen"] == 4


def test_function_of_the_older_generation_hands_groups_back(bench: Any) -> None:
    made = bench(OLDER)
    first = made.round(0)
    assert len(samples_of(made, first)) == 8
    assert [entry["reason"] for entry in first.state["dropped"]] == [NOT_RETURNED]
    [buffered] = {sample.group_id for sample in read_resume_point(made.store, KEYS, 1).buffer}
    assert buffered in {sample.group_id for sample in samples_of(made, made.round(1))}


def test_samples_that_the_function_generates_itself_are_checked_and_graded_by_it(bench: Any) -> None:
    made = bench(BY_ENGINE, reward_key="score")
    samples = samples_of(made, made.round(0))
    assert [sample.reward for sample in samples] == [0.5] * 8 and samples[0].rewards == {"score": 0.5, "other": 2.0}
    assert {str(sample.status) for sample in samples} == {"truncated"}
    assert samples[0].rollout_logprobs[-2:] == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return built_in(args, rollout_id, data_source).samples[:3]", r"returned 3 groups: return .* \(4\) groups"),
        ("return data_source.get_samples(4)", "its status is pending"),
        ("return [Sample(prompt='x', tokens=[1, 2], response_length=1)]", "which data_source.get_samples did not"),
        ("return 5", "returned int"),
        ("raise KeyError('x')", "KeyError"),
        ("g = built_in(args, rollout_id, data_source).samples; return [g[0][:1], *g[1:]]", "return all samples of a"),
        ("g = built_in(args, rollout_id, data_source).samples; g[0][0].tokens = [1]; return g", "tokens of the prompt"),
        ("import slime.backends", "slime.backends is not provided"),
        ("from slime.utils.types import Nothing", "Nothing"),
    ],
)
def test_wrong_function_fails_the_round_with_its_name(body: str, message: str, bench: Any) -> None:
    head = (
        "from slime.utils.types import Sample\nfrom slime.rollout.sglang_rollout import generate_rollout as built_in\n"
    )
    made = bench(f"{head}def generate_rollout(args, rollout_id, data_source):\n    {body}\n")
    with pytest.raises(PluginError, match=message) as raised:
        made.round(0)
    assert "generate_rollout of" in str(raised.value)


def test_wrong_signature_is_refused_before_the_run(bench: Any) -> None:
    made = bench("def generate_rollout(args):\n    return []\n")
    with pytest.raises(PluginError, match=r"is called with \(args, rollout_id, data_source\)"):
        check_rollout_functions(made.config)


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


def test_data_source_may_make_samples_with_slimes_constructor(bench: Any, tmp_path: Path) -> None:
    made = bench(SOURCE, rollout_function_path=None, data_source_path=f"{tmp_path}/functions.py:Doubled")
    first, second = (samples_of(made, made.round(number)) for number in (0, 1))
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


def test_log_function_adds_metrics_to_the_commit(bench: Any, tmp_path: Path) -> None:
    made = bench(LOGS, rollout_function_path=None, custom_rollout_log_function_path=f"{tmp_path}/functions.py")
    summary = made.round(0).summary
    assert (summary["mine/mean"], summary["mine/min"], summary["mine/best"] in (0.0, 1.0)) == (2.0, 2.0, True)
    assert "rollout/step" not in summary and "rollout/raw_reward" in summary


def test_log_function_that_adds_text_fails_the_round(bench: Any, tmp_path: Path) -> None:
    code = LOGS.replace('["mine/best"] = max', '["mine/best"] = "x"; max')
    made = bench(code, rollout_function_path=None, custom_rollout_log_function_path=f"{tmp_path}/functions.py")
    with pytest.raises(PluginError, match="adds the metric 'mine/best' = 'x': give a number"):
        made.round(0)


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_modules_is_importable(module: str, tmp_path: Path) -> None:
    names = ", ".join(MODULES[module]) or "__name__"
    (tmp_path / "f.py").write_text(f"from {module} import {names}\ndef f():\n    return {names.split(', ')[0]}\n")
    assert load_function(f"{tmp_path}/f.py:f")() is not None


def test_sample_takes_slimes_names() -> None:
    cls = load_function("slime.utils.types:Sample")
    sample = cls(prompt="p", tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], x=5)
    assert (sample.token_ids, sample.prompt_length, sample.loss_masks, sample.x) == ([1, 2, 3], 1, [0, 1], 5)
    assert sample.effective_response_length == 1 and sample.status is cls.Status.PENDING


GENERATE = """
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState, generate

async def custom_generate(args, sample, sampling_params, evaluation=False):
    state = GenerateState(args)
    assert state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"] == sample.tokens
    assert args.sglang_router_ip == "engine" and state.sampling_params.items() >= {"temperature": 1.0}.items()
    async with state.semaphore:
        sample = await generate(args, sample, {})
    sample.reward = await async_rm(args, sample)
    sample.metadata["evaluation"] = evaluation
    return sample
"""


def test_generate_function_uses_slimes_state_and_rewards(bench: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/functions.py"
    made = bench(GENERATE, rollout_function_path=None, custom_generate_function_path=path)
    samples = samples_of(made, made.round(0))
    assert len(samples) == 8 and all(sample.reward in (0.0, 1.0) for sample in samples)
    assert all(sample.metadata["evaluation"] is False and sum(sample.loss_mask) == 2 for sample in samples)


def test_requests_are_sent_as_json_and_failed_connections_are_retried() -> None:
    post, get = load_function("slime.utils.http_utils:post"), load_function("slime.utils.http_utils:get")

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body or b"{}")

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([self.headers["Authorization"]]).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/generate"
        assert asyncio.run(post(url, {"input_ids": [1, 2]})) == {"input_ids": [1, 2]}
        assert asyncio.run(get(url)) == [None]
        endpoints.set_api_key(f"http://127.0.0.1:{server.server_port}", "secret-of-a-test")
        assert asyncio.run(get(url)) == ["Bearer secret-of-a-test"]
        endpoints.set_api_key(f"http://127.0.0.1:{server.server_port}", None)
        server.shutdown()
    with pytest.raises(httpx.TransportError):
        asyncio.run(post(url, {}, max_retries=1))
