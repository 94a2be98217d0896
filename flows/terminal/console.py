"""The console of commands that print tables and colours with rich, the region at the bottom of a terminal that is
redrawn in place, and the lines that a log has instead of it."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.flows.terminal.escape import StreamProxy, escape_controls, unescaped

REMINDER_SECONDS = 30.0


class TerminalConsole(Console):
    """A console that escapes control characters in printed texts, but not the control codes that rich itself adds."""

    def __init__(self, *, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(file=unescaped(file or sys.stdout), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as rich text. It is escaped first, because an escaped character is wider."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed, escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    def out(self, *objects: Any, **options: Any) -> None:
        """Print objects without markup or highlighting, escaped."""
        super().out(*(escape_controls(str(each)) for each in objects), **options)

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor visible: a killed process could not show it again."""
        return False


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = False, width: int = 160
) -> None:
    """Print a table to standard output. If that is not a terminal, the table is at most `width` characters wide. With
    `numeric` all columns but the first are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if numeric and index else "left")
    for row in rows:
        table.add_row(*row)
    wide_console(width).print(table)


def wide_console(width: int = 160) -> TerminalConsole:
    """Return a console without highlighting, `width` columns wide if the output is not a terminal."""
    console = TerminalConsole(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def can_redraw(console: Console) -> bool:
    """Return whether a console is a terminal that can redraw lines. It cannot if it is a pipe or a file (even with
    FORCE_COLOR) or has TERM=dumb."""
    return console.is_interactive and not console.is_dumb_terminal and bool(getattr(console.file, "isatty", bool)())


class LiveRegion(Live):
    """Lines at the bottom of a terminal that are redrawn four times a second. Thread-safe.

    While the region is open, what this process writes to sys.stdout and sys.stderr appears above it. The cursor stays
    on the line below the region, so a killed process leaves a usable terminal.
    """

    def __init__(self, console: Console, render: Callable[[int, int], Sequence[Text]]) -> None:
        self._render = render
        self._frame = Group()
        self._terminal = console.file
        self._replaced: dict[str, Any] = {}  # "stdout", "stderr" -> stream that `stop` restores
        super().__init__(
            console=console, transient=True, redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop"
        )

    def get_renderable(self) -> RenderableType:
        """Return the lines of the region for the present size of the terminal."""
        width, height = self.console.size
        with suppress(RuntimeError):  # another thread changed a dictionary while it was drawn: show the previous frame
            lines = list(self._render(width - 1, height - 1))[: max(height - 1, 0)]  # no line wraps
            for line in lines:
                line.truncate(width - 1, overflow="ellipsis")
            self._frame = Group(*lines, Text())  # the cursor is on the empty line
        return self._frame

    def start(self, refresh: bool = True) -> None:
        """Draw the region, and redraw it until `stop`."""
        lasting: Any = _LastingStream(self._terminal)
        self.console.file = lasting
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self._replaced[name] = stream
                setattr(sys, name, _LinesAbove(self, stream))
        atexit.register(self.stop)
        super().start(refresh=refresh)

    def stop(self) -> None:
        """Erase the region and restore the streams. Safe to call twice."""
        atexit.unregister(self.stop)
        for name, stream in self._replaced.items():
            if isinstance(proxy := getattr(sys, name), _LinesAbove):
                if proxy._rest:
                    proxy.write("\n")
                setattr(sys, name, stream)
        self._replaced = {}
        super().stop()
        self.console.file = self._terminal

    def print(self, text: Text) -> None:
        """Print a text above the region."""
        with self._lock:  # two threads that print at the same time would both erase the region, and lines above it
            self.console.print(text, soft_wrap=True)


class WaitReminder:
    """Prints what a command waits for again every 30 s, until `stop`: `still converting tiny, 1 min 30 s`. Used where
    nothing can be redrawn, in a pipe or a log. A thread, which `ended` ends, calls `print_line`; `current` returns what
    the command waits for and since when by `clock`, or None.
    """

    def __init__(
        self,
        current: Callable[[], tuple[str, float] | None],
        print_line: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        ended: threading.Event | None = None,
    ) -> None:
        self._current, self._print_line, self._clock = current, print_line, clock
        self._ended = ended or threading.Event()
        self.thread = threading.Thread(target=self._remind, name="wait-reminder", daemon=True)

    def start(self) -> Self:
        """Start the thread, and return this object."""
        self.thread.start()
        return self

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def _remind(self) -> None:
        since, due = float("-inf"), self._clock()
        while not self._ended.wait(max(0.0, due - self._clock())):
            text, begin = self._current() or ("", self._clock())
            now = max(due, self._clock())
            if text and begin == since:
                minutes, seconds = divmod(round(now - since), 60)
                self._print_line(f"still {text}, {f'{minutes} min ' if minutes else ''}{seconds} s")
            since, due = begin, begin + REMINDER_SECONDS * ((now - begin) // REMINDER_SECONDS + 1)


class _LinesAbove(StreamProxy):
    """A text stream whose complete lines appear above a `LiveRegion`."""

    def __init__(self, region: LiveRegion, stream: IO[str]) -> None:
        super().__init__(stream)
        self._region = region
        self._rest = ""  # a line that is not complete yet

    def write(self, text: str) -> int:
        """Write the complete lines of a text."""
        with self._region._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                self._region.print(Text("\n".join(lines)))
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are flushed at once."""


class _LastingStream(StreamProxy):
    """The stream of a terminal that may be closed during a run. Output after that is discarded."""

    def write(self, text: str) -> int:
        """Write a text and flush it."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` has flushed."""
