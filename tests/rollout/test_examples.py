"""The examples with a real engine: the model's tokens are trained, tool output is not."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.flows.config import read_toml
from penstock.stages.plugins import load_function
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.engines.cluster import Cluster
    from penstock.engines.serving.pool import EnginePool

REPOSITORY = Path(__file__).parents[2]


def tiny(name: str, directory: Path) -> Path:
    """What an example's own script makes."""
    runpy.run_path(str(REPOSITORY / "examples" / name / "tiny.py"))["main"](str(directory))
    return directory


def publish(urls: list[str], model: Path, version: str) -> None:
    from safetensors.torch import load_file

    from penstock.engines.sglang.client import SGLangClient

    SGLangClient(urls).update_weights(iter(load_file(model / "model.safetensors").items()), version)


def hugging_face_logprobs(model_path: Path, samples: list[Sample]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    out = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor(sample.token_ids)
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            out.append([0.0, *logprobs.tolist()])
    return out


@contextmanager
def engine_for(cluster: Cluster, directory: Path) -> Iterator[EnginePool]:
    """An engine with the tokenizer of the example: the session's would not know its stop texts."""
    from penstock.engines.serving.pool import EnginePool
    from penstock.engines.serving.server import ServerSpec

    args = {"dtype": "bfloat16", "mem_fraction_static": 0.3} if cluster.num_gpus else {}
    pool = EnginePool(
        cluster, ServerSpec(model_path=str(directory / "model"), args=args, log_dir=str(directory / "log"))
    )
    try:
        yield pool
    finally:
        pool.stop()


def one_round(
    name: str, pool: EnginePool, directory: Path, samples_each: int = 1, policy_version: int = 0, **options: Any
) -> tuple[list[Sample], PromptTokenizer, dict[str, float]]:
    """The first round of an example's recipe on its tiny model, with other options if given."""
    example = REPOSITORY / "examples" / name
    values = {
        **read_toml(example / "run.toml")["rollout"],
        "prompt_data": [str(directory / "prompts.jsonl")],
        **options,
    }
    config = RolloutConfig(**values)
    tokenizer = PromptTokenizer(directory / "model", apply_chat_template=config.apply_chat_template)
    publish(pool.urls, directory / "model", f"{name}/0")
    store = Store(str(directory / "store"))
    context = RolloutContext(store, config, PromptSource.open(config), tokenizer, pool.urls)
    commit = rollout_stage(context, "rollouts/000000", RolloutRound(name, rollout_id=0, policy_version=policy_version))
    samples = read_samples(store, commit)
    assert len(samples) == config.rollout_batch_size * config.n_samples_per_prompt * samples_each
    assert 0 <= commit.summary["rollout/prefix_cache_hit_rate"] < 1
    for sample in samples:
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED), sample.metadata
        num_prompt = len(tokenizer.encode([sample.prompt])[0])
        assert tokenizer.decode([sample.token_ids[num_prompt:]], skip_special_tokens=False) == [sample.response]
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [mask == 1 for mask in sample.loss_mask]
        assert len(sample.token_ids) - num_prompt <= config.rollout_max_response_len
    longest = sorted(samples, key=lambda sample: sample.metadata.get("num_turns", 0))[-6:]
    for sample, expected in zip(longest, hugging_face_logprobs(directory / "model", longest)):
        exact = [logprob for logprob, mask in zip(expected, sample.loss_mask) if mask]
        assert [logprob for logprob in sample.rollout_logprobs if logprob] == pytest.approx(exact, abs=1e-4)
    return samples, tokenizer, commit.summary


def expected_mask(
    sample: Sample, tokenizer: PromptTokenizer, stops: tuple[str, ...], reply: Callable[[str], str | None]
) -> list[int]:
    """Derive the loss mask from the text alone: a turn ends with its stop text or end token, and the output of the tool
    follows a call."""
    tokens = tokenizer.decode([[token_id] for token_id in sample.token_ids], skip_special_tokens=False)
    mask = [0] * len(tokenizer.encode([sample.prompt])[0])
    while len(mask) < len(tokens):
        begin = len(mask)
        while len(mask) < len(tokens) and not (
            len(mask) > begin and tokens[len(mask) - 1].endswith((*stops, "<|end|>"))
        ):
            mask.append(1)
        said = reply("".join(tokens[begin : len(mask)]))
        if said is None or len(mask) == len(
            tokens
        ):  # the answer has ended, or there was no room for what the tool says
            break
        said_ids = tokenizer.encode([said])[0]
        assert sample.token_ids[len(mask) : len(mask) + len(said_ids)] == said_ids
        mask += [0] * len(said_ids)
    return mask


def functions_of(file: str) -> dict[str, Any]:
    return load_function(f"{file}:generate").__globals__


@pytest.mark.integration
def test_tool(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # where the recipe's paths begin
    calculate = functions_of("examples/multi_turn_tool/generate.py")["calculate"]

    def reply(text: str) -> str | None:
        call = re.search(r"<calculator>([^<]*)</calculator>$", text)
        return None if call is None else f"<result>{calculate(call[1])}</result>"

    with engine_for(cluster, tiny("multi_turn_tool", tmp_path)) as pool:
        samples, tokenizer, summary = one_round("multi_turn_tool", pool, tmp_path)
    for sample in samples:
        assert sample.loss_mask == expected_mask(sample, tokenizer, ("</calculator>",), reply), sample.response
    with_tool = [sample for sample in samples if 0 in sample.loss_mask[sample.loss_mask.index(1) :]]
    print(f"{len(with_tool)} of {len(samples)} samples used the tool, {summary}")
    assert len(with_tool) >= len(samples) // 8
    assert max(sample.metadata["num_turns"] for sample in samples) >= 2
    assert summary["rollout/prefix_cache_hit_rate"] > 0.1, "turns of a conversation are computed again"


@pytest.mark.integration
def test_agents_of_an_execution_share_trajectory_and_reward(
    engine_pool: EnginePool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.flows.commands.demo_model import make_tiny_data

    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "model").symlink_to(tiny_model)
    make_tiny_data(tmp_path / "data")["train"].rename(tmp_path / "prompts.jsonl")
    samples, _, _ = one_round("multi_agent", engine_pool, tmp_path, samples_each=3, rollout_batch_size=4)
    executions, plain = [samples[start : start + 3] for start in range(0, len(samples), 3)], 0
    for solver, critic, rewriter in executions:
        assert len({sample.trajectory_id for sample in (solver, critic, rewriter)}) == 1
        assert [sample.metadata["role"] for sample in (solver, critic, rewriter)] == ["solver", "critic", "rewriter"]
        draft, opinion = (sample.response.removesuffix("<|end|>") for sample in (solver, critic))
        question = solver.prompt.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        if "<|" not in draft + opinion:  # a random model also writes special tokens, which are not part of a message
            plain += 1
            assert critic.prompt == f"<|user|>{question}{draft}?<|end|><|assistant|>"
            assert rewriter.prompt == f"<|user|>{question}{draft}?{opinion}:<|end|><|assistant|>"
        assert {sample.reward for sample in (solver, critic, rewriter)} == {rewriter.rewards["answer"]}
    assert len({execution[0].trajectory_id for execution in executions}) == 4 * 8 and plain


@pytest.mark.integration
def test_custom_reward(engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    directory = tiny("custom_reward", tmp_path)
    with pytest.raises(RuntimeError, match="generated by weights 'custom_reward/0', expected 'custom_reward/1'"):
        one_round("custom_reward", engine_pool, directory, policy_version=1)
    samples, _, _ = one_round("custom_reward", engine_pool, directory)
    assert {"score", "right", "digits", "brief"} == set(samples[0].rewards)
    assert all(sample.reward == sample.rewards["score"] for sample in samples)
    assert len({sample.reward for sample in samples}) > 3


def reply_of_agent(text: str) -> str | None:
    """Return the results of the calls of a reply and the opening of the next one."""
    call = re.escape('<tool_call>{"name": "calculate", "arguments": {"expression": "')
    results = [f"<|system|>{eval(expression)}<|end|>" for expression in re.findall(f'{call}([^"]*)"', text)]
    return "".join([*results, "<|assistant|>"]) if results else None


@pytest.mark.integration
def test_agent_is_trained_on_its_own_tokens(
    engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent uses the `openai` package and does not know Penstock."""
    monkeypatch.chdir(REPOSITORY)
    samples, tokenizer, _ = one_round("openai_agent", engine_pool, tiny("openai_agent", tmp_path))
    assert sum("<|system|>" in sample.response for sample in samples) > 20
    for sample in samples:
        assert sample.prompt == f"<|user|>{sample.metadata['question']}<|end|><|assistant|>"
        assert sample.loss_mask == expected_mask(sample, tokenizer, (), reply_of_agent), sample.response


def test_the_calculator() -> None:
    calculate = functions_of(str(REPOSITORY / "examples/multi_turn_tool/generate.py"))["calculate"]
    assert [calculate(text) for text in ("12*(3+4)", "1/4", "-(2-5)", " 7 ")] == ["84", "0.25", "3", "7"]
    for text in ("1/0", "2**9", "__import__('os')", "(", "", "9" * 400 + "/1.5", "\x00"):
        assert calculate(text).startswith("error: "), text


def test_bm25_against_its_formula() -> None:
    import math

    functions = functions_of(str(REPOSITORY / "examples/search/generate.py"))
    documents = ["a b b c", "b c d", "a a a a a a d", "e"]
    index = functions["Index"](documents)
    words = [document.split() for document in documents]
    mean = sum(map(len, words)) / len(words)

    def score(query: str, document: list[str]) -> float:
        total = 0.0
        for word in query.split():
            df, tf = sum(word in other for other in words), document.count(word)
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            total += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(document) / mean))
        return total

    for query in ("b", "a d", "c d e", "b b a", "z"):
        ranked = sorted(range(4), key=lambda number: -score(query, words[number]))
        assert index.search(query, 4) == [documents[number] for number in ranked if score(query, words[number])]
