"""Bring the messages of a conversation (OpenAI's format) into the one form that chat templates get."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.stages.rollout.text.templates import Messages
from penstock.storage.errors import DataError

Message = dict[str, Any]

# Tags around thoughts of Qwen, DeepSeek, GLM and Kimi; Seed-OSS; Kimi-VL; Magistral.
THOUGHT_TAGS = re.compile(r"</?(?:seed:)?think(?:ing)?>|◁/?think▷|\[/?THINK\]")
# Forms in which templates expect tool calls: (whether arguments are JSON text instead of a dictionary; the content of a
# message that has only tool calls). DeepSeek V3 writes calls only if the content is null; GLM-4.5 writes null as text.
CallForm = tuple[bool, str | None]
CALL_FORMS: tuple[CallForm, ...] = ((False, ""), (False, None), (True, ""), (True, None))


def thought_end_tag(tag: str) -> str:
    """Return the tag that ends a thought which `tag` has begun."""
    return f"{tag[0]}/{tag[1:]}"


def normalize_messages(messages: Any) -> Messages:
    """Return messages whose content is text, or null beside tool calls. Text parts are joined, and null fields, which
    Parquet adds, are removed. Raises DataError."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{preview(messages)} has no messages: give a list of messages with role and content")
    result = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} is {preview(message)}: a message needs a role and content")
        fields = {key: value for key, value in message.items() if value is not None}
        calls = fields.pop("tool_calls", None) or []
        where = f"message {number} ({message['role']})"
        fields["content"] = _content_as_text(fields.get("content"), where, has_calls=bool(calls))
        if calls:
            fields["tool_calls"] = _normalize_calls(calls, where)
        result.append(fields)
    return result


def convert_tool_calls(messages: Messages, form: CallForm) -> Messages:
    """Return normalized messages with their tool calls in `form`, one of CALL_FORMS."""
    as_text, no_content = form
    return [
        {
            **message,
            "content": message["content"] or no_content,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": _convert_arguments(call["function"], as_text)}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _content_as_text(content: Any, where: str, *, has_calls: bool) -> str | None:
    if content is None or content == []:
        if has_calls:
            return None
        raise DataError(f'{where} has no content: add the text, or "" if the message is empty')
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(
        f"the content of {where} is {preview(content)}, but only text is supported: give text, or a list of parts "
        '{"type": "text", "text": ...}'
    )


def _normalize_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{preview(call)} in {where} is not a tool call: give a dictionary with a `function` that has a name"
            )
        fields = {key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")}
        function = {key: value for key, value in function.items() if value is not None}
        result.append({"type": "function", **fields, "function": function})
    return result


def _convert_arguments(function: dict[str, Any], as_text: bool) -> Any:
    """Return the arguments of a call as JSON text, or as the value of that text if it is JSON."""
    arguments = function.get("arguments") or {}
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def preview(value: Any) -> str:
    """Return the beginning of a value as JSON, for messages."""
    return json.dumps(value, default=str)[:80]
