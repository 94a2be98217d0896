"""Render chat templates with time and memory limits, in a child process that is killed when it exceeds a limit, because
a template is untrusted code that comes with a checkpoint.

One child process (stages/worker_process.py) renders all templates for all threads of this process. It starts at the
first rendering and exits with this process. If rendering a chat takes more than `RenderLimits.cpu_seconds`, SIGPROF
kills it. The child process imports this module, which needs only Jinja and the standard library, so it starts in 0.2 s.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.stages.worker_process import WorkerLost, WorkerProcess
from penstock.storage.errors import DataError, TemplateError

Message = dict[str, Any]
Messages = list[Message]  # messages of a conversation, in OpenAI's format
Chat = tuple[Messages, list[dict[str, Any]] | None, bool]  # messages, tools, whether to add a generation prompt
_MAX_UNREAD = 256  # chats that are sent to the child before their results are read


class RenderLimitError(TemplateError):
    """Raised if rendering a chat template exceeds the time, memory or output limit."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits for rendering one conversation with a chat template."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 120.0  # wall-clock time, for the case that the child process is stopped or swapped out
    memory_bytes: int = 1 << 30
    max_chars: int = 1 << 24


class TemplateRenderer:
    """Renders chat templates in a child process. Thread-safe."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._worker: tuple[int, WorkerProcess] | None = None  # (id of the process that started the worker, worker)

    def render(
        self, template: str, chats: Sequence[Chat], options: dict[str, Any] | None = None, mark: str = ""
    ) -> list[str | TemplateError]:
        """Render conversations (JSON-serializable); return the text of each, or the error that rendering it raised.
        `mark` is written before and after every `{% generation %}` block."""
        # All chats get the same current time, because callers compare the rendered texts.
        head = json.dumps(
            {"template": template, "options": options or {}, "mark": mark, "now": time.time()}, default=str
        )
        results: list[str | TemplateError] = []
        for start in range(0, len(chats), _MAX_UNREAD):
            with self._lock:  # a forked process must start its own child
                if self._worker is None or self._worker[0] != os.getpid():
                    self._worker = os.getpid(), WorkerProcess(prepare_rendering, self.limits, is_sandboxed=True).start()
                started = self._worker
            jobs = [
                started[1].submit((head, json.dumps(chat, default=str)), self.limits.wall_seconds)
                for chat in chats[start : start + _MAX_UNREAD]
            ]
            for job in jobs:
                try:
                    answer = job.result()
                except WorkerLost as lost:
                    if lost.limit is not None:
                        problem = f"rendering takes more than {lost.limit:g} s"
                    elif lost.exit_code == -signal.SIGPROF:
                        problem = f"rendering takes more than {self.limits.cpu_seconds:g} s of CPU time"
                    else:
                        problem = f"the rendering process died with exit code {lost.exit_code}"
                    results.append(RenderLimitError(problem))
                    if lost.is_loading and self._worker is started:
                        self.close()
                else:
                    error = RenderLimitError if answer.get("limit") else TemplateError
                    results.append(answer["text"] if "text" in answer else error(answer["error"]))
        return results

    def close(self) -> None:
        """Kill the child process; the next rendering starts a new child."""
        with self._lock:
            started, self._worker = self._worker, None
        if started is not None and started[0] == os.getpid():
            started[1].close()


RENDERER = TemplateRenderer()


# ---- in the child process --------------------------------------------------------------------------------------------


class GenerationBlocks(Extension):
    """Jinja extension for `{% generation %} ... {% endgeneration %}`, a block around text that the model generates:
    writes the environment's `mark` before and after the block."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a generation block into a call of `_surround_with_mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_surround_with_mark"), [], [], body).set_lineno(line)

    def _surround_with_mark(self, caller: Callable[[], str]) -> str:
        mark = self.environment.globals["mark"]
        return f"{mark}{caller()}{mark}"


def raise_exception(message: str) -> None:
    """Raise an error. Templates call this function to reject a conversation."""
    raise JinjaError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. Replaces Jinja's filter of this name, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def prepare_rendering(limits: RenderLimits) -> Callable[[tuple[str, str]], dict[str, Any]]:
    """Limit the resources of this process, and return the function that renders one chat with the blocks, filters and
    functions that transformers offers to chat templates.

    The function gets two JSON texts, {"template", "options", "mark", "now"} and a Chat, and returns {"text"}, {"error"}
    or {"error", "limit": True} (a limit was exceeded).
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    compile_template: Callable[[str], Template] = functools.lru_cache(maxsize=16)(environment.from_string)
    parse_head: Callable[[str], dict[str, Any]] = functools.lru_cache(maxsize=1)(json.loads)

    def render(job: tuple[str, str]) -> dict[str, Any]:
        head, (messages, tools, add_generation_prompt) = parse_head(job[0]), json.loads(job[1])
        environment.globals |= {
            "raise_exception": raise_exception,
            "mark": head["mark"],
            "strftime_now": datetime.fromtimestamp(head["now"]).strftime,
        }
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        try:
            text = compile_template(head["template"]).render({**head["options"], **variables})
            if len(text) <= limits.max_chars:
                return {"text": text}
            problem = f"the template writes {len(text):,} characters; the limit is {limits.max_chars:,}"
            return {"error": problem, "limit": True}
        except MemoryError:
            return {"error": "rendering exceeds the memory limit of the rendering process", "limit": True}
        except Exception as error:  # a template may raise anything
            name = "" if type(error) is JinjaError else f"{type(error).__name__}: "
            return {"error": f"{name}{' '.join(str(error).split())[:200]}" or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return render


# ---- messages --------------------------------------------------------------------------------------------------------


# Tags around thoughts of Qwen, DeepSeek, GLM and Kimi; Seed-OSS; Kimi-VL; Magistral.
THOUGHT_TAGS = re.compile(r"</?(?:seed:)?think(?:ing)?>|◁/?think▷|\[/?THINK\]")
# Forms in which templates expect tool calls: (whether arguments are JSON text instead of a dictionary; the content of a
# message that has only tool calls). DeepSeek V3 writes calls only if the content is null; GLM-4.5 writes null as text.
CallForm = tuple[bool, str | None]
CALL_FORMS: tuple[CallForm, ...] = ((False, ""), (False, None), (True, ""), (True, None))


IMAGE_KEYS = ("image", "image_url", "bytes", "path", "url")  # keys of an image part that may hold the image


def normalize_messages(messages: Any, images: list[Any] | None = None, *, keeps_places: bool = False) -> Messages:
    """Return messages whose content is text, or null if they have tool calls, or, if they have images, a list of parts
    `{"type": "text", "text": ...}` and `{"type": "image"}`. Text parts are joined, and null fields, which Parquet adds,
    are removed. The image of every image part is appended to `images`, or None if the part has none; without `images`,
    image parts are refused, but with `keeps_places` parts without an image are kept. Raises DataError."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{preview(messages)} has no messages: give a list of messages with role and content")
    result = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} is {preview(message)}: a message needs a role and content")
        fields = {key: value for key, value in message.items() if value is not None}
        calls = fields.pop("tool_calls", None) or []
        where = f"message {number} ({message['role']})"
        content = None if fields.get("content") == [] else fields.get("content")
        fields["content"] = None if content is None else _normalize_content(content, where, images, keeps_places)
        problem = None
        if content is None and not calls:
            problem = 'has no content: add the text, or "" if the message is empty'
        elif isinstance(fields["content"], list) and message["role"] == "assistant":
            problem = "has an image, but a model generates only text: remove the image"
        if problem is not None:
            raise DataError(f"{where} {problem}")
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


def _normalize_content(
    content: Any, where: str, images: list[Any] | None, keeps_places: bool
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [None]:
        part = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
        is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
        if is_text and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        elif is_text:
            parts.append({"type": "text", "text": part["text"]})
        elif keeps_places and part == {"type": "image"}:
            parts.append(part)
        elif part.get("type") in ("image", "image_url") and images is not None:
            parts.append({"type": "image"})
            images.append(next((part[key] for key in IMAGE_KEYS if key in part), None))
        else:
            raise DataError(
                f"the content of {where} is {preview(content)}, but only text "
                f"{'is' if images is None else 'and images are'} supported: give text, or a list of parts "
                '{"type": "text", "text": ...}'
            )
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


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
    """Return the arguments of a call as JSON text if `as_text`, otherwise as a dictionary; text that is not JSON is
    unchanged."""
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
