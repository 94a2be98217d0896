"""Plug-ins that call slime's functions as its own examples do (search, tools, several agents, rewards) run unchanged:
generated over HTTP by a scripted engine, graded in a grading process, committed."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from penstock.engines.generation import Generation, TokenCounts
from penstock.flows.commands.demo_model import make_tokenizer
from penstock.flows.options.flags import parse_config
from penstock.stages.plugins import load_checked_function, load_function
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.train.algorithm_config import PLUGINS
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import ATTRIBUTES, Sample, Status
from penstock.storage.samples.shards import read_samples
from tests.forked_worker import forked_workers  # noqa: F401 fixture
from tests.rollout.scripted_engine import Bench, ScriptedClient, json_server, write_jsonl


class Speaker(ScriptedClient):
    """Says `texts` in turn: the number of a turn is the number of tool answers that the prompt has. `answer_request`
    answers `/generate` of SGLang."""

    texts: tuple[str, ...] = ()
    address = ""
    tokenizer: PromptTokenizer

    @property
    def urls(self) -> list[str]:
        return [self.address]

    def say(self, token_ids: list[int]) -> Generation:
        prompt = self.tokenizer.decode([token_ids], skip_special_tokens=False)[0]
        text = self.texts[min(prompt.count(": ") + prompt.count("agent"), len(self.texts) - 1)]
        new = [*self.tokenizer.encode([text])[0], 1]
        logprobs = [-0.5 - position / 8 for position in range(len(new))]
        return Generation(new, logprobs, "stop", [(self.served_version, len(new))], TokenCounts(len(token_ids)))

    def answer_request(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        ids = request["input_ids"] if "input_ids" in request else self.tokenizer.encode([request["text"]])[0]
        said = self.say(ids)
        info = {
            "output_token_logprobs": [[p, i, None] for p, i in zip(said.logprobs, said.token_ids)],
            "finish_reason": {"type": "stop"},
            "weight_version": "run/0",
        }
        return 200, {"text": self.tokenizer.decode([said.token_ids], skip_special_tokens=False)[0], "meta_info": info}


SEARCH = """
from exact import compute_exact

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, log_probs = "", [], [], []
    for _ in range(2):
        output = await post(url, {"text": sample.prompt + response, "sampling_params": sampling_params,
                                  "return_logprob": True})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = output["meta_info"]["output_token_logprobs"]
        ids += [item[1] for item in new]
        log_probs += [item[0] for item in new]
        mask += [1] * len(new)
        response += output["text"]
        if "?" not in output["text"]:
            break
        found = state.tokenizer(": 4", add_special_tokens=False)["input_ids"]
        ids, response, mask = ids + found, response + ": 4", mask + [0] * len(found)
        log_probs += [0.0] * len(found)
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return compute_exact(sample.response, sample.label["ground_truth"])
"""

TOOL = """
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    sample.rollout_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = []
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = "use tools, " + sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response, response_ids, mask, calls = "", [], sample.loss_mask, 0
    if args.rollout_max_context_len is not None:
        longest = args.rollout_max_context_len
    else:
        longest = args.context_parallel_size * args.max_tokens_per_gpu
    for _ in range(3):
        params = dict(sampling_params, max_new_tokens=min(sampling_params["max_new_tokens"], longest))
        output = await post(url, {"input_ids": prompt_ids + response_ids, "sampling_params": params,
                                  "return_logprob": True})
        info = output["meta_info"]
        ids = [item[1] for item in info["output_token_logprobs"]]
        text = state.tokenizer.decode(ids)
        response, response_ids = response + text, response_ids + ids
        sample.append_response_tokens(args, tokens=ids, log_probs=[item[0] for item in info["output_token_logprobs"]],
                                      trainable=True, meta_info=info)
        if "?" not in text:
            break
        calls += 1
        found = state.tokenizer(": 5", add_special_tokens=False)["input_ids"]
        response, response_ids = response + ": 5", response_ids + found
        sample.append_response_tokens(args, tokens=found, trainable=False)
        assert len(response_ids) == len(sample.rollout_log_probs)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = mask
    sample.payload_text = prompt + response
    sample.tool_call_count = calls
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    result = compute_score(sample.prompt + sample.response, sample.label, strict_box_verify=True)
    if result["pred"] is None:
        result["pred"] = ""
    result["score"] += getattr(sample, "tool_call_count", 0)
    return result
"""

AGENTS = """
import random

from transformers import AutoTokenizer

from slime.utils.misc import load_function
from slime.utils.types import Sample


async def generate_with_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.sampling_params = sampling_params
    args.rollout_max_context_len = args.rollout_max_context_len if not evaluation else args.eval_max_context_len
    args.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    for key, value in {"system": "agents_PLACE.run", "num_parallel": 2, "weight": 0.5}.items():
        setattr(args, key, value)
    samples = await load_function(args.system)(args, sample)
    for each in samples:
        each.rollout_id = sample.index
    random.shuffle(samples)
    return samples
"""
AGENT_SYSTEM = """
import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def respond(args, prompt, key):
    sample = deepcopy(args.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = ids
    sample.prompt = prompt
    output = await post(url, {"input_ids": ids, "sampling_params": deepcopy(args.sampling_params),
                              "return_logprob": True})
    new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    sample.tokens = sample.tokens + new
    sample.response_length += len(new)
    sample.response = output["text"]
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    args.results[key].append(sample)
    sample.reason_content = None
    return output["text"]


async def run(args, sample):
    args = deepcopy(args)
    args.sample = sample
    args.results = {"solver": [], "selector": []}
    await asyncio.gather(*(respond(args, sample.prompt, "solver") for _ in range(args.num_parallel)))
    await respond(args, sample.prompt + "agent", "selector")
    for samples in args.results.values():
        for each, reward in zip(samples, await batched_async_rm(args, samples)):
            each.reward = reward * args.weight
    return args.results["solver"] + args.results["selector"]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(words=[r"\boxed{5}"]).save_pretrained(directory)
    return PromptTokenizer(directory, apply_chat_template=True)


@pytest.fixture
def rollout(tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(texts: tuple[str, ...], rows: list[dict[str, Any]], **options: Any) -> list[Sample]:
        model = str(tmp_path / "model")
        tokenizer.inner.save_pretrained(model)
        plugin_args = parse_config(["--hf-checkpoint", model]).rollout_with_args.plugin_args
        options = {"rm_type": None, "rollout_batch_size": 1, "plugin_args": plugin_args, **options}
        bench = Bench(tmp_path, tokenizer, **options)
        write_jsonl(tmp_path / "rows.jsonl", rows)
        speaker = Speaker([])
        speaker.tokenizer, speaker.texts = tokenizer, texts
        with json_server(speaker.answer_request) as address:
            monkeypatch.setattr(Speaker, "address", address)
            samples = read_samples(bench.store, bench.round(0, client=Speaker))
        assert not [sample.metadata["error"] for sample in samples if "error" in sample.metadata]
        return samples

    return run


def write(folder: Path, code: str, name: str = "plugin.py") -> str:
    (folder / name).write_text(dedent(code.replace("PLACE", folder.name)))
    return str(folder / name)


def texts_of(tokenizer: PromptTokenizer, sample: Sample) -> tuple[str, ...]:
    """Return the text of the trained and of the other tokens of a sample."""
    parts = [[i for i, m in zip(sample.token_ids, sample.loss_mask) if m == trained] for trained in (1, 0)]
    return tuple(tokenizer.decode(parts, skip_special_tokens=False))


def test_search_runs_as_it_is(rollout: Any, tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    path = write(tmp_path, SEARCH)
    write(tmp_path, "def compute_exact(text, target):\n    return float(target['target'] in text)\n", "exact.py")
    rows = [{"input": "2+2=", "label": {"ground_truth": {"target": "4"}}}]
    samples = rollout(("2+2?", "so 4"), rows=rows, custom_generate_function_path=path, custom_rm_path=path)
    assert len(samples) == 2
    for sample in samples:
        assert texts_of(tokenizer, sample) == ("2+2?<|end|>so 4<|end|>", f"{sample.prompt}: 4")
        assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)
        trained = [logprob for logprob, mask in zip(sample.rollout_logprobs, sample.loss_mask) if mask]
        assert trained == [-0.5 - position / 8 for n in (5, 5) for position in range(n)]


def test_tools_run_as_they_are(rollout: Any, tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    path = write(tmp_path, TOOL)
    samples = rollout(
        ("2+3?", r"\boxed{5}"),
        custom_generate_function_path=path,
        custom_rm_path=path,
        reward_key="score",
        rows=[{"input": "2+3=", "label": "5"}],
    )
    for sample in samples:
        assert texts_of(tokenizer, sample) == (r"2+3?<|end|>\boxed{5}<|end|>", f"use tools, {sample.prompt}: 5")
        assert (sample.reward, sample.rewards["acc"]) == (2.0, 1.0)  # right, and one call of a tool
        assert sample.metadata[ATTRIBUTES]["values"]["tool_call_count"] == 1


def test_agents_run_as_they_are(
    rollout: Any, tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, AGENTS)
    write(tmp_path, AGENT_SYSTEM, f"agents_{tmp_path.name}.py")
    samples = rollout(
        ("7", "3"),
        custom_generate_function_path=path,
        rm_type="exact_number",
        rows=[{"input": "1+2=", "label": "3"}],
        rollout_max_context_len=64,
        n_samples_per_prompt=1,
    )
    assert sorted(sample.reward for sample in samples) == [0.0, 0.0, 0.5]
    for sample in samples:
        said, prompt = texts_of(tokenizer, sample)
        assert said == sample.response == ("3<|end|>" if "agent" in prompt else "7<|end|>")
        assert prompt == sample.prompt and sample.rollout_logprobs[-2:] == [-0.5, -0.625]


REWARDS = {  # expressions of a reward function, all with the value 3
    "attribute": "getattr(sample, 'tool_calls', 0.0)",
    "nested attribute": "sample.trace[0]['x'] + len(sample.note)",
    "instance": "3.0 if isinstance(sample, Sample) else 0.0",
    "fields": "3.0 + sample.index + sample.group_index if sample.session_id is None else 0",
    "tokens": "len(sample.tokens[-sample.response_length :]) + 1.0",
    "log-probs": "-4 * sum(sample.rollout_log_probs)",
    "status": "3.0 if sample.status == Sample.Status.COMPLETED else 0.0",
    "reward value": "3.0 if sample.get_reward_value(args) is None else 0.0",
    "options": "3.0 if args.hf_checkpoint and args.tensor_model_parallel_size == 1 else 0.0",
    "effective length": "sample.effective_response_length + 1.0",
}


def test_reward_sees_slimes_sample_and_what_generate_has_set(rollout: Any, tmp_path: Path) -> None:
    values = ", ".join(f"{name!r}: float({value})" for name, value in REWARDS.items())
    code = f"""
        from slime.rollout.sglang_rollout import generate as built_in
        from slime.utils.types import Sample

        async def generate(args, sample, sampling_params):
            sample = await built_in(args, sample, sampling_params)
            sample.tool_calls, sample.trace, sample.note = 3.0, [{{"x": 1}}], "ab"
            return sample

        async def reward_func(args, sample, **kwargs):
            return {{{values}}}
    """
    path = write(tmp_path, code)
    options = {"custom_generate_function_path": path, "custom_rm_path": path, "reward_key": "attribute"}
    [sample] = rollout(("1",), rows=[{"input": "1+", "label": ""}], n_samples_per_prompt=1, **options)
    assert sample.rewards == dict.fromkeys(REWARDS, 3.0)


def test_attribute_that_cannot_be_recorded_raises_when_it_is_read() -> None:
    sample = UserSample.of(Sample("g-00", "g", "g-00", 0, token_ids=[1], loss_mask=[0], rollout_logprobs=[0.0]))
    sample.client, sample.calls = object(), 2
    later = UserSample.of(checked_sample(sample))
    assert later.calls == 2 and not hasattr(later, "other")
    with pytest.raises(PluginError, match="'client' was a object"):
        getattr(later, "client", 0.0)
    again = UserSample.of(checked_sample(later))
    with pytest.raises(PluginError, match="'client'"):
        _ = again.client
    again.client = "text"
    assert UserSample.of(checked_sample(again)).client == "text"


def blank() -> UserSample:
    return UserSample.of(Sample("g-00", "g", "g-00", 0, token_ids=[9, 8], loss_mask=[0, 0], rollout_logprobs=[0.0] * 2))


def counted(sample: UserSample) -> None:
    sample.tokens = sample.tokens + [5, 6]  # noqa: RUF005
    sample.response_length += 2
    sample.rollout_log_probs = [-1.0, -2.0]
    sample.update_from_meta_info(None, {"finish_reason": {"type": "length"}, "weight_version": "r/1"})


def other_prompt(sample: UserSample) -> None:
    sample.response_length = 0
    sample.tokens = [7, 7, 7]
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0])


def longer_prompt(sample: UserSample) -> None:
    sample.tokens = [9, 8, 7]
    counted(sample)


def masks_from_none(sample: UserSample) -> None:
    sample.loss_mask = sample.rollout_log_probs = None
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0])


@pytest.mark.parametrize("change", [counted, other_prompt, longer_prompt, masks_from_none])
def test_ways_of_slimes_examples_to_write_a_response(change: Any) -> None:
    sample = blank()
    change(sample)
    made = checked_sample(sample)
    assert made.token_ids[-2:] == [5, 6] and made.loss_mask == [0] * (len(made.token_ids) - 2) + [1, 1]
    assert made.rollout_logprobs[-2:] == [-1.0, -2.0] and sample.response_length == 2


def test_tokens_of_an_unknown_response_before_appended_ones_need_log_probs() -> None:
    sample = blank()
    counted(sample)
    sample.rollout_log_probs = None
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0])
    with pytest.raises(PluginError, match=r"log-prob of token 0 .*nan"):
        checked_sample(sample)


TRAINER = {
    "custom_tis_function_path": [
        "def f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...",
        "def f(args, pg_loss, train_log_probs, rollout_log_probs): ...",
    ],
    "custom_pg_loss_reducer_function_path": [
        "def f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False): ..."
    ],
    "custom_loss_function_path": ["def f(args, batch, logits, sum_of_sample_mean, x=None): ..."],
    "custom_advantage_function_path": ["def f(args, rollout_data): ..."],
}


@pytest.mark.parametrize(("option", "code"), [(option, code) for option, codes in TRAINER.items() for code in codes])
def test_function_of_slimes_trainer_is_refused_when_it_is_loaded(option: str, code: str, tmp_path: Path) -> None:
    message = r"which only functions of slime's trainer have: write a function with the parameters \("
    with pytest.raises(PluginError, match=message):
        load_checked_function(write(tmp_path, code), "f", PLUGINS[option])


@pytest.mark.parametrize(
    "code",
    [
        "from slime.backends.megatron_utils.cp_utils import all_gather_with_cp",
        "def f():\n    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp",
        "def f():\n    import slime.ray.rollout",
        "async def f():\n    from slime.utils.types import MultimodalTypes",
        "class A:\n    def f(self):\n        from slime.utils import timer",
    ],
)
def test_module_of_slime_that_is_not_provided_is_refused_when_it_is_loaded(code: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"slime\.\S+ is not provided|slime\.\S+ has no"):
        load_function(write(tmp_path, code + "\ndef reward_func(args, sample): ..."))


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    from slime.utils.timer import Timer\nexcept ImportError:\n    Timer = None",
        "from slime.utils import types\nfrom slime.rollout.sglang_rollout import *\nimport slime.utils.types as t",
    ],
)
def test_module_with_other_imports_loads(code: str, tmp_path: Path) -> None:
    assert load_function(write(tmp_path, code + "\ndef reward_func(args, sample): return 1"))(None, None) == 1


@pytest.mark.parametrize(
    ("text", "label", "strict", "score", "answer"),
    [
        (r"so \boxed{34}", "34", True, 1.0, "34"),
        (r"\boxed{34}" + " " * 100, "34", True, -1.0, None),
        ("Answer: 34", "34", True, -1.0, None),
        ("Answer: 34", "34", False, 1.0, "34"),
    ],
)
def test_dapo_score_has_slimes_parameters_and_keys(
    text: str, label: str, strict: bool, score: float, answer: str | None
) -> None:
    compute_score = load_function("slime.rollout.rm_hub.math_dapo_utils.compute_score")
    result = compute_score(text, label, strict_box_verify=strict)
    assert (result["score"], bool(result["acc"]), result["pred"]) == (score, score == 1.0, answer)


def test_label_of_a_dictionary_reads_as_both_its_text_and_the_dictionary() -> None:
    label = UserSample.of(Sample("s", "g", "t", 0, label='{"a": {"b": [1]}}')).label
    assert label["a"]["b"] == [1] and label.get("c", 2) == 2 and json.loads(label) == {"a": {"b": [1]}}
    assert label[0] == "{" and UserSample.of(Sample("s", "g", "t", 0, label="text")).label == "text"


def test_options_of_the_run_are_attributes_without_secrets() -> None:
    words = "--hf-checkpoint m --eval-max-context-len 77 --plugin-args lr=mine --recompute-granularity full"
    args = parse_config(words.split()).rollout_with_args.plugin_arguments()
    assert (args["hf_checkpoint"], args["eval_max_context_len"], args["lr"]) == ("m", 77, "mine")
    assert args["recompute_granularity"] == "full" and not {"wandb_key", "store_options"} & args.keys()


def test_answers_of_another_policy_are_refused(tmp_path: Path) -> None:
    from penstock.stages.rollout.plugins.user_sample import EngineAnswer

    sample = blank()
    sample.tokens, sample.response_length = [9, 8, 5, 6], 2
    info = {"weight_version": "other/7"}
    sample.take_answers([EngineAnswer([9, 8], [5, 6], [-1.0, -2.0], info), EngineAnswer([1], [2], [-9.0], {})])
    assert sample.weight_versions == ["other/7"] and checked_sample(sample).rollout_logprobs == [0.0, 0.0, -1.0, -2.0]
