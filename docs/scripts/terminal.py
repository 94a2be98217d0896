"""Record a command in a terminal and draw it as an animated SVG.

    python docs/scripts/terminal.py docs/images/demo.svg -- penstock demo

The command runs in a pseudo-terminal. A frame is taken when the screen has changed. The animation takes SECONDS,
however long the command ran, and its last frame stays for HOLD seconds. Where animations are unwanted
(prefers-reduced-motion), the SVG shows the last frame. `--save FILE` keeps the recording as JSON, and `--load FILE`
draws it again; `--begin TEXT` leaves out what comes before the first output that contains TEXT. Tokens in links are
cut, and the working directory gets another name.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pyte

COLUMNS, ROWS = 100, 28
SECONDS, HOLD = 16.0, 6.0
MAX_FRAMES = 48
CHAR, LINE, MARGIN = 8.4, 18.0, 14.0  # width of a character, height of a line, margin, in px
COLORS = {
    "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#dcdfe4", "default": "#c8ccd4",
}  # fmt: skip
HYPERLINK = re.compile(r"\x1b\]8;[^\x1b]*\x1b\\")
TOKEN = re.compile(r"(/open/)[\w-]+")
Event = tuple[float, str]  # seconds since the start, output


def record(command: Sequence[str]) -> list[Event]:
    """Run a command in a pseudo-terminal and return its output. The command's exit code is not checked."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start, events = time.monotonic(), []
    while True:
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # the terminal is closed at the command's end
            break
        if not data:
            break
        events.append((round(time.monotonic() - start, 3), data.decode(errors="replace")))
    os.waitpid(pid, 0)
    return events


def frames_of(events: list[Event]) -> list[tuple[float, list[str]]]:
    """Return at most MAX_FRAMES screens as (seconds, rows); a row is SVG markup without its position."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    pause = events[-1][0] / MAX_FRAMES
    frames: list[tuple[float, list[str]]] = []
    for seconds, text in events:
        stream.feed(text)
        if not frames or seconds - frames[-1][0] >= pause:
            frames.append((seconds, rows_of(screen)))
    return [*frames[: MAX_FRAMES - 1], (events[-1][0], rows_of(screen))]


def rows_of(screen: pyte.Screen) -> list[str]:
    """Return the rows of a screen as SVG text spans."""
    rows = []
    for y in range(ROWS):
        spans: list[tuple[str, str]] = []
        for x in range(COLUMNS):
            char = screen.buffer[y][x]
            color = COLORS.get(char.fg.removeprefix("bright"), f"#{char.fg}" if len(char.fg) == 6 else "#c8ccd4")
            style = f'fill="{color}"' + (' font-weight="bold"' if char.bold else "")
            if spans and (spans[-1][0] == style or char.data == " "):
                spans[-1] = (spans[-1][0], spans[-1][1] + char.data)
            else:
                spans.append((style, char.data))
        text = "".join(f"<tspan {style}>{escape(text)}</tspan>" for style, text in spans).rstrip()
        rows.append(text if any(text.strip() for _, text in spans) else "")
    return rows


def draw(frames: list[tuple[float, list[str]]], title: str) -> str:
    """Return the animated SVG. Rows that several frames share are drawn once."""
    names: dict[str, str] = {}
    groups, styles = [], []
    end, total = frames[-1][0], SECONDS + HOLD
    times = [seconds / end * SECONDS if end else 0.0 for seconds, _ in frames]
    for number, (_, rows) in enumerate(frames):
        uses = "".join(
            f'<use href="#{names.setdefault(row, f"r{len(names)}")}" y="{y * LINE:g}"/>'
            for y, row in enumerate(rows)
            if row
        )
        last = number == len(frames) - 1
        begin, stop = times[number] / total * 100, 100 if last else times[number + 1] / total * 100
        hidden = "" if number == 0 else f"0%,{begin - 0.01:.2f}%{{visibility:hidden}}"
        after = "" if last else f"{stop:.2f}%,100%{{visibility:hidden}}"
        shown = f"{begin:.2f}%,{stop - 0.01 if not last else 100:.2f}%{{visibility:visible}}"
        styles.append(f"@keyframes k{number}{{{hidden}{shown}{after}}}")
        groups.append(f'<g class="f{" last" if last else ""}" style="animation-name:k{number}">{uses}</g>')
    width, height = COLUMNS * CHAR + 2 * MARGIN, ROWS * LINE + 2 * MARGIN + 22
    rows_text = "".join(f'<text id="{name}" xml:space="preserve">{row}</text>' for row, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>text{{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',"
        f"monospace;white-space:pre}}.f{{animation:{total:g}s step-end infinite}}{''.join(styles)}"
        "@media(prefers-reduced-motion){.f{animation:none;visibility:hidden}.last{visibility:visible}}</style>"
        f'<defs>{rows_text}</defs><rect width="{width:g}" height="{height:g}" rx="9" fill="#21252b"/>'
        '<circle cx="20" cy="18" r="6" fill="#e06c75"/><circle cx="40" cy="18" r="6" fill="#e5c07b"/>'
        '<circle cx="60" cy="18" r="6" fill="#98c379"/>'
        f'<g transform="translate({MARGIN:g} {MARGIN + 36:g})">{"".join(groups)}</g></svg>\n'
    )


def clean(text: str) -> str:
    """Return an output without hyperlinks, tokens and the real working directory of the recording."""
    return TOKEN.sub(r"\1...", HYPERLINK.sub("", text)).replace(str(Path.cwd()), "/home/me/penstock")


def main() -> None:
    """Record a command or load a recording, and draw it."""
    parser = argparse.ArgumentParser(description="Record a command in a terminal and draw it as an animated SVG.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--save", type=Path, help="write the recording to this file")
    parser.add_argument("--load", type=Path, help="draw a recording instead of running a command")
    parser.add_argument("--begin", default="", help="leave out what comes before the first output with this text")
    parser.add_argument("command", nargs="*", help="after --: the command")
    options = parser.parse_args()
    if options.load:
        recording = json.loads(options.load.read_text(encoding="utf-8"))
    else:
        recording = {"command": options.command, "events": record(options.command)}
    if options.save:
        options.save.write_text(json.dumps(recording), encoding="utf-8")
    title = "$ " + " ".join(recording["command"])
    first = next(i for i, (_, text) in enumerate(recording["events"]) if options.begin in text)
    begin = recording["events"][first][0] if options.begin else 0.0
    shown = [(seconds - begin, clean(text)) for seconds, text in recording["events"][first:]]
    events = [(0.0, f"\x1b[1m{title}\x1b[0m\r\n"), *shown]
    options.output.write_text(draw(frames_of(events), title), encoding="utf-8")


if __name__ == "__main__":
    main()
