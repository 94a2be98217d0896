"""Which tools a model's text calls: the forms that chat models are taught, read without knowing which model it is.

What cannot be read (broken JSON, a call cut off) stays text: the agent sees what the model wrote. Nothing constrains the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[dict[str, Any]]  # OpenAI's: {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any]


Read = Callable[["re.Match[str]", Tools], ToolCall | None]


def parse_tool_calls(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """The calls of a text in order, and what remains of the text without them.

    Args:
        text: what the model wrote, without its end token.
        tools: those it was offered. Forms without tags (Llama, GLM-4) are calls only if they name one of these.
    """
    for pattern, read in TAGGED:
        calls, rest, end = [], "", 0
        for match, call in _readable(pattern, read, text, tools):
            calls.append(call)
            rest, end = rest + text[end : match.start()], match.end()
        if calls:
            return SECTION_TAGS.sub("", rest + text[end:]).strip(), calls
    for pattern, read in UNTAGGED:
        for _, call in _readable(pattern, read, text, tools):
            if call.name in _names(tools):
                return "", [call]
    return text, []


def _readable(pattern: re.Pattern[str], read: Read, text: str, tools: Tools) -> Iterator[tuple[re.Match[str], ToolCall]]:
    for match in pattern.finditer(text):
        if (call := read(match, tools)) is not None:
            yield match, call


def _names(tools: Tools) -> set[str]:
    return {_function(tool).get("name", "") for tool in tools}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function", tool)  # some write the function alone


def _dictionary(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _one_object(match: re.Match[str], tools: Tools) -> ToolCall | None:
    """{"name": ..., "arguments": {...}}, or "parameters" as Llama writes it."""
    call = _dictionary(match[1]) or {}
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _dictionary(arguments)
    name = call.get("name")
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _name_and_object(match: re.Match[str], tools: Tools) -> ToolCall | None:
    arguments = _dictionary(match[2])
    return None if arguments is None else ToolCall(match[1].strip(), arguments)


def _name_and_pairs(match: re.Match[str], tools: Tools) -> ToolCall:
    """GLM-4.5's values are JSON, but for text, which stands without quotes."""
    schemas = [_function(tool) for tool in tools if _function(tool).get("name") == match[1]]
    properties = ((schemas[0].get("parameters") or {}).get("properties") or {}) if schemas else {}
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", match[2], re.DOTALL):
        arguments[key] = value
        if (properties.get(key) or {}).get("type") != "string":
            try:
                arguments[key] = json.loads(value)
            except json.JSONDecodeError:
                continue  # text after all
    return ToolCall(match[1], arguments)


def _form(pattern: str, read: Read) -> tuple[re.Pattern[str], Read]:
    return re.compile(pattern, re.DOTALL), read


TAGGED = (
    # Qwen, Hermes
    _form(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", _one_object),
    # GLM-4.5 to 4.7
    _form(r"<tool_call>\s*([\w.-]+)\s*((?:<arg_key>.*?</arg_value>\s*)*)</tool_call>", _name_and_pairs),
    # Kimi K2
    _form(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*(\{.*?\})\s*<\|tool_call_end\|>",
        _name_and_object,
    ),
    # DeepSeek V3, then V3.1
    _form(
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n(\{.*?\})\n```\s*<｜tool▁call▁end｜>", _name_and_object
    ),
    _form(r"<｜tool▁call▁begin｜>([^\n<]+)<｜tool▁sep｜>\s*(\{.*?\})\s*<｜tool▁call▁end｜>", _name_and_object),
)
UNTAGGED = (
    # Llama 3
    _form(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", _one_object),
    # GLM-4
    _form(r"\A\s*([\w.-]+)\n(\{.*\})\s*\Z", _name_and_object),
)
SECTION_TAGS = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|<｜tool▁calls▁(?:begin|end)｜>")
