"""Record what a command shows on a terminal: as an asciicast, and as an SVG picture that a browser animates.

    python benchmarks/record_terminal.py demo.cast demo.svg -- penstock demo --fresh
    python benchmarks/record_terminal.py demo.cast demo.svg                    # again from the asciicast

The terminal emulator supports only the control codes that Penstock writes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

Style = tuple[str, bool, bool, bool, bool]  # colour, bold, dim, underlined, reversed
PLAIN: Style = ("", False, False, False, False)
COLOURS = dict(zip(range(31, 37), ("#e06c75", "#8cc265", "#d4a656", "#61afef", "#c678dd", "#56b6c2"), strict=True))
BACKGROUND, FOREGROUND, DIM = "#1e2127", "#d7dae0", "#7f8693"
CHAR_WIDTH, LINE_HEIGHT, PADDING, FONT_SIZE = 8.4, 19, 14, 14  # pixels
CODES = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|([\r\n])|([^\x1b\r\n]+)")


def record(command: Sequence[str], cast: Path, width: int, height: int) -> int:
    """Run a command in a pseudo-terminal and write an asciicast (version 2). Return the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(width), "LINES": str(height)}
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    start, rest = time.monotonic(), b""
    with cast.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"version": 2, "width": width, "height": height, "command": " ".join(command)}) + "\n")
        while data := read_or_end(terminal):
            rest += data
            text = rest.decode("utf-8", errors="ignore")
            rest = rest[len(text.encode()) :]  # an incomplete character
            sys.stdout.write(text)
            sys.stdout.flush()
            out.write(json.dumps([round(time.monotonic() - start, 3), "o", text], ensure_ascii=False) + "\n")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_or_end(terminal: int) -> bytes:
    """Return the next output, or nothing at the end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@dataclass
class Screen:
    """What a terminal shows: rows of (character, style), of which the last `height` are visible."""

    width: int
    height: int
    rows: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = PLAIN

    def write(self, text: str) -> None:
        """Apply an output to the screen."""
        for numbers, code, control, plain in CODES.findall(text):
            if code == "m":
                self._set_style(numbers)
            elif code == "F":
                self.row, self.column = max(0, len(self.rows) - self.height, self.row - int(numbers or 1)), 0
            elif code in ("K", "J"):
                del self.rows[self.row][self.column :]
                if code == "J":
                    del self.rows[self.row + 1 :]
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._next_row()
            for char in plain:
                self._put(char)

    def visible(self) -> list[list[tuple[str, Style]]]:
        """Return the visible rows."""
        return [list(row) for row in self.rows[-self.height :]]

    def _put(self, char: str) -> None:
        if self.column == self.width:
            self._next_row()
            self.column = 0
        row = self.rows[self.row]
        row += [(" ", PLAIN)] * (self.column + 1 - len(row))
        row[self.column] = (char, self.style)
        self.column += 1

    def _next_row(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def _set_style(self, numbers: str) -> None:
        colour, bold, dim, underlined, reversed_ = self.style
        for number in map(int, (numbers or "0").split(";")):
            if number == 0:
                colour, bold, dim, underlined, reversed_ = PLAIN
            colour = COLOURS.get(number, "" if number == 39 else colour)
            bold, dim = (bold or number == 1), (dim or number == 2)
            underlined, reversed_ = (underlined or number == 4), (reversed_ or number == 7)
        self.style = (colour, bold, dim, underlined, reversed_)


def read_frames(cast: Path, num_frames: int, since: str = "") -> tuple[int, int, list[list[list[tuple[str, Style]]]]]:
    """Return (width, height, the screens at `num_frames` times of an asciicast, the last one included). A wait counts
    as at most one second, and the time before the first output that contains `since` does not count."""
    lines = cast.read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    events, last, now, begun = [], 0.0, 0.0, False
    for line in lines[1:]:
        at, _, text = json.loads(line)
        begun = begun or since in text
        now, last = now + min(at - last, 1.0) * begun, at
        events.append((now, text))
    screen, frames = Screen(header["width"], header["height"]), []
    times = iter([now * (number + 1) / num_frames for number in range(num_frames - 1)])
    due = next(times, None)
    for at, text in events:
        while due is not None and at > due:
            frames.append(screen.visible())
            due = next(times, None)
        screen.write(text)
    return header["width"], header["height"], [*frames, screen.visible()]


def render_svg(width: int, height: int, frames: Sequence[list[list[tuple[str, Style]]]], seconds: float) -> str:
    """Return an SVG picture with one group for each frame, side by side, of which one is in view at a time. Without
    animation (and with reduced motion) the last frame is in view."""
    wide, high = width * CHAR_WIDTH + 2 * PADDING, height * LINE_HEIGHT + 2 * PADDING
    step = 100 / (len(frames) + 4)  # the last frame stays five times as long
    moves = [f"{step * number:.2f}%{{transform:translateX({-wide * number:.0f}px)}}" for number in range(len(frames))]
    last = f"transform:translateX({-wide * (len(frames) - 1):.0f}px)"
    groups = "\n".join(
        f'<g transform="translate({wide * number:.0f},0)">{"".join(render_rows(frame))}</g>'
        for number, frame in enumerate(frames)
    )
    size = f'viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" height="{high}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
text{{white-space:pre;fill:{FOREGROUND}}}
.frames{{{last};animation:frames {seconds:g}s steps(1,end) infinite}}
@keyframes frames{{{"".join(moves)}100%{{{last}}}}}
@media (prefers-reduced-motion:reduce){{.frames{{animation:none}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
<g class="frames">
{groups}
</g>
</svg>
"""


def render_rows(rows: Sequence[list[tuple[str, Style]]]) -> Iterator[str]:
    """Yield the SVG text of each row that is not empty."""
    for number, row in enumerate(rows):
        column, spans = 0, []
        y = PADDING + (number + 1) * LINE_HEIGHT - 5
        for style, cells in groupby(row, key=lambda cell: cell[1]):
            text = "".join(char for char, _ in cells)
            if text.strip():
                x = PADDING + column * CHAR_WIDTH
                length = f'textLength="{len(text) * CHAR_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs"'
                spans.append(f'<tspan x="{x:.1f}" {length}{css(style)}>{escape(text, quote=False)}</tspan>')
            column += len(text)
        if spans:
            yield f'<text y="{y}">{"".join(spans)}</text>'


def css(style: Style) -> str:
    """Return the style attribute of a text."""
    colour, bold, dim, underlined, reversed_ = style
    fill = COLOURS[34] if reversed_ else colour or (DIM if dim else "")
    rules = [f"fill:{fill}"] if fill else []
    rules += ["font-weight:bold"] if bold else []
    rules += ["opacity:.75"] if dim and colour else []
    rules += ["text-decoration:underline"] if underlined else []
    return f' style="{";".join(rules)}"' if rules else ""


def main() -> int:
    """Record the command after `--`, if there is one, and draw the asciicast. Return the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cast", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--height", type=int, default=30)
    parser.add_argument("--frames", type=int, default=30)
    parser.add_argument("--since", default="", help="the animation begins when this text appears")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the animation")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), words[end + 1 :]
    code = record(command, options.cast, options.width, options.height) if command else 0
    frames = read_frames(options.cast, options.frames, options.since)
    options.svg.write_text(render_svg(*frames, options.seconds), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
