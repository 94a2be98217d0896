"""The console of commands that print tables and colours with rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from penstock.flows.terminal.escape import escape_controls, unescaped


class TerminalConsole(Console):
    """A console that writes its own control codes, and escapes those in what is printed."""

    def __init__(self, *, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(file=unescaped(file or sys.stdout), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as a text: escaped before its width is measured."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of whatever is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    def out(self, *objects: Any, **options: Any) -> None:
        """Print objects as they are, but escaped."""
        super().out(*(escape_controls(str(each)) for each in objects), **options)
