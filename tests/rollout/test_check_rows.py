"""Checks of prompt data (labels, tools, rows that the template rejects) and limits of the lengths of prompts."""

import logging
from pathlib import Path
from typing import Any

import pytest
from chat_templates import chat_tokenizer, with_template
from scripted_engine import Bench, write_jsonl
from sft_templates import GLM45, LLAMA31, QWEN3, QWEN25

from penstock.stages.rollout.agents.conversation import ChatFormat
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import max_response_tokens
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.stages.rollout.prompts.source import LengthFilter, PromptSource, max_prompt_tokens
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_tokenizer, check_vocabulary
from penstock.storage.errors import DataError, InputError, ModelError, OptionError, TemplateError
from penstock.storage.samples.sample import Status

ADD = {"type": "function", "function": {"name": "add"}}
USER = [{"role": "user", "content": "1+1?"}]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> RolloutConfig:
    return RolloutConfig(prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows), **options)


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ({"label": ""}, {}, "the row has no label.*'label'.*--label-key"),
        ({"label": ""}, {"streaming_data": True}, "no label"),
        ({"label": "3", "metadata": {"rm_type": "mathh"}}, {}, "mathh"),
    ],
)
def test_a_row_beyond_the_rendered_ones_that_cannot_be_graded_is_named(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    rows = [{"input": "a", "label": "1"}] * 700 + [{"input": "b"} | row, {"input": "c", "label": ""}]
    options = {"rm_type": "math", "label_key": "label", "data_cache": str(tmp_path / "cache"), **options}
    config = config_of(tmp_path, rows, **options)
    assert check_prompt_data(config) == 702
    with pytest.raises(InputError, match=rf"rows.jsonl row 700: .*{named}"):
        check_prompt_data(config, grading=config)


def test_rows_without_labels_are_accepted_if_their_reward_needs_none(tmp_path: Path) -> None:
    rows = [{"input": "a", "metadata": {"rm_type": kind}} for kind in ("zero", "random", None)]
    config = config_of(tmp_path, rows[1:], rm_type="random")
    assert check_prompt_data(config, grading=config) == 2
    own = config_of(tmp_path, rows, custom_rm_path="mine.py")
    assert check_prompt_data(own, grading=own) == 3


def test_tools_dropped_by_template_raise(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"input": "a"}, {"input": "b", "tools": [ADD]}], apply_chat_template=True)
    with pytest.raises(TemplateError, match=r"rows.jsonl row 1: .*--tool-key"):
        check_prompt_data(config, tokenizer=chat_tokenizer(LLAMA31))
    check_prompt_data(config.model_copy(update={"tool_key": ""}), tokenizer=chat_tokenizer(LLAMA31))


def test_row_rejected_by_template_is_named(tmp_path: Path) -> None:
    rows = [{"input": USER}] * 200 + [
        {"input": [*USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a"}}] * 2}, *USER]}
    ]
    config = config_of(tmp_path, rows, apply_chat_template=True)
    with pytest.raises(TemplateError, match=r"rows.jsonl row 200: .*single tool-calls"):
        check_prompt_data(config, tokenizer=chat_tokenizer(LLAMA31))
    with pytest.raises(TemplateError, match=r"rows.jsonl row 0: "):
        check_prompt_data(config, tokenizer=chat_tokenizer("{{ 'x' * 10**10 }}"))


def test_a_demonstration_that_cannot_be_trained_exactly_is_named(tmp_path: Path) -> None:
    chat = [*USER, {"role": "assistant", "content": "2"}]
    config = config_of(tmp_path, [{"input": chat}, {"input": [*chat, *chat]}])
    assert check_prompt_data(config, is_sft=True, tokenizer=chat_tokenizer(QWEN3)) == 2
    upper = chat_tokenizer("{% for message in messages %}{{ message.content | upper }}{% endfor %}")
    with pytest.raises(TemplateError, match=r"rows.jsonl row 0: "):
        check_prompt_data(config, is_sft=True, tokenizer=upper)
    bad = config_of(tmp_path, [{"input": [*chat, {"role": "assistant", "content": "b", "step_loss_mask": "no"}]}])
    with pytest.raises(DataError, match=r"rows.jsonl row 0: step_loss_mask"):
        check_prompt_data(bad, is_sft=True, tokenizer=chat_tokenizer(QWEN3))


def test_prompt_without_room_for_longest_response_raises(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(QWEN25)
    config = config_of(tmp_path, [{"input": "a" * 10}, {"input": "a" * 100}], rollout_max_response_len=50)
    for num_positions, options in (
        (150, {}),
        (149, {"rollout_max_prompt_len": 90}),
        (149, {"rollout_max_context_len": 149}),
    ):
        check_prompt_data(config.model_copy(update=options), tokenizer=tokenizer, max_seq_len=num_positions)
    with pytest.raises(OptionError, match=r"--rollout-max-response-len 50 .*100 tokens .*rows.jsonl row 1 .*149"):
        check_prompt_data(config, tokenizer=tokenizer, max_seq_len=149)


def test_template_kwargs_reach_prompts_and_agents_and_a_request_overrides_them() -> None:
    tokenizer = chat_tokenizer(GLM45)
    tokenizer.template_options = RolloutConfig(
        apply_chat_template_kwargs={"enable_thinking": False}
    ).apply_chat_template_kwargs
    assert tokenizer.render(["a"])[0].endswith("a/nothink<|assistant|>\n<think></think>")
    assert ChatFormat(tokenizer).render(USER).endswith("<think></think>")
    assert ChatFormat(tokenizer).render(USER, options={"enable_thinking": True}).endswith("1+1?<|assistant|>")


def test_reserved_template_kwargs_raise() -> None:
    with pytest.raises(ValueError, match="--apply-chat-template-kwargs cannot set 'messages'"):
        RolloutConfig(apply_chat_template_kwargs={"messages": []})


def test_tokenizer_beyond_vocabulary_raises() -> None:
    tokenizer = chat_tokenizer(None)
    largest = max(tokenizer.inner.get_vocab().values())
    check_vocabulary(tokenizer, largest + 1, "model")
    with pytest.raises(ModelError, match=f"token id {largest} .*vocab_size .*{largest}"):
        check_vocabulary(tokenizer, largest, "model")


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}


@pytest.fixture
def with_tools(tokenizer: PromptTokenizer) -> PromptTokenizer:
    """The tiny tokenizer, its template writing the names of the tools first."""
    names = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    return with_template(tokenizer, names + tokenizer.inner.chat_template)


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
    assert [text[:4] if text.startswith(("<add", "<sub")) else "" for text in texts] == ["<add", "<sub", "", ""]
    assert prompts[0].metadata == {"i": 0, "tools": [TOOL]} and prompts[2].metadata == {}
    plain = RolloutConfig(prompt_data=config.prompt_data, apply_chat_template=True)
    assert PromptSource.open(plain).files == source.files, "the column is read without a flag"
    for key in ("", "others"):
        without = PromptSource.open(plain.model_copy(update={"tool_key": key}))
        assert [prompt.tools for prompt in without.take(without.restore(None), 4)[0]] == [None] * 4


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ('"{"', "rows.jsonl:1: column 'tools' is text but not JSON"),
        ('["add"]', "rows.jsonl:1: column 'tools' holds.*--tool-key ''"),
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


def test_evaluation_skips_nothing_and_prompts_without_room_fail(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    lengths = {len(ids) for ids in tokenizer.encode(tokenizer.render([f"{i}+1=" for i in range(12)]))}
    bench = Bench(tmp_path, tokenizer, num_rows=12, rollout_max_context_len=max(lengths))
    commit = bench.evaluate(0, "sums")
    samples = bench.trained(commit)
    assert len(samples) == 24 and commit.state["data_source"]["skipped"] == 0
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    assert len(failed) == 2 * 2 and "--rollout-max-context-len" in failed[0].metadata["error"]
