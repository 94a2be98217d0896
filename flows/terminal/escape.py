"""Escape control characters in everything that a command prints to the terminal.

Samples, names and errors may contain text from a model or a data set. A terminal obeys the control sequences in such
text: they can set the title, clear the screen, hide text, or show a link whose text hides its target. This module
imports only the standard library, because `penstock setup` runs before anything is installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any

# The control characters C0 (except tab and newline) and C1, invisible format characters (such as bidirectional controls
# and tags, but not the joiners that emoji and some scripts need), line separators, and halves of surrogate pairs, which
# no encoding can print.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff"
    "\\ufeff\\ufff9-\\ufffb\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0000-\\U000e0fff]"
)


def escape_controls(text: str) -> str:
    r"""Return the text with control characters as JSON escapes (`\u001b`), so that printed JSON keeps its meaning."""
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


class StreamProxy:
    """Base of text streams that replace `write` and delegate everything else to the original stream."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _EscapingStream(StreamProxy):
    """A text stream that escapes what is written."""

    @property
    def unescaped(self) -> IO[str]:
        return self._stream

    def write(self, text: str) -> int:
        self._stream.write(escape_controls(text))
        return len(text)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what this process prints during the block."""
    out: Any = _EscapingStream(sys.stdout)
    err: Any = _EscapingStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def unescaped(stream: IO[str]) -> IO[str]:
    """Return the stream below an escaping stream, to which Penstock writes its own control codes. Any other stream is
    returned unchanged."""
    original: IO[str] = getattr(stream, "unescaped", stream)
    return original
