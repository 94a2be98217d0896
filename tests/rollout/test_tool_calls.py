"""Tool calls in replies: drafts inside thoughts are not executed, and every format of the common models is parsed."""

import asyncio
import json
from typing import Any

import pytest
from scripted_replies import handle_with, pending
from sft_templates import DEEPSEEK_V3, LLAMA31, QWEN3

from penstock.stages.rollout.agents.conversation import Conversation
from penstock.stages.rollout.agents.tool_calls import ToolCall, parse_tool_calls


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("pay", amount=NUMBER, note=TEXT, split={"type": "object"}, now={"type": "boolean"}),
    tool("now"),
    tool("note", note={"anyOf": [TEXT, {"type": "null"}]}, tags={"type": ["array", "null"]}),
]
PAY = ToolCall("pay", {"amount": 1})
NOW = ToolCall("now", {})
PAYS = {  # how the models write PAY
    "hermes": '<tool_call>{"name": "pay", "arguments": {"amount": 1}}</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=pay>\n<parameter=amount>\n1\n</parameter>\n</function>\n</tool_call>",
    "qwen3-coder-bare": "<function=pay>\n<parameter=amount>\n1\n</parameter>\n</function>",
    "glm-4.5": "<tool_call>pay\n<arg_key>amount</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>pay<arg_key>amount</arg_key><arg_value>1</arg_value></tool_call>",
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.pay:0<|tool_call_argument_begin|>"
        '{"amount": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>pay\n```json\n"
        '{"amount": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>pay<｜tool▁sep｜>"
        '{"amount": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "llama-3-python-tag": '<|python_tag|>{"name": "pay", "parameters": {"amount": 1}}',
    "llama-3-function": '<function=pay>{"amount": 1}</function>',
}
UNTAGGED = {"llama-3": '{"name": "pay", "parameters": {"amount": 1}}', "glm-4": 'pay\n{"amount": 1}'}
every_format = pytest.mark.parametrize("written", PAYS.values(), ids=PAYS)
any_format = pytest.mark.parametrize("written", [*PAYS.values(), *UNTAGGED.values()], ids=[*PAYS, *UNTAGGED])


@pytest.mark.parametrize(
    "reply",
    [
        "<think>I could {} but should not.</think> no.",
        "<think>I could\n{}",  # the thought has no end
        "I could {} but should not.</think> no.",  # the thought begins in the prompt
        "<think>\n<think> twice {}\n</think>\n\nno.",
        "<think>a</think> b {} c</think> no.",
        "[THINK]{}[/THINK]no.",
        "<seed:think>{}</seed:think>no.",
        "<thinking>a </think> {}</thinking>no.",
    ],
)
def test_call_drafted_in_thought_is_not_parsed(reply: str) -> None:
    for written in (*PAYS.values(), *UNTAGGED.values()):
        text = reply.replace("{}", written)
        assert parse_tool_calls(text, TOOLS) == (text, [])


@any_format
def test_call_after_thought_is_parsed_and_thought_is_kept(written: str) -> None:
    for text in (f"I could {written} but", written, f"<think>{written}"):
        assert parse_tool_calls(text, TOOLS, in_thought=True) == (text, [])
    for thought in (
        f"<think>\nfirst {written}, then?\n</think>",
        f"hm {PAYS['hermes']} {written}</think>",
        "<think></think>",
    ):
        for in_thought in (False, True):
            assert parse_tool_calls(f"{thought}\n\n{written}", TOOLS, in_thought=in_thought) == (thought, [PAY])


@every_format
def test_text_around_call_is_kept(written: str) -> None:
    assert parse_tool_calls(f"I pay.\n{written}", TOOLS) == ("I pay.", [PAY])
    assert parse_tool_calls(f"{written}{written}", TOOLS) == ("", [PAY, PAY])
    text_as_arguments = PAYS["hermes"].replace('{"amount": 1}', json.dumps('{"amount": 1}'))
    assert parse_tool_calls(f"{written}\n{text_as_arguments}", TOOLS) == ("", [PAY, PAY])
    assert parse_tool_calls(f"{written}\n<think>{written}</think>", TOOLS) == (f"<think>{written}</think>", [PAY])
    text, calls = parse_tool_calls(f"a {PAYS['hermes']} b {written}", TOOLS)
    assert (" ".join(text.split()), calls) == ("a b", [PAY, PAY])


CODER = PAYS["qwen3-coder"].replace("<parameter", "<parameter=note>\n{}\n</parameter>\n<parameter")
GLM = PAYS["glm-4.5"].replace("<arg_key>", "<arg_key>note</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>", 1)
STRINGS = ["two\nlines", "a }</tool_call> b", "</think> x", "{'a': [1, {}]}", "漢 🙂", "", " 12", "null"]
STRINGS += ['she said "hi" \\ {"name": "now"}']
NAMES = ["hermes", "kimi-k2", "deepseek-v3", "llama-3-python-tag", "llama-3", "glm-4", "qwen3-coder", "glm-4.5"]


@pytest.mark.parametrize("name", NAMES)
def test_any_string_is_argument(name: str) -> None:
    for value in STRINGS:
        call = ToolCall("pay", {"note": value, "amount": 1})
        if name in ("qwen3-coder", "glm-4.5"):
            written = {"qwen3-coder": CODER, "glm-4.5": GLM}[name].replace("{}", value, 1)
        else:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            written = (PAYS | UNTAGGED)[name].replace('{"amount": 1}', arguments.replace("\\n", "\n"))
        assert parse_tool_calls(written, TOOLS) == ("", [call])


@pytest.mark.parametrize("arguments", ["null", '""', "{}", '" "', '"{}"', '"null"'])
def test_function_without_arguments_is_called(arguments: str) -> None:
    for key in ("arguments", "parameters"):
        written = f'{{"name": "now", "{key}": {arguments}}}'
        for reply in (written, f"<tool_call>{written}</tool_call>", f"<|python_tag|>{written}"):
            assert parse_tool_calls(reply, TOOLS) == ("", [NOW])


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "now"}</tool_call>',
        "<tool_call>now</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<function=now></function>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>",
        '<tool_call>[{"name": "now"}]</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{}"}}</tool_call>',
    ],
)
def test_call_without_arguments_in_every_format(written: str) -> None:
    assert parse_tool_calls(written, TOOLS) == ("", [NOW])


@pytest.mark.parametrize(
    ("start", "separator"), [("", "; "), ("<|python_tag|>", " ;\n"), ("\n\n", "\n"), ("", "<|python_tag|>")]
)
def test_llama_calls_are_separated_by_semicolons_or_lines(start: str, separator: str) -> None:
    written = start + separator.join([UNTAGGED["llama-3"], '{"name": "now", "parameters": {}}', UNTAGGED["llama-3"]])
    assert parse_tool_calls(written, TOOLS) == ("", [PAY, NOW, PAY])


@pytest.mark.parametrize(
    "written",
    [
        UNTAGGED["llama-3"] + "; and so on",
        UNTAGGED["llama-3"] + '; {"name": "other", "parameters": {}}',
        "call: " + UNTAGGED["llama-3"],
        'pay\n{"amount": 1} please',
        '{"name": "other", "parameters": {}}',
        '<tool_call>{"name": "pay", "arguments": {"amount": }}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "pay", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "pay", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
        '<tool_call>[{"name": "pay"}, 2]</tool_call>',
        "<tool_call><function=pay><parameter=amount>1</tool_call>",
        "<tool_call>pay<arg_key>amount</arg_key><arg_value>1</tool_call>",
        "<|tool_call_begin|>functions.pay:0<|tool_call_argument_begin|>{",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_text_that_is_not_call_stays_text(written: str) -> None:
    assert parse_tool_calls(written, TOOLS) == (written, [])


@pytest.mark.parametrize(
    ("name", "key", "written", "value"),
    [
        ("pay", "amount", "12", 12),
        ("pay", "amount", "much", "much"),
        ("pay", "now", "True", True),
        ("pay", "split", '{"a": [1, {"b": "</tool_call>"}]}', {"a": [1, {"b": "</tool_call>"}]}),
        ("pay", "note", "True", "True"),
        ("note", "tags", '["a"]', ["a"]),
        ("pay", "unknown", "1", 1),
        ("unknown", "a", "[1]", [1]),
    ],
)
def test_values_without_quotes_get_type_of_schema(name: str, key: str, written: str, value: Any) -> None:
    for reply in (
        f"<tool_call>\n<function={name}>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    ):
        assert parse_tool_calls(reply, TOOLS) == ("", [ToolCall(name, {key: value})])


@pytest.mark.full  # importing SGLang's parsers takes seconds
@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("hermes", "hermes"),
        ("qwen3-coder", "qwen3_coder"),
        ("glm-4.5", "glm45"),
        ("glm-4.7", "glm47"),
        ("kimi-k2", "kimi_k2"),
        ("deepseek-v3", "deepseekv3"),
        ("deepseek-v3.1", "deepseekv31"),
        ("llama-3-python-tag", "llama3"),
        ("llama-3", "llama3"),
    ],
)
def test_calls_are_those_of_sglang(name: str, parser: str) -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    written = (PAYS | UNTAGGED)[name]
    for text in (written, f"I pay.\n{written}") if name in PAYS else (written,):
        rest, found = FunctionCallParser([Tool(**tool) for tool in TOOLS], parser).parse_non_stream(text)
        calls = [ToolCall(call.name or "", json.loads(call.parameters)) for call in found]
        assert parse_tool_calls(text, TOOLS) == (rest.strip(), calls)


THINKING = QWEN3 + "{%- if add_generation_prompt %}{{ '<think>\\n' }}{%- endif %}"


def replies(template: str, *turns: str, question: str = "pay?", **options: Any) -> list[dict[str, Any]]:
    """The model's replies of a conversation in which the user asks again after every reply."""
    handle = handle_with(template, *turns)
    conversation = Conversation(handle, pending(handle), TOOLS, options)

    async def run() -> list[dict[str, Any]]:
        return [await conversation.reply([{"role": "user", "content": question}]) for _ in turns]

    return asyncio.run(run())


@pytest.mark.parametrize("template", [THINKING, LLAMA31 + "{{ '<think>' }}"])
@pytest.mark.parametrize("drafted", [f"I could {PAYS['hermes']}", f"{PAYS['hermes']} no</think> no."])
def test_conversation_whose_prompt_opens_thought_executes_no_draft(template: str, drafted: str) -> None:
    done = f"hm</think>{PAYS['hermes']}"
    first, second, third = replies(template, drafted, done, drafted)
    assert first == third == {"role": "assistant", "content": drafted}
    assert [call["function"]["name"] for call in second["tool_calls"]] == ["pay"]


@pytest.mark.parametrize("question", ["what is <think>?", "say </think> <think>"])
def test_question_that_mentions_tag_opens_no_thought(question: str) -> None:
    for template in (QWEN3, DEEPSEEK_V3, LLAMA31):
        [reply] = replies(template, PAYS["hermes"], question=question)
        assert reply["content"] is None and len(reply["tool_calls"]) == 1


def test_prompt_with_empty_thought_opens_no_thought() -> None:
    [reply] = replies(QWEN3, PAYS["hermes"], enable_thinking=False)
    assert len(reply["tool_calls"]) == 1
