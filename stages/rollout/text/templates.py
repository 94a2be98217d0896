"""Render chat templates with time and memory limits, in a child process (template_process.py) that is killed when it
exceeds a limit.

One child process renders all templates for all threads of this process. The child starts at the first rendering and
exits with this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.storage.errors import TemplateError

Messages = list[dict[str, Any]]  # messages of a conversation, in OpenAI's format
Chat = tuple[Messages, list[dict[str, Any]] | None, bool]  # messages, tools, whether to add a generation prompt
_BATCH = 64  # chats per request; the child reads the whole request before it answers, so the pipes never deadlock
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG")  # passed to the child: no credentials


class RenderLimitError(TemplateError):
    """Raised if rendering a chat template exceeds the time, memory or output limit."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits for rendering one conversation with a chat template."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 120.0  # in case the child process is stopped or swapped out
    memory_bytes: int = 1 << 30
    max_chars: int = 1 << 24


class TemplateRenderer:
    """Renders chat templates in a child process. Thread-safe.

    Args:
        limits: limits for rendering one conversation.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started the child; a forked process must start its own child
        self._unread = bytearray()

    def render(
        self, template: str, chats: Sequence[Chat], options: dict[str, Any] | None = None, mark: str = ""
    ) -> list[str | TemplateError]:
        """Render conversations; return the text of every conversation, or the error that rendering it raised.

        Args:
            template: Jinja source of the chat template.
            chats: conversations; messages and tools must be JSON-serializable.
            options: additional variables of the template.
            mark: text that is written before and after every `{% generation %}` block.
        """
        results: list[str | TemplateError] = []
        with self._lock:
            while len(results) < len(chats):
                batch = chats[len(results) : len(results) + _BATCH]
                request = {"template": template, "options": options or {}, "mark": mark, "chats": batch}
                results += self._send_request(json.dumps(request, default=str).encode() + b"\n", len(batch))
        return results

    def close(self) -> None:
        """Kill the child process; the next rendering starts a new child."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()  # closes its pipes too

    def _send_request(self, request: bytes, count: int) -> list[str | TemplateError]:
        """Send a request to the child; return one result per chat. If the child dies, the last result is the error of
        the chat that it was rendering, and the results of later chats are missing."""
        process = self._ensure_child()
        results: list[str | TemplateError] = []
        try:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            while len(results) < count:
                answer = json.loads(self._read_line(process))
                error = RenderLimitError if answer.get("limit") else TemplateError
                results.append(answer["text"] if "text" in answer else error(answer["error"]))
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            results.append(self._close_child_and_explain(process, error))
        except (
            BaseException
        ):  # KeyboardInterrupt, for example: the next request must not read the remaining answers to this request
            self.close()
            raise
        return results

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        poll, descriptor = select.poll(), process.stdout.fileno()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self.limits.wall_seconds
        while (end := self._unread.find(b"\n")) < 0:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise EOFError
            self._unread += piece
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            limits, path = self.limits, os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            arguments = (limits.cpu_seconds, limits.memory_bytes, limits.max_chars)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.stages.rollout.text.template_process", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": path},
            )
            self._owner, self._unread = os.getpid(), bytearray()
        return self._process

    def _close_child_and_explain(self, process: subprocess.Popen[bytes], error: Exception) -> TemplateError:
        """Close a child that died or hangs, and return the reason as an error; the next request starts a new child."""
        self.close()
        code = process.returncode
        if isinstance(error, TimeoutError):
            return RenderLimitError(f"rendering takes more than {self.limits.wall_seconds:g} s")
        if code == -signal.SIGPROF:
            return RenderLimitError(f"rendering takes more than {self.limits.cpu_seconds:g} s of CPU time")
        return RenderLimitError(f"the rendering process died with exit code {code}")


RENDERER = TemplateRenderer()
