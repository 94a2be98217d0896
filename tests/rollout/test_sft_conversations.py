"""SFT rows that templates write in odd ways, or not at all: exactly the model's text is trained, or the row is
named."""

from typing import Any

import pytest
from chat_templates import chat_tokenizer
from sft_templates import (
    FAMILIES,
    GLM4_0414,
    GLM45_WITH_NONE,
    LLAMA31,
    MOONLIGHT,
    ODD_DEEPSEEK_R1,
    ODD_DEEPSEEK_V3,
    QWEN25,
)
from test_loss_masks import BLOCKS, SYSTEM, TOOLS, answer, calling, marked, prompt, result, trained, user

from penstock.stages.rollout.sft_data import sft_samples
from penstock.stages.rollout.text.templates import Messages
from penstock.storage.errors import TemplateError

every_family = pytest.mark.parametrize("family", FAMILIES)
NEXT = [user("2+2?"), answer("4")]
WITHOUT_ANSWER: dict[str, Messages] = {
    "empty last": [user("1+1?"), answer("")],
    "empty first": [user("1+1?"), answer(""), *NEXT],
    "blank": [user("1+1?"), answer(" \n"), *NEXT],
    "two empty": [user("1+1?"), answer(""), user("?"), answer("")],
}
ASSISTANT_FIRST: dict[str, Messages] = {
    "greeting": [answer("hello"), *NEXT],
    "greeting alone": [answer("hello")],
    "greeting after system": [SYSTEM, answer("hello"), *NEXT],
    "greeting with thoughts": [answer("<think>\nhm\n</think>\n\nhello"), *NEXT],
    "thoughts apart": [answer("hello", reasoning_content="hm"), *NEXT],
    "several lines": [answer("hello\n\nyou assistant"), *NEXT],
    "call": [calling({"a": "1"}), result("r"), answer("2"), *NEXT],
}
ROUNDS: dict[str, Messages] = {
    "one round": [user("q?"), calling({"a": "1"}), result("r"), answer("2")],
    "two rounds": [user("q?"), calling({"a": "1"}), result("r"), calling({"a": "2"}, 1), result("s", 1), answer("2")],
    "ends with call": [user("q?"), calling({"a": "1"}), result("r"), calling({"a": "2"}, 1)],
    "without arguments": [user("q?"), calling({}), result("r"), calling({}, 1), result("s", 1), answer("2")],
    "empty answer": [user("q?"), calling({"a": "1"}), result("r"), answer("")],
    "two questions": [user("q?"), calling({"a": "1"}), result("r"), answer("2"), user("p?"), calling({}), result("s")],
    "null content": [user("q?"), {**calling({"a": "1"}), "content": None}, result("r"), answer("2")],
    "no content": [
        user("q?"),
        {key: value for key, value in calling({"a": "1"}).items() if key != "content"},
        result("r"),
        answer("2"),
    ],
    "arguments as text": [user("q?"), calling('{"a": "1"}'), result("r"), answer("2")],
}


def expected_of(family: str, messages: Messages) -> list[str]:
    return [text for text in marked(chat_tokenizer(FAMILIES[family]), messages, TOOLS) if text]


@every_family
@pytest.mark.parametrize("messages", WITHOUT_ANSWER.values(), ids=WITHOUT_ANSWER)
def test_empty_answer_trains_its_end(family: str, messages: Messages) -> None:
    if family == "glm-4" and "" in (message["content"] for message in messages):
        with pytest.raises(TemplateError, match=r"row 7 of file 1.*does not write message 2"):
            sft_samples([prompt(messages, row=7)], chat_tokenizer(FAMILIES[family]), 0)
    else:
        assert trained(chat_tokenizer(FAMILIES[family]), messages, TOOLS) == expected_of(family, messages)


@every_family
@pytest.mark.parametrize("messages", ASSISTANT_FIRST.values(), ids=ASSISTANT_FIRST)
def test_conversation_that_begins_with_assistant_is_trained(family: str, messages: Messages) -> None:
    if family == "moonlight" and "tool" in (message["role"] for message in messages):
        pytest.skip("its template writes no calls")
    assert trained(chat_tokenizer(FAMILIES[family]), messages, TOOLS) == expected_of(family, messages)


@every_family
@pytest.mark.parametrize("messages", ROUNDS.values(), ids=ROUNDS)
def test_rounds_of_calls_are_trained(family: str, messages: Messages) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    unwritten = {"moonlight": "a tool call of message 2 "}
    if messages[-1]["content"] == "" and "tool_calls" not in messages[-1]:
        unwritten["glm-4"] = "message 4 "
    if family in unwritten:
        with pytest.raises(TemplateError, match=f"row 7 of file 1.*does not write {unwritten[family]}"):
            sft_samples([prompt(messages, row=7)], tokenizer, 0)
    else:
        assert trained(tokenizer, messages, TOOLS) == expected_of(family, messages)


@pytest.mark.parametrize("template", [ODD_DEEPSEEK_V3, ODD_DEEPSEEK_R1, GLM45_WITH_NONE], ids=["v3", "r1", "glm-4.5"])
@pytest.mark.parametrize("name", [name for name in ROUNDS if name != "two questions"])
def test_rounds_of_calls_are_trained_with_templates_that_want_one_form(template: str, name: str) -> None:
    tokenizer, messages = chat_tokenizer(template), ROUNDS[name]
    pieces = trained(tokenizer, messages, TOOLS)
    assert pieces == marked(tokenizer, messages, TOOLS) and "None" not in "".join(pieces)
    assert sum("add\n" in piece for piece in pieces) == sum("tool_calls" in message for message in messages)


def test_rounds_of_calls_by_hand() -> None:
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": "%s"}\n```<｜tool▁call▁end｜>'
    end = "<｜end▁of▁sentence｜>"
    for template in (ODD_DEEPSEEK_V3, ODD_DEEPSEEK_R1):
        assert trained(chat_tokenizer(template), ROUNDS["two rounds"], TOOLS) == [
            "<｜tool▁calls▁begin｜>" + call % 1,
            "\n" + call % 2 + "<｜tool▁calls▁end｜>" + end,
            "2" + end,
        ]
    assert trained(chat_tokenizer(GLM45_WITH_NONE), ROUNDS["null content"], TOOLS)[0] == (
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    )


CHAT_ML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}CALLS
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TALKING = [user("q?"), {**calling({"a": "1"}), "content": "let me see"}, result("r"), answer("2")]
TWO_CALLS = [user("q?"), answer("", tool_calls=[calling({"a": i})["tool_calls"][0] for i in (1, 2)]), result("r")]


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (GLM4_0414, ROUNDS["one round"], "a tool call of message 2 "),
        (GLM4_0414, ROUNDS["null content"], "a tool call of message 2 "),
        (GLM4_0414, [user("q?"), answer("let me"), result("r"), answer("2")], "the content of message 3 "),
        (MOONLIGHT, ROUNDS["one round"], "a tool call of message 2 "),
        (CHAT_ML.replace("CALLS", ""), ROUNDS["without arguments"], "a tool call of message 2 "),
        (CHAT_ML.replace("CALLS", ""), [calling({}), *NEXT], "a tool call of message 1 "),
        (ODD_DEEPSEEK_V3, TALKING, "a tool call of message 2 "),
        (ODD_DEEPSEEK_R1, TALKING, "a tool call of message 2 "),
        (LLAMA31, TALKING, "the content of message 2 "),
        (
            CHAT_ML.replace("CALLS", "{{- message.tool_calls[0].function.arguments if message.tool_calls }}"),
            TWO_CALLS,
            "a tool call of message 2 ",
        ),
        (
            CHAT_ML.replace("CALLS", "{%- for call in message.tool_calls %}{{- call.function.name }}{%- endfor %}"),
            ROUNDS["one round"],
            "a tool call of message 2 ",
        ),
        (QWEN25.replace("message.role == 'tool'", "false"), ROUNDS["one round"], "the content of message 3 "),
        (CHAT_ML.replace("in messages", "in messages if message.role != 'system'"), [SYSTEM, *NEXT], "message 1 "),
        (CHAT_ML.replace("in messages", "in messages[1:]"), [*NEXT, *NEXT], "the content of message 1 "),
        (BLOCKS, ROUNDS["one round"], "a tool call of message 2 "),
        (BLOCKS, ROUNDS["null content"], "a tool call of message 2 "),
        (BLOCKS.replace("in messages", "in messages if message.role != 'user'"), NEXT, "the content of message 1 "),
    ],
)
def test_text_that_template_does_not_write_is_error_with_row(template: str, messages: Any, missing: str) -> None:
    with pytest.raises(TemplateError, match=f"row 7 of file 1.*does not write .*{missing}") as caught:
        sft_samples([prompt(messages, row=7)], chat_tokenizer(template.replace("CALLS", "")), 0)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("arguments", [{"a": 1, "b": "ü"}, '{"a": 1, "b": "ü"}', '{"a":1,"b":"\\u00fc"}'])
def test_calls_are_not_written_as_text_in_text(arguments: Any) -> None:
    """Qwen 2.5's template writes the arguments with `tojson`, which would quote a text."""
    template = QWEN25.replace("call.function.arguments if call.function.arguments is string else ", "")
    tokenizer = chat_tokenizer(template)
    chat = [user("q?"), calling(arguments), result("r")]
    [text] = tokenizer.render_chats([chat], add_generation_prompt=True, tools=[TOOLS])
    assert '{"name": "add", "arguments": {"a": 1, "b": "ü"}}' in text
    assert trained(tokenizer, chat, TOOLS) == marked(tokenizer, chat, TOOLS)
