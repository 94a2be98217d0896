"""Preflight of prompt data: missing labels and tools, rows that the template rejects, prompts without room."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import chat_tokenizer
from scripted_engine import write_jsonl
from sft_templates import GLM45, LLAMA31, QWEN3, QWEN25

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data, check_rendered_rows
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.text.chat_format import ChatFormat
from penstock.stages.rollout.text.tokenizer import check_vocabulary
from penstock.storage.errors import DataError, InputError, ModelError, OptionError, RewardError, TemplateError

ADD = {"type": "function", "function": {"name": "add"}}
USER = [{"role": "user", "content": "1+1?"}]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> RolloutConfig:
    return RolloutConfig(prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows), **options)


@pytest.mark.parametrize("label", ["", None])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_label_names_file_and_row(tmp_path: Path, label: Any, streaming: bool) -> None:
    rows = [{"input": "a", "answer": 0}, {"input": "b", "answer": label}]
    options: dict[str, Any] = {"label_key": "answer", "streaming_data": streaming, "data_cache": str(tmp_path / "c")}
    config = config_of(tmp_path, rows, rm_type="math", **options)
    assert check_prompt_data(config) == 2
    with pytest.raises(RewardError, match=r"rows.jsonl row 1: the row has no label.*'answer'.*--label-key"):
        check_prompt_data(config, grading=config)


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ({"label": ""}, {}, "no label"),
        ({"label": None}, {}, "no label"),
        ({"label": "  "}, {}, "no label"),
        ({"label": "two"}, {"rm_type": "exact_number"}, "not an integer"),
        ({"label": "", "metadata": {"rm_type": "f1"}}, {"rm_type": "random"}, "the reward f1"),
        ({"label": "3", "metadata": {"rm_type": "mathh"}}, {}, "mathh"),
        ({"label": "3", "metadata": {"custom_rm_path": "grade.py"}}, {}, "--allow-row-code"),
        ({"label": "", "metadata": {"choices": ["a", "b"]}}, {"rm_type": "gpqa"}, "gpqa"),
    ],
)
def test_a_row_beyond_the_rendered_ones_that_cannot_be_graded_is_named(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    rows = [{"input": "a", "label": "1"}] * 700 + [{"input": "b"} | row, {"input": "c", "label": ""}]
    config = config_of(tmp_path, rows, **({"rm_type": "math", "label_key": "label"} | options))
    with pytest.raises(InputError, match=rf"rows.jsonl row 700: .*{named}"):
        check_prompt_data(config, grading=config)


def test_rows_without_labels_are_accepted_if_their_reward_needs_none(tmp_path: Path) -> None:
    rows = [{"input": "a", "metadata": {"rm_type": kind}} for kind in ("zero", "random", None)]
    config = config_of(tmp_path, rows[1:], rm_type="random")
    assert check_prompt_data(config, grading=config) == 2
    own = config_of(tmp_path, rows, custom_rm_path="mine.py")
    assert check_prompt_data(own, grading=own) == 3


def test_the_column_tools_is_read_without_a_flag(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"input": "a", "tools": [ADD]}, {"input": "b"}], apply_chat_template=True)
    source = PromptSource.open(config)
    first, second = source.take(source.restore(None), 2)[0]
    assert first.tools == [ADD] and first.metadata["tools"] == [ADD] and second.tools is None
    tokenizer = chat_tokenizer(QWEN3)
    assert '"name": "add"' in tokenizer.render([first.content], [first.tools])[0]
    check_prompt_data(config, tokenizer=tokenizer)
    for without in (config.model_copy(update={"tool_key": ""}), config.model_copy(update={"tool_key": "others"})):
        source = PromptSource.open(without)
        assert source.take(source.restore(None), 1)[0][0].tools is None


def test_tools_dropped_by_template_raise(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"input": "a"}, {"input": "b", "tools": [ADD]}], apply_chat_template=True)
    with pytest.raises(TemplateError, match=r"rows.jsonl row 1: .*--tool-key"):
        check_prompt_data(config, tokenizer=chat_tokenizer(LLAMA31))
    check_prompt_data(config.model_copy(update={"tool_key": ""}), tokenizer=chat_tokenizer(LLAMA31))
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'tools'.*--tool-key ''"):
        check_prompt_data(config_of(tmp_path, [{"input": "a", "tools": ["hammer"]}]))


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


def test_a_sample_of_many_rows_is_rendered(tmp_path: Path) -> None:
    tokenizer, rendered = chat_tokenizer(None), []
    tokenizer.encode = lambda texts: rendered.extend(texts) or [[0]]  # type: ignore[method-assign]
    rows = [json.dumps([f"{number:05d}" + "a" * (number == 5_001), "", {}]).encode() for number in range(10_000)]
    check_rendered_rows("rows", rows, RolloutConfig(), tokenizer, max_seq_len=2_000)
    assert {"00000", "00031", "09999", "05001a"} <= {*rendered}, "the first, the last and the longest"
    assert 65 <= len({*rendered}) <= 97


def test_template_kwargs_reach_prompts_and_agents_and_a_request_overrides_them() -> None:
    tokenizer = chat_tokenizer(GLM45)
    tokenizer.template_options = RolloutConfig(
        apply_chat_template_kwargs={"enable_thinking": False}
    ).apply_chat_template_kwargs
    assert tokenizer.render(["a"])[0].endswith("a/nothink<|assistant|>\n<think></think>")
    assert ChatFormat(tokenizer).render_opening(USER).endswith("<think></think>")
    assert ChatFormat(tokenizer).render_opening(USER, options={"enable_thinking": True}).endswith("1+1?<|assistant|>")


def test_reserved_template_kwargs_raise() -> None:
    with pytest.raises(ValueError, match="--apply-chat-template-kwargs cannot set 'messages'"):
        RolloutConfig(apply_chat_template_kwargs={"messages": []})


def test_tokenizer_beyond_vocabulary_raises() -> None:
    tokenizer = chat_tokenizer(None)
    largest = max(tokenizer.inner.get_vocab().values())
    check_vocabulary(tokenizer, largest + 1, "model")
    with pytest.raises(ModelError, match=f"token id {largest} .*vocab_size .*{largest}"):
        check_vocabulary(tokenizer, largest, "model")
