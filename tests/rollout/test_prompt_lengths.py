"""Prompts that are too long, and tool definitions in templates."""

import copy
import logging
from pathlib import Path

import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import max_response_tokens
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.stages.rollout.prompts.source import LengthFilter, PromptSource, max_prompt_tokens
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
TEMPLATE_WITH_TOOLS = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"


@pytest.fixture
def with_tools(tokenizer: PromptTokenizer) -> PromptTokenizer:
    """The tiny tokenizer, its template writing the names of the tools first."""
    other = PromptTokenizer.__new__(PromptTokenizer)
    other.__dict__ = {**tokenizer.__dict__, "inner": copy.deepcopy(tokenizer.inner)}
    other.inner.chat_template = TEMPLATE_WITH_TOOLS + tokenizer.inner.chat_template
    return other


def test_long_prompts_are_skipped_counted_and_logged_once(
    tmp_path: Path, tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "1+" * (i % 5 + 1)} for i in range(10)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    lengths = [len(ids) for ids in tokenizer.encode(tokenizer.render([row["input"] for row in rows]))]
    config = RolloutConfig(prompt_data=path, apply_chat_template=True, rollout_max_prompt_len=lengths[2])
    source, prompt_filter = PromptSource.open(config), LengthFilter(config, tokenizer)
    with caplog.at_level(logging.WARNING):
        prompts, state = source.take(source.restore(None), 12, prompt_filter)
    assert [prompt.row for prompt in prompts] == [0, 1, 2, 5, 6, 7] * 2
    assert (state.epoch, state.cursor, state.skipped) == (1, 8, 6)
    [message] = caplog.messages
    assert f"row 3 of {path} has {lengths[3]} tokens" in message and str(lengths[2]) in message


def test_prompt_and_response_share_the_context() -> None:
    assert max_prompt_tokens(RolloutConfig()) is None
    config = RolloutConfig(rollout_max_context_len=100, rollout_max_response_len=40)
    assert (
        max_prompt_tokens(config) == 99
        and max_prompt_tokens(config.model_copy(update={"rollout_max_prompt_len": 20})) == 20
    )
    assert [max_response_tokens(config, length) for length in (10, 60, 70, 99)] == [40, 40, 30, 1]
    assert max_response_tokens(RolloutConfig(rollout_max_response_len=40), 10_000) == 40
    with pytest.raises(ValueError, match=r"100 tokens .*--rollout-max-context-len 100"):
        max_response_tokens(config, 100)


def test_tools_reach_the_template_and_the_sample(tmp_path: Path, with_tools: PromptTokenizer) -> None:
    rows = [
        {"input": "1+1=", "tools": [TOOL], "metadata": {"i": 0}},
        {"input": [{"role": "user", "content": "2"}], "tools": '[{"type": "function", "function": {"name": "sub"}}]'},
        {"input": "3"},
        {"input": "4", "tools": None},
    ]
    config = RolloutConfig(
        prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows), apply_chat_template=True, tool_key="tools"
    )
    assert check_prompt_data(config) == 4
    source = PromptSource.open(config)
    prompts, _ = source.take(source.restore(None), 4)
    texts = with_tools.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
    assert [text.partition(">")[0] if text.startswith("<add") or text.startswith("<sub") else "" for text in texts] == [
        "<add",
        "<sub",
        "",
        "",
    ]
    assert prompts[0].metadata == {"i": 0, "tools": [TOOL]} and prompts[2].metadata == {}
    plain = RolloutConfig(prompt_data=config.prompt_data, apply_chat_template=True)
    assert PromptSource.open(plain).files[0][2:] == source.files[0][2:], "a row without tools is the row it always was"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ('"{"', "rows.jsonl:1: column 'tools' is text but not JSON"),
        ('{"name": "add"}', "rows.jsonl:1: column 'tools' holds .*--tool-key"),
        ('["add"]', "rows.jsonl:1: column 'tools' holds"),
    ],
)
def test_invalid_tools_raise(tmp_path: Path, tools: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"input": "1", "tools": {tools}}}\n')
    with pytest.raises(ValueError, match=message):
        check_prompt_data(
            RolloutConfig(prompt_data=str(tmp_path / "rows.jsonl"), apply_chat_template=True, tool_key="tools")
        )


def test_tools_without_template_raise(tmp_path: Path, tokenizer: PromptTokenizer, with_tools: PromptTokenizer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": "1", "tools": [TOOL]}])
    with pytest.raises(ValueError, match=r"--tool-key tools .*--apply-chat-template"):
        check_prompt_data(RolloutConfig(prompt_data=path, tool_key="tools"))
    for which, model in (("without", tokenizer), ("with", with_tools)):
        model.inner.save_pretrained(tmp_path / which)
    check_tokenizer(tmp_path / "with", apply_chat_template=True, tools=True)
    check_tokenizer(tmp_path / "without", apply_chat_template=True)
    with pytest.raises(ValueError, match="--tool-key"):
        check_tokenizer(tmp_path / "without", apply_chat_template=True, tools=True)
