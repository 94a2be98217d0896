"""Parse tool calls from a model's reply; tries the formats of all common chat models.

A tool call that cannot be parsed (invalid JSON, a truncated call) stays in the text of the reply, which the agent sees.
Generation is not constrained by a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Tool definitions in OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A parsed tool call: the function's name and its arguments."""

    name: str
    arguments: dict[str, Any]


CallParser = Callable[["re.Match[str]", Tools], ToolCall | None]  # parses a match of a pattern; None: not a tool call


def parse_tool_calls(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Return the text without its tool calls, and the parsed tool calls in order.

    Args:
        text: reply of the model, without its end token.
        tools: tools offered to the model. In formats without tags (Llama, GLM-4), a text counts as a tool call only if
            it names one of these tools.
    """
    for pattern, read in TAGGED:
        calls, rest, end = [], "", 0
        for match, call in _find_calls(pattern, read, text, tools):
            calls.append(call)
            rest, end = rest + text[end : match.start()], match.end()
        if calls:
            return SECTION_TAGS.sub("", rest + text[end:]).strip(), calls
    for pattern, read in UNTAGGED:
        for _, call in _find_calls(pattern, read, text, tools):
            if any(call.name == _function_schema(tool).get("name") for tool in tools):
                return "", [call]
    return text, []


def _find_calls(
    pattern: re.Pattern[str], read: CallParser, text: str, tools: Tools
) -> Iterator[tuple[re.Match[str], ToolCall]]:
    for match in pattern.finditer(text):
        if (call := read(match, tools)) is not None:
            yield match, call


def _function_schema(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function", tool)  # some agents omit the outer object


def _parse_json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _parse_json_call(match: re.Match[str], tools: Tools) -> ToolCall | None:
    """Parse {"name": ..., "arguments": {...}}; Llama writes "parameters" instead of "arguments"."""
    call = _parse_json_object(match[1]) or {}
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json_object(arguments)
    name = call.get("name")
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _parse_name_and_json(match: re.Match[str], tools: Tools) -> ToolCall | None:
    arguments = _parse_json_object(match[2])
    return None if arguments is None else ToolCall(match[1].strip(), arguments)


def _parse_name_and_pairs(match: re.Match[str], tools: Tools) -> ToolCall:
    """Parse GLM-4.5's <arg_key>/<arg_value> pairs: values are JSON, except that strings have no quotes."""
    schemas = [_function_schema(tool) for tool in tools if _function_schema(tool).get("name") == match[1]]
    properties = ((schemas[0].get("parameters") or {}).get("properties") or {}) if schemas else {}
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", match[2], re.DOTALL):
        arguments[key] = value
        if (properties.get(key) or {}).get("type") != "string":
            try:
                arguments[key] = json.loads(value)
            except json.JSONDecodeError:
                continue  # not JSON: a string
    return ToolCall(match[1], arguments)


def _compile_call_format(pattern: str, read: CallParser) -> tuple[re.Pattern[str], CallParser]:
    return re.compile(pattern, re.DOTALL), read


TAGGED = (
    # Qwen, Hermes
    _compile_call_format(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", _parse_json_call),
    # GLM-4.5 to 4.7
    _compile_call_format(
        r"<tool_call>\s*([\w.-]+)\s*((?:<arg_key>.*?</arg_value>\s*)*)</tool_call>", _parse_name_and_pairs
    ),
    # Kimi K2
    _compile_call_format(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*(\{.*?\})\s*<\|tool_call_end\|>",
        _parse_name_and_json,
    ),
    # DeepSeek V3, then V3.1
    _compile_call_format(
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n(\{.*?\})\n```\s*<｜tool▁call▁end｜>",
        _parse_name_and_json,
    ),
    _compile_call_format(
        r"<｜tool▁call▁begin｜>([^\n<]+)<｜tool▁sep｜>\s*(\{.*?\})\s*<｜tool▁call▁end｜>", _parse_name_and_json
    ),
)
UNTAGGED = (
    # Llama 3
    _compile_call_format(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", _parse_json_call),
    # GLM-4
    _compile_call_format(r"\A\s*([\w.-]+)\n(\{.*\})\s*\Z", _parse_name_and_json),
)
SECTION_TAGS = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|<｜tool▁calls▁(?:begin|end)｜>")
