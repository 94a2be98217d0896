"""Render chat templates in a separate process, because a template is untrusted code that comes with a checkpoint.

The parent (templates.py) starts this module as `python -m penstock.stages.rollout.text.template_process CPU_SECONDS
MEMORY_BYTES MAX_CHARS`. Each line of standard input is a request in JSON, `{"template", "options", "mark", "chats":
[[messages, tools, add_generation_prompt], ...]}`; each chat is answered by one line, `{"text"}`, `{"error"}` or
`{"error", "limit": true}` (a limit was exceeded). If rendering a chat takes more than CPU_SECONDS of CPU time, SIGPROF
kills the process. Only Jinja and the standard library are imported, so the process starts in 0.1 s.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
    """Raise TemplateError. Templates call this function to reject a conversation."""
    raise TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. Replaces Jinja's filter of this name, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment with the blocks, filters and functions that transformers offers to chat
    templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "mark": ""}
    return environment


ENVIRONMENT = make_environment()


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> Template:
    """Compile a Jinja template from its source. Raises TemplateError for a syntax error."""
    return ENVIRONMENT.from_string(source)


def render_chat(
    request: dict[str, Any], messages: Any, tools: Any, add_generation_prompt: bool, max_chars: int
) -> bytes:
    """Render one chat; return its text, or the error, as a JSON line for the parent process."""
    variables = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = compile_template(request["template"]).render({**request["options"], **variables})
        if len(text) <= max_chars:
            return json.dumps({"text": text}).encode()
        answer = {"error": f"the template writes {len(text):,} characters; the limit is {max_chars:,}", "limit": True}
    except MemoryError:
        answer = {"error": "rendering exceeds the memory limit of the rendering process", "limit": True}
    except Exception as error:  # a template may raise anything
        name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        answer = {"error": f"{name}{' '.join(str(error).split())[:200]}" or type(error).__name__}
    return json.dumps(answer).encode()


def main(cpu_seconds: float, memory: int, max_chars: int) -> None:
    """Answer rendering requests from standard input until it is closed. Limits: `cpu_seconds` and
    `max_chars` of output for each chat, `memory` in bytes for this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        now = datetime.now()  # the same time for all chats of a request, because their texts are compared
        ENVIRONMENT.globals |= {"mark": request["mark"], "strftime_now": now.strftime}
        for messages, tools, add_generation_prompt in request["chats"]:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = render_chat(request, messages, tools, add_generation_prompt, max_chars)
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(answer + b"\n")
            out.flush()


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except BrokenPipeError:  # the parent has ended
        os._exit(0)
