"""examples/openai_agent with a real engine: an agent unaware of Penstock, and the samples of its conversations."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_real_engine import hugging_face_logprobs, publish

from penstock.flows.config import read_toml
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.engines.serving.pool import EnginePool

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'


def test_agent_is_trained_on_its_own_tokens(
    engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])  # where the recipe's path begins
    runpy.run_path(str(EXAMPLE / "tiny.py"))["main"](str(tmp_path))
    config = RolloutConfig(**read_toml(EXAMPLE / "run.toml")["rollout"], prompt_data=[str(tmp_path / "prompts.jsonl")])
    tokenizer = PromptTokenizer(tmp_path / "model", apply_chat_template=False)
    publish(engine_pool.urls, tmp_path / "model", "agent/0")
    store = Store(str(tmp_path / "store"))
    commit = rollout_stage(
        RolloutContext(store, config, PromptSource.open(config), tokenizer, engine_pool.urls),
        "rollouts/000000",
        RolloutRound("agent", rollout_id=0, policy_version=0),
    )
    samples = read_samples(store, commit)
    assert len(samples) == 80 and {sample.status for sample in samples} <= {Status.COMPLETED, Status.TRUNCATED}
    assert sum("<|system|>" in sample.response for sample in samples) > 20
    for sample in samples:
        assert sample.loss_mask == expected_mask(tokenizer, sample)
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [bool(trained) for trained in sample.loss_mask]
    for sample, expected in zip(samples[::8], hugging_face_logprobs(tmp_path / "model", samples[::8])):
        exact = [logprob for logprob, mask in zip(expected, sample.loss_mask) if mask]
        assert [logprob for logprob in sample.rollout_logprobs if logprob] == pytest.approx(exact, abs=1e-4)


def expected_mask(tokenizer: PromptTokenizer, sample: Sample) -> list[int]:
    """Derive the loss mask from the text alone: a reply ends with its end token, and the output of the tool follows a
    reply with calls."""
    tokens = tokenizer.decode([[token_id] for token_id in sample.token_ids], skip_special_tokens=False)
    assert "".join(tokens) == sample.prompt + sample.response
    num_opening = len(["<|user|>", *sample.metadata["question"], "<|end|>", "<|assistant|>"])
    assert (
        "".join(tokens[:num_opening]) == f"<|user|>{sample.metadata['question']}<|end|><|assistant|>" == sample.prompt
    )
    mask = [0] * num_opening
    while True:
        rest = tokens[len(mask) :]
        reply = rest[: rest.index("<|end|>") + 1] if "<|end|>" in rest else rest
        assert reply
        mask += [1] * len(reply)
        if len(mask) == len(tokens):
            return mask
        expressions = [token.removeprefix(CALL).partition('"')[0] for token in reply if token.startswith(CALL)]
        said = "".join(f"<|system|>{eval(expression)}<|end|>" for expression in expressions) + "<|assistant|>"
        num_said = 1 + sum(2 + len(str(eval(expression))) for expression in expressions)
        assert expressions and "".join(tokens[len(mask) : len(mask) + num_said]) == said
        mask += [0] * num_said
