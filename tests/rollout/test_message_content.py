"""Content of messages: text parts are joined, and what a template cannot write is refused, in every entrance."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import chat_tokenizer
from scripted_engine import write_jsonl
from scripted_replies import handle_with, pending
from sft_templates import LLAMA31, QWEN3

from penstock.stages.rollout.agents.conversation import Conversation
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import Dataset, RolloutRound
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.stages.rollout.prompts.prompt_files import read_entry
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.text.loss_masks import split_trained_text
from penstock.stages.rollout.text.templates import normalize_messages
from penstock.storage.errors import DataError, TemplateError


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
PARTS = [  # content and the same content as text
    ([part("1+"), part("1?")], "1+1?"),
    ([part("ü", image_url=None)], "ü"),
    ([part("x", cache_control={"type": "ephemeral"})], "x"),
]
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
REFUSED = {  # what a message is refused for
    "null": user(None),
    "audio": user([AUDIO]),
    "part without text": user([{"type": "text"}]),
    "part without type": user([{"text": "a"}]),
    "no parts": user([]),
    "dictionary": user({"type": "text", "text": "a"}),
    "assistant without content": {"role": "assistant", "content": None},
    "user with calls": {"role": "user", "content": [AUDIO], "tool_calls": [CALL]},
    "no role": {"content": "a"},
    "text": "hello",
    "call without name": {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]},
    "calls as text": {"role": "assistant", "content": "", "tool_calls": "add(1)"},
}


def rows_of(path: Path | str) -> list[bytes]:
    rows = read_entry(str(path), RolloutConfig()).rows
    return [rows[index] for index in range(len(rows))]


@pytest.mark.parametrize(("content", "text"), PARTS)
def test_parts_are_joined_in_files_conversations_and_issued_prompts(tmp_path: Path, content: Any, text: str) -> None:
    system = {"role": "system", "content": "s"}
    expected = rows_of(write_jsonl(tmp_path / "text.jsonl", [{"input": [system, user(text)]}]))
    rows = [{"input": [system | {"content": [part("s")]}, user(content)]}]
    assert rows_of(write_jsonl(tmp_path / "parts.jsonl", rows)) == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parts.parquet")
    assert rows_of(tmp_path / "parts.parquet") == expected
    nulls = {"name": None, "tool_calls": None, "tool_call_id": None}  # as Parquet adds
    rows = [{"input": [system | nulls, user(content) | nulls]}]
    assert rows_of(write_jsonl(tmp_path / "nulls.jsonl", rows)) == expected

    def talk(content: Any) -> list[int]:
        handle = handle_with(QWEN3, "2<|im_end|>", "3<|im_end|>")
        conversation = Conversation(handle, pending(handle))
        for _ in range(2):
            asyncio.run(conversation.reply([user(content)]))
        return conversation.sample.token_ids

    assert talk(content) == talk(text)
    config = RolloutConfig(prompt_data=str(tmp_path / "text.jsonl"), apply_chat_template=True)
    dataset = Dataset(config, PromptSource.open(config), chat_tokenizer(QWEN3), RolloutRound("run", 0, 0))
    assert dataset.issue([user(content)])[0].prompt == dataset.issue([user(text)])[0].prompt
    with pytest.raises(DataError, match="message 1"):
        dataset.issue([user(None)])
    tokenizer, answer = chat_tokenizer(LLAMA31), {"role": "assistant", "content": "2"}  # its template trims
    expected_pieces = split_trained_text([user(text), answer], tokenizer)
    assert split_trained_text([user(content), {**answer, "content": [part("2")]}], tokenizer) == expected_pieces


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_message_that_cannot_be_rendered_is_refused_in_every_entrance(tmp_path: Path, message: Any) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": [user("a")]}, {"input": [user("a"), message]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: column 'input': .*message 2") as caught:
        rows_of(path)
    assert str(caught.value).count("\n") == 0 and len(str(caught.value)) < 400
    tokenizer = chat_tokenizer(QWEN3)
    with pytest.raises(DataError, match="message 2"):
        tokenizer.render([[user("a"), message]])
    if isinstance(message, dict) and message.get("role"):
        with pytest.raises(DataError, match="message 2"):
            split_trained_text([user("a"), message], tokenizer)
    handle = handle_with(QWEN3, "2<|im_end|>")
    conversation = Conversation(handle, pending(handle))
    with pytest.raises(DataError, match="message 1"):
        asyncio.run(conversation.reply([message]))
    assert not conversation.turns


def test_null_content_beside_calls_is_kept() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    for message in (calling, {**calling, "content": []}, {"role": "assistant", "tool_calls": [CALL]}):
        assert normalize_messages([message]) == [calling]
    assert normalize_messages([{**calling, "content": ""}]) == [{**calling, "content": ""}]


@pytest.mark.parametrize("template", ["  \n", "{{ prompt }}"])
def test_empty_rendered_prompt_is_refused_with_row(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(template)
    config = RolloutConfig(prompt_data=write_jsonl(tmp_path / "rows.jsonl", [{"input": "a"}]), apply_chat_template=True)
    with pytest.raises(TemplateError, match=r"rows\.jsonl row 0: .*renders nothing"):
        check_prompt_data(config, tokenizer=tokenizer)
    with pytest.raises(TemplateError, match="renders nothing"):
        tokenizer.render(["a"])
    handle = handle_with(template, "2")
    with pytest.raises(TemplateError, match="renders nothing"):
        asyncio.run(Conversation(handle, pending(handle)).reply([user("a")]))


def test_empty_prompt_without_template_is_refused() -> None:
    tokenizer = chat_tokenizer(None)
    tokenizer.apply_chat_template = False
    assert tokenizer.render(["a", " "]) == ["a", " "]
    with pytest.raises(DataError, match="empty"):
        tokenizer.render(["a", ""])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
    ],
)
def test_prompt_whose_messages_template_drops_is_refused_with_row(tmp_path: Path, template: str) -> None:
    chat = [{"role": "system", "content": "s"}, user("q"), {"role": "tool", "content": "r"}, user("p")]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": chat}])
    config = RolloutConfig(prompt_data=path, apply_chat_template=True)
    with pytest.raises(TemplateError, match=r"rows\.jsonl row 0: .*does not write the content of message \d"):
        check_prompt_data(config, tokenizer=chat_tokenizer(template))


def test_prompt_that_template_writes_in_capitals_is_accepted(tmp_path: Path) -> None:
    config = RolloutConfig(prompt_data=write_jsonl(tmp_path / "rows.jsonl", [{"input": "a"}]), apply_chat_template=True)
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert check_prompt_data(config, tokenizer=tokenizer) == 1
