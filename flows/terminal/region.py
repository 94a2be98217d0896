"""Lines at the bottom of a terminal that are redrawn in place, with other output above them.

The cursor stays visible, on the line below the region: a process that is killed leaves the terminal usable as it is.
"""

from __future__ import annotations

import atexit
import io
import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from penstock.flows.terminal.console import TerminalConsole
from penstock.flows.terminal.escape import escape_controls, unescaped

REFRESH_SECONDS = 0.25


class LiveRegion:
    """Redraws the lines that `render` returns every REFRESH_SECONDS seconds, in a thread. Thread-safe.

    While it is open, what this process writes to sys.stdout and sys.stderr appears above the region.

    Args:
        console: of the terminal.
        render: returns the lines for a width in columns and a height in rows.
    """

    def __init__(self, console: Console, render: Callable[[int, int], Sequence[Text]]) -> None:
        self.console = console
        self.render = render
        self._out = console.file
        self._drawn: list[int] = []  # cells of each line on the screen
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._streams: list[tuple[str, TextIO]] = []  # (name in sys, stream) to restore
        self._thread = threading.Thread(target=self._refresh_until_closed, name="terminal", daemon=True)

    def open(self) -> None:
        """Draw the region, and redraw it until `close`."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if unescaped(stream) is self._out or stream.isatty():
                self._streams.append((name, stream))
                setattr(sys, name, _LinesAbove(self, stream))
        atexit.register(self.close)
        self.refresh()
        self._thread.start()

    def close(self) -> None:
        """Erase the region and restore the streams. Safe to call twice."""
        atexit.unregister(self.close)
        self._closed.set()
        with self._lock:
            for name, stream in self._streams:
                proxy = getattr(sys, name)
                if isinstance(proxy, _LinesAbove):
                    proxy.finish()
                    setattr(sys, name, stream)
            self._streams = []
            self._write(self._erase())
            self._drawn = []

    def print(self, text: Text) -> None:
        """Print a text above the region."""
        self.write_above(self._paint([text], soft_wrap=True))

    def write_above(self, text: str) -> None:
        """Write whole lines above the region."""
        with self._lock:
            erase, self._drawn = self._erase(), []
            self._write(erase + text)
            if not self._closed.is_set():
                self.refresh()

    def refresh(self) -> None:
        """Draw the lines again."""
        with self._lock:
            width, height = self.console.size
            lines = list(self.render(width - 1, height - 1))[: max(height - 1, 0)]  # no line wraps; the cursor has one
            same_place = sum(self._rows(cells) for cells in self._drawn) == len(self._drawn)
            start = self._erase() if not same_place else f"\x1b[{len(self._drawn)}F" if self._drawn else "\r"
            for line in lines:
                line.truncate(width - 1, overflow="ellipsis")
            output = start + self._paint(lines).replace("\n", "\x1b[K\n") + "\x1b[J"
            self._drawn = [line.cell_len for line in lines]
            self._write(output)

    def _paint(self, lines: Sequence[Text], *, soft_wrap: bool = False) -> str:
        """Return lines with the control codes of their colours. A console of its own does it: if Ctrl-C interrupts it,
        nothing of it is printed later."""
        out = io.StringIO()
        colours: Any = self.console.color_system
        console = TerminalConsole(
            file=out,
            force_terminal=True,
            color_system=colours,
            no_color=self.console.no_color,
            width=self.console.width,
            highlight=False,
        )
        for line in lines:
            console.print(line, soft_wrap=soft_wrap, no_wrap=True, overflow="ignore" if soft_wrap else "crop")
        return out.getvalue()

    def _erase(self) -> str:
        """Return the control codes that erase the drawn lines. They take more rows if the terminal has become narrower
        since."""
        rows = sum(map(self._rows, self._drawn))
        return f"\x1b[{rows}F\x1b[J" if rows else "\r\x1b[J"

    def _rows(self, cells: int) -> int:
        return max(1, math.ceil(cells / max(self.console.width, 1)))

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # the terminal was closed
            self._closed.set()

    def _refresh_until_closed(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            with self._lock, suppress(RuntimeError):  # a dictionary grew while it was drawn: the next frame shows it
                if not self._closed.is_set():
                    self.refresh()


class _LinesAbove:
    """A text stream whose complete lines appear above a region. All else is that of the original stream."""

    def __init__(self, region: LiveRegion, stream: TextIO) -> None:
        self._region = region
        self._stream = stream
        self._rest = ""  # a line that is not complete yet

    def write(self, text: str) -> int:
        """Write the complete lines of a text."""
        with self._region._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                self._region.write_above("".join(f"{escape_controls(line)}\n" for line in lines))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def finish(self) -> None:
        """Write the line that is not complete."""
        if self._rest:
            self.write("\n")

    def flush(self) -> None:
        """Do nothing: complete lines are flushed at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def can_redraw(console: Console) -> bool:
    """Return whether a console is a terminal that can redraw lines: not a pipe, a file or TERM=dumb, also if
    FORCE_COLOR asks for colours."""
    return console.is_interactive and not console.is_dumb_terminal and bool(getattr(console.file, "isatty", bool)())
