"""Parse tool calls from a model's reply; tries the formats of all common chat models.

A tool call inside a thought is a draft and is not parsed. A tool call that cannot be parsed (invalid JSON, a truncated
call) stays in the text of the reply, which the agent sees. Generation is not constrained by a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stages.rollout.text.templates import THOUGHT_TAGS

# Tool definitions in OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A parsed tool call: the function's name and its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Pairs:
    """A format of arguments with tags around the key and the value of each argument."""

    begin: re.Pattern[str]  # tags up to the value; group 1 is the key
    end: str  # tag that ends a value
    following: re.Pattern[str]  # matches what follows the tag that ends a value
    closing: re.Pattern[str]  # tags that end the call


FoundCalls = tuple[list[ToolCall], int] | None  # the calls at a position and where they end; None: no call


def parse_tool_calls(text: str, tools: Tools, *, in_thought: bool = False) -> tuple[str, list[ToolCall]]:
    """Return the text of a reply without its tool calls, and the parsed tool calls in order. In formats without closing
    tags (Llama, GLM-4), a text counts as a tool call only if it names one of `tools`. `in_thought`: the reply continues
    a thought that the prompt has opened."""
    calls: list[ToolCall] = []
    rest, end, position = "", 0, 0  # the text without calls up to `end`
    answers = [] if in_thought else [0]  # positions where text outside of a thought begins
    wanted = THOUGHT_TAGS if in_thought else _MARKERS
    while match := wanted.search(text, position):
        position = match.end()
        if read := _READERS.get(match[0]):
            if found := read(text, position, tools):
                rest, (new_calls, position) = rest + text[end : match.start()], found
                calls, end = calls + new_calls, position
        elif "/" not in match[0]:
            wanted = re.compile(re.escape(f"{match[0][0]}/{match[0][1:]}"))  # the tag that ends this thought
        else:
            if wanted is _MARKERS:  # the prompt has opened this thought, so that all calls so far belong to it
                calls, rest, end = [], "", 0
            wanted = _MARKERS
            answers.append(position)
    for start in [*answers[:2], *answers[2:][-1:]]:  # at most 3, because a model may repeat a tag many times
        if found := _read_untagged(text, start, tools):
            return text[:start].strip(), found[0]
    return ((rest + text[end:]).strip(), calls) if calls else (text, [])


def _make_call(name: Any, arguments: Any) -> ToolCall | None:
    """Return a tool call, or None if its name or arguments are invalid. Null and empty text are valid arguments of a
    function without arguments."""
    if isinstance(arguments, str) and (parsed := _read_json(arguments, 0)) and not arguments[parsed[1] :].strip():
        arguments = parsed[0]
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    valid = isinstance(name, str) and name.strip() and isinstance(arguments, dict)
    return ToolCall(name.strip(), arguments) if valid else None


def _read_json(text: str, position: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins at a position of a text, after white space, and its end."""
    if (start := _JSON_START.match(text, position)) is None:
        return None
    try:
        return _JSON.raw_decode(text, start.end())
    except (ValueError, RecursionError):
        return None


def _read_json_calls(text: str, position: int) -> FoundCalls:
    """Read {"name": ..., "arguments": {...}}, or a list of these; Llama writes "parameters" instead of "arguments"."""
    value, end = _read_json(text, position) or (None, position)
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        function = _function_of(entry) if isinstance(entry, dict) else {}
        if not (call := _make_call(function.get("name"), function.get("arguments", function.get("parameters")))):
            return None
        calls.append(call)
    return (calls, end) if calls else None


def _read_arguments(text: str, position: int, name: str, end: re.Pattern[str]) -> FoundCalls:
    """Read a JSON object, or nothing, up to `end`: the arguments of the function `name`."""
    value, position = _read_json(text, position) or (None, position)
    call, closing = _make_call(name, value), end.match(text, position)
    return ([call], closing.end()) if call and closing else None


def _read_pairs(text: str, position: int, tools: Tools, name: str, pairs: _Pairs) -> FoundCalls:
    """Read the arguments of the function `name` from pairs of tags. Values are JSON, except that strings have no
    quotes; the schemas in `tools` tell which values are strings."""
    functions = [_function_of(tool) for tool in tools]
    schemas = [function.get("parameters") or {} for function in functions if function.get("name") == name]
    properties = (schemas[0].get("properties") or {}) if schemas else {}
    arguments: dict[str, Any] = {}
    while match := pairs.begin.match(text, position):
        end = text.find(pairs.end, match.end())
        while end >= 0 and not pairs.following.match(text, end + len(pairs.end)):  # the value contains the tag
            end = text.find(pairs.end, end + 1)
        if end < 0:
            return None
        value, position = text[match.end() : end], end + len(pairs.end)
        if match[0].endswith("\n"):
            value = value.removesuffix("\n")
        arguments[match[1]] = value
        if not _takes_text(properties.get(match[1]) or {}):
            parsed = _read_json(value, 0)
            if value in _PYTHON_VALUES:  # Qwen3-Coder's template writes Python's names
                arguments[match[1]] = _PYTHON_VALUES[value]
            elif parsed and not value[parsed[1] :].strip():
                arguments[match[1]] = parsed[0]
    closing = pairs.closing.match(text, position)
    return ([ToolCall(name, arguments)], closing.end()) if closing else None


def _takes_text(schema: dict[str, Any]) -> bool:
    """Return whether a value of this JSON schema may be a string."""
    options = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    types = schema.get("type")
    return "string" in ([types] if isinstance(types, str) else types or ()) or any(map(_takes_text, options))


def _function_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `function` of a tool definition or tool call. Some agents and models send only this entry."""
    function = entry.get("function", entry)
    return function if isinstance(function, dict) else entry


# ---- formats: each function gets the position after the tag that begins a call --------------------------------------


def _read_tool_call(text: str, position: int, tools: Tools) -> FoundCalls:
    if match := _FUNCTION.match(text, position):
        return _read_pairs(text, match.end(), tools, match[1].strip(), _QWEN_CODER)
    if match := _GLM_NAME.match(text, position):
        return _read_pairs(text, match.end(), tools, match[1], _GLM)
    calls, position = _read_json_calls(text, position) or ([], position)  # Qwen, Hermes
    end = _TOOL_CALL_END.match(text, position)
    return (calls, end.end()) if calls and end else None


def _read_function(text: str, position: int, tools: Tools) -> FoundCalls:
    """Read a call of Qwen3-Coder that lacks <tool_call>, or of Llama 3.1, whose arguments are JSON."""
    if (match := _FUNCTION_NAME.match(text, position)) is None:
        return None
    json_call = _read_arguments(text, match.end(), match[1].strip(), _QWEN_CODER.closing)
    return json_call or _read_pairs(text, match.end(), tools, match[1].strip(), _QWEN_CODER)


def _read_name_and_json(text: str, position: int, tools: Tools) -> FoundCalls:
    """Read a call of Kimi or DeepSeek."""
    if match := _KIMI_NAME.match(text, position):
        return _read_arguments(text, match.end(), match[1], _KIMI_END)
    match = _DEEPSEEK_NAME.match(text, position)
    return _read_arguments(text, match.end(), match[1] or match[2], _DEEPSEEK_END) if match else None


def _read_llama(text: str, position: int, tools: Tools) -> FoundCalls:
    """Read JSON objects that are separated by semicolons or white space; each must name a tool."""
    names = {_function_of(tool).get("name") for tool in tools}
    calls: list[ToolCall] = []
    while (found := _read_json_calls(text, position)) and all(call.name in names for call in found[0]):
        calls += found[0]
        separator = _SEPARATOR.match(text, found[1])
        position = separator.end() if separator else found[1]
    return (calls, position) if calls else None


def _read_untagged(text: str, position: int, tools: Tools) -> FoundCalls:
    """Read the calls of Llama 3 or GLM-4, without any tag, if they are the whole text from `position` on."""
    if match := _GLM4_NAME.match(text, position):
        found = _read_arguments(text, match.end(), match[1], _TEXT_END)
        return found if found and any(_function_of(tool).get("name") == match[1] for tool in tools) else None
    found = _read_llama(text, position, tools)
    return found if found and not text[found[1] :].strip() else None


_READERS: dict[str, Callable[[str, int, Tools], FoundCalls]] = {
    "<tool_call>": _read_tool_call,
    "<function=": _read_function,
    "<|tool_call_begin|>": _read_name_and_json,
    "<｜tool▁call▁begin｜>": _read_name_and_json,
    "<|python_tag|>": _read_llama,
    **dict.fromkeys(
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        lambda text, position, tools: ([], position),  # tags around all calls
    ),
}
_MARKERS = re.compile("|".join([THOUGHT_TAGS.pattern, *map(re.escape, _READERS)]))
_JSON = json.JSONDecoder(strict=False)  # models write raw newlines in strings
_PYTHON_VALUES = {"True": True, "False": False, "None": None}
_JSON_START, _SEPARATOR, _TEXT_END = (
    re.compile(r"\s*(?=[^\s<])"),
    re.compile(r"(?:[\s;]|<\|python_tag\|>)*"),
    re.compile(r"\s*\Z"),
)
_TOOL_CALL_END = re.compile(r"\s*</tool_call>")
_FUNCTION_NAME = re.compile(r"([^>\n]{1,256})>")
_FUNCTION = re.compile(r"\s*<function=" + _FUNCTION_NAME.pattern)
_QWEN_CODER = _Pairs(
    re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?"),
    "</parameter>",
    re.compile(r"\s*(?:<parameter=|</function>)"),
    re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
)
_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)")  # 4.5 to 4.7
_GLM = _Pairs(
    re.compile(r"\s*<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"\s*(?:<arg_key>|</tool_call>)"),
    _TOOL_CALL_END,
)
_GLM4_NAME = re.compile(r"\s*([\w.-]+)\n\s*(?=\{)")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>")
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")
_DEEPSEEK_NAME = re.compile(
    r"\s*(?:function<｜tool▁sep｜>([^\n<]{1,256})\n```json|([^\n<]{1,256})<｜tool▁sep｜>)"
)  # V3, V3.1
_DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>")
