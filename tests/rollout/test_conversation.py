"""Conversations are token-exact: the model's tokens are trained, everything else is the template's text."""

import asyncio
import json
import logging
from typing import Any

import pytest
from chat_templates import GLM4, chat_tokenizer
from scripted_replies import handle_with, pending, text, trained
from sft_templates import DEEPSEEK_V3, LLAMA31, QWEN3

from penstock.stages.rollout.agents.conversation import ChatFormat, Conversation
from penstock.stages.rollout.plugins.user_sample import checked_sample
from penstock.storage.samples.sample import Status

SYSTEM = {"role": "system", "content": "you add"}
QUESTION = {"role": "user", "content": "what is 1+1?"}
MORE = {"role": "user", "content": "and 11+1?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {
    QWEN3: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>',
    LLAMA31: '{"name": "add", "parameters": {"a": 1, "b": 1}}',
    GLM4: "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    DEEPSEEK_V3: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
}
ENDS = {  # of a reply that calls a tool, and of one that waits for the user
    QWEN3: ("<|im_end|>", "<|im_end|>"),
    LLAMA31: ("<|eot_id|>", "<|eot_id|>"),
    GLM4: ("<|observation|>", "<|user|>"),
    DEEPSEEK_V3: ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
NAMES = ("qwen3", "llama3", "glm4", "deepseek")
every_template = pytest.mark.parametrize("template", [QWEN3, LLAMA31, GLM4, DEEPSEEK_V3], ids=NAMES)


def talk(handle: Any, *turns: list[dict[str, Any]], tools: Any = None, sample: Any = None, **sampling: Any) -> Any:
    """The conversation, its sample and the replies."""
    sample = sample or pending(handle)
    conversation = Conversation(handle, sample, tools)

    async def run() -> list[dict[str, Any]]:
        return [await conversation.reply(turn, **sampling) for turn in turns]

    return conversation, sample, asyncio.run(run())


@every_template
def test_conversation_text_equals_rendering_of_template(template: str) -> None:
    to_tool, to_user = ENDS[template]
    replied = [CALL[template] + to_tool, "it is 2" + to_user, CALL[template] + to_tool, "it is 12" + to_user]
    handle = handle_with(template, *replied)
    results = [{"role": "tool", "tool_call_id": "functions.add:0", "content": "2"}]
    again = [{"role": "tool", "tool_call_id": "functions.add:1", "content": "12"}]
    conversation, sample, replies = talk(handle, [SYSTEM, QUESTION], results, [MORE], again, tools=[ADD])

    called = [call["id"] for reply in replies for call in reply.get("tool_calls", ())]
    assert called == ["functions.add:0", "functions.add:1"]
    assert json.loads(replies[0]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 1}
    assert replies[1] == {"role": "assistant", "content": "it is 2"}
    assert trained(handle, sample) == replied
    assert all(sample.token_ids[: len(input_ids)] == input_ids for input_ids, _ in handle.client.requests)
    logprobs = [logprob for logprob in sample.rollout_logprobs if logprob]
    assert logprobs == [-float(i) for i in range(1, sum(sample.loss_mask) + 1)]
    assert all(bool(logprob) == bool(mask) for logprob, mask in zip(sample.rollout_logprobs, sample.loss_mask))

    whole = ChatFormat(handle.tokenizer).render(conversation.messages, [ADD], open_reply=False)
    shown = text(handle, sample)
    if template == QWEN3:  # which opens the last reply with empty thoughts, if it has none
        whole = whole.replace("<think>\n\n</think>\n\n", "")
    if template == GLM4:
        whole += "<|user|>"  # which the model has written already
    assert shown == whole.rstrip("\n")
    assert checked_sample(sample).loss_mask == sample.loss_mask


def test_model_text_is_never_tokenized_again() -> None:
    handle = handle_with(QWEN3)
    tokenizer = handle.tokenizer
    unusual = [tokenizer.encode([letter])[0][0] for letter in "hello"]  # `encode` would make one token of "ll"
    assert tokenizer.encode(["hello"])[0] != unusual
    end = tokenizer.encode(["<|im_end|>"])[0]
    handle.client.replies = [unusual + end, "yes<|im_end|>"]
    _, sample, _ = talk(handle, [QUESTION], [MORE])
    start = sample.loss_mask.index(1)
    assert sample.token_ids[start : start + 6] == unusual + end


def test_truncated_reply_is_closed_before_next_turn() -> None:
    handle = handle_with(QWEN3, "long", "yes<|im_end|>")
    _, sample, replies = talk(handle, [QUESTION], [MORE], max_new_tokens=3)
    assert replies[0]["content"] == "lon"
    assert "lon<|im_end|>\n<|im_start|>user\nand 11+1?" in text(handle, sample)
    assert trained(handle, sample) == ["lon", "yes"]  # the end of the first one is ours; the second one was cut off too


def test_reply_with_other_end_token_is_not_closed_twice() -> None:
    handle = handle_with(LLAMA31, "hi<|eom_id|>", "yes<|eot_id|>")
    _, sample, _ = talk(handle, [QUESTION], [MORE])
    assert "hi<|eom_id|><|start_header_id|>user" in text(handle, sample)


def test_glm_reply_ended_by_role_token_accepts_tool_result() -> None:
    handle = handle_with(GLM4, "hi<|user|>", "yes<|user|>")
    _, sample, _ = talk(handle, [QUESTION], [{"role": "tool", "content": "2"}])
    assert "hi<|user|><|observation|>\n<tool_response>" in text(handle, sample)
    assert trained(handle, sample) == ["hi<|user|>", "yes<|user|>"]


def test_reasoning_dropped_by_template_is_kept_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    thought = "<think>\nhm\n</think>\n\n2<|im_end|>"
    with caplog.at_level(logging.WARNING):
        handle = handle_with(QWEN3, thought, thought, thought)
        _, sample, _ = talk(handle, [QUESTION], [MORE], [MORE])
    assert trained(handle, sample) == [thought] * 3
    assert text(handle, sample).count("hm") == 3
    assert len([record for record in caplog.records if "reasoning" in record.message]) == 1
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        ChatFormat(chat_tokenizer(LLAMA31))
    assert not caplog.records


def test_reply_without_messages_answers_prompt_of_sample() -> None:
    handle = handle_with(QWEN3, "2<|im_end|>", "3<|im_end|>")
    _, sample, _ = talk(
        handle, [], [MORE], sample=pending(handle, "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
    )
    assert text(handle, sample) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nand 11+1?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert checked_sample(sample).status is Status.COMPLETED


def test_message_without_room_truncates_sample() -> None:
    handle = handle_with(QWEN3, "2<|im_end|>", rollout_max_response_len=40)
    conversation, sample, replies = talk(handle, [QUESTION], [{"role": "user", "content": "x" * 60}])
    assert replies[1] == {"role": "assistant", "content": ""}
    assert sample.status is Status.TRUNCATED and len(conversation.turns) == 1
    assert trained(handle, sample) == ["2<|im_end|>"]


def test_failed_call_leaves_no_trace() -> None:
    handle = handle_with(QWEN3, "2<|im_end|>", ValueError("the engine does not want it"), "3<|im_end|>")
    conversation, sample, _ = talk(handle, [QUESTION])

    async def go_on() -> None:
        before = list(sample.token_ids)
        with pytest.raises(ValueError, match="does not want it"):
            await conversation.reply([MORE])
        assert sample.token_ids == before
        await conversation.reply([MORE])

    asyncio.run(go_on())
    assert text(handle, sample).count("and 11+1?") == 1 and trained(handle, sample) == ["2<|im_end|>", "3<|im_end|>"]


def test_aborted_reply_calls_no_tool() -> None:
    handle = handle_with(QWEN3)
    handle.client.stopped = True
    conversation, sample, replies = talk(handle, [QUESTION], tools=[ADD])
    assert sample.status is Status.ABORTED and "tool_calls" not in replies[0] and not conversation.turns


@pytest.mark.parametrize(
    "content",
    [
        """{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
        {{- raise_exception('there was no call') }}{% endif %}
        {{- '<|im_start|>' + (m.content or m.tool_calls | tojson) + '<|im_end|>' }}""",
        "{{ '<|im_start|>' + m.content + '<|im_end|>' }}",
    ],
    ids=["requires a call before its result", "writes no calls"],
)
def test_result_is_rendered_after_the_text_of_the_call(content: str) -> None:
    template = f"{{% for m in messages %}}{content}{{% endfor %}}"
    handle = handle_with(template, CALL[QWEN3] + "<|im_end|>", "2")
    _, sample, replies = talk(handle, [QUESTION], [{"role": "tool", "content": "two"}], tools=[ADD])
    assert "tool_calls" in replies[0]
    expected = f"<|im_start|>what is 1+1?<|im_end|>{CALL[QWEN3]}<|im_end|><|im_start|>two<|im_end|>2"
    assert text(handle, sample) == expected


def test_options_of_the_template_and_a_stop_text() -> None:
    handle = handle_with(QWEN3, "yes.no")
    sample = pending(handle)
    conversation = Conversation(handle, sample, template_options={"enable_thinking": False})
    reply = asyncio.run(conversation.reply([QUESTION], stop=[".no"]))
    assert reply["content"] == "yes" and trained(handle, sample) == ["yes.no"]
    assert sample.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


TWO_CALLS = [{"id": str(i), "type": "function", "function": {"name": "add", "arguments": "{}"}} for i in range(2)]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (None, [[QUESTION]], r"chat_template.jinja"),
        (LLAMA31, [[QUESTION, {"role": "assistant", "content": None, "tool_calls": TWO_CALLS}]], "single tool-calls"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [[QUESTION], [MORE]], "assistant"),
        (QWEN3, [[IMAGE]], "base64"),
    ],
    ids=["no template", "two calls", "no answers", "image"],
)
def test_conversation_rejected_by_template_raises(template: str | None, turns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        talk(handle_with(template, "2", "3"), *turns)
