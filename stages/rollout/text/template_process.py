"""Render chat templates in a separate process, because a template is untrusted code that comes with a checkpoint.

The parent (templates.py) starts this module as `python -m penstock.stages.rollout.text.template_process CPU_SECONDS
MEMORY_BYTES MAX_CHARS`. Each line of standard input is a request in JSON, `{"template", "options", "mark", "chats":
[[messages, tools, add_generation_prompt], ...]}`; each chat is answered by one line, `{"text"}`, `{"error"}` or
`{"error", "limit": true}` (a limit was exceeded). If a chat takes more than CPU_SECONDS of CPU time, SIGPROF kills the
process. Only Jinja and the standard library are imported, so the process starts in a tenth of a second.
"""

from __future__ import annotations

import functools
import json
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
    """Implement `{% generation %} ... {% endgeneration %}`, a block around the text that the model generates: the
    environment's `mark` is written before and after the block."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        mark = self.environment.globals["mark"]
        return f"{mark}{caller()}{mark}"


def raise_exception(message: str) -> None:
    """Raise TemplateError. Templates call this function to reject a conversation."""
    raise TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. It replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the blocks, filters and functions that chat templates have in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "mark": ""}
    return environment


ENVIRONMENT = make_environment()


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """Return a compiled template. Raises TemplateError for a syntax error."""
    return ENVIRONMENT.from_string(source)


def render(request: dict[str, Any], messages: Any, tools: Any, add_generation_prompt: bool, max_chars: int) -> bytes:
    """Render one chat; return the answer as JSON."""
    variables = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = compiled(request["template"]).render({**request["options"], **variables})
        if len(text) <= max_chars:
            return json.dumps({"text": text}).encode()
        answer = {"error": f"it writes {len(text):,} characters, more than the limit of {max_chars:,}", "limit": True}
    except MemoryError:
        answer = {"error": "it needs more memory than the limit of the rendering process", "limit": True}
    except Exception as error:  # a template may raise anything
        name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        answer = {"error": f"{name}{' '.join(str(error).split())[:200]}" or type(error).__name__}
    return json.dumps(answer).encode()


def main(cpu_seconds: float, memory: int, max_chars: int) -> None:
    """Answer requests until standard input is closed."""
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
            answer = render(request, messages, tools, add_generation_prompt, max_chars)
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(answer + b"\n")
            out.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
