"""Render chat templates with a time and memory limit: in a child process (template_process.py) that is killed when it exceeds them.

One child serves all templates and threads of this process. It starts with the first rendering and ends with this process.
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

from storage.errors import TemplateError

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]  # messages, tools, whether to add a generation prompt
_BATCH = 64  # chats per request: the child reads a request before it answers, so neither side waits for the other
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG")  # no credentials near untrusted code


class RenderLimitError(TemplateError):
    """A template exceeded its time, memory or output limit, so rendering the same conversation in another form is not tried."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits for one conversation."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 120.0  # for a child that is stopped or swapped out
    memory_bytes: int = 1 << 30
    max_chars: int = 1 << 24


class TemplateRenderer:
    """A child process that renders templates; thread-safe.

    Args:
        limits: for each conversation.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that has started the child: a fork must not share its pipes
        self._unread = bytearray()

    def render(
        self, template: str, chats: Sequence[Chat], options: dict[str, Any] | None = None, mark: str = ""
    ) -> list[str | TemplateError]:
        """Return the text of every conversation, or the error that it ended with.

        Args:
            template: Jinja source.
            chats: conversations; messages and tools are JSON values.
            options: further variables of the template.
            mark: text around what `{% generation %}` blocks write.
        """
        results: list[str | TemplateError] = []
        with self._lock:
            while len(results) < len(chats):
                batch = chats[len(results) : len(results) + _BATCH]
                request = {"template": template, "options": options or {}, "mark": mark, "chats": batch}
                results += self._answers(json.dumps(request, default=str).encode() + b"\n", len(batch))
        return results

    def close(self) -> None:
        """End the child; the next rendering starts another one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()  # closes its pipes too

    def _answers(self, request: bytes, count: int) -> list[str | TemplateError]:
        """Return the answers to a request, up to the one that ended the child."""
        process = self._running()
        results: list[str | TemplateError] = []
        try:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            while len(results) < count:
                answer = json.loads(self._line(process))
                error = RenderLimitError if answer.get("limit") else TemplateError
                results.append(answer["text"] if "text" in answer else error(answer["error"]))
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            results.append(self._ended(process, error))
        except BaseException:  # an interrupt: answers that nobody has read would be taken for those of the next request
            self.close()
            raise
        return results

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
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

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            limits, path = self.limits, os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            arguments = (limits.cpu_seconds, limits.memory_bytes, limits.max_chars)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stages.rollout.template_process", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": path},
            )
            self._owner, self._unread = os.getpid(), bytearray()
        return self._process

    def _ended(self, process: subprocess.Popen[bytes], error: Exception) -> TemplateError:
        """Return why the child gave no answer; the next request starts another one."""
        self.close()
        code = process.returncode
        if isinstance(error, TimeoutError):
            return RenderLimitError(f"it takes more than {self.limits.wall_seconds:g} s")
        if code == -signal.SIGPROF:
            return RenderLimitError(f"it takes more than {self.limits.cpu_seconds:g} s of processor time")
        return RenderLimitError(f"its process ended with exit code {code}")


RENDERER = TemplateRenderer()
