"""The code blocks of a page, an interactive shell in a pseudo-terminal, and a walk: a page typed into a shell."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.connection import wait  # takes any file descriptor, select only those below 1024
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"\[exit (\d+)\]# $")
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[=>78]|\([B0])")
# Parts of an output that differ between runs, as regular expressions: paths, numbers, curves, bars, spinners.
VARIABLE = re.compile(
    r"(?P<path>/home/\S+)|(?P<number>\d[\d.,:+-]*(?:e[-+]?\d+)?)|(?P<curve>[▁-█]+)|(?P<bar>[━─]+)|(?P<spinner>[⠀-⣿])"
)
PATTERNS = {
    "path": r"/\S+",
    "number": r"[-+]?\d[\d.,:+-]*(?:e[-+]?\d+)?",
    "curve": r"[▁-█]+",
    "bar": "[━─╸╺]+",
    "spinner": "[⠀-⣿]",
}
# Commands that other tests run: installation (tests/flows/test_packaging.py, test_setup.py) and services
# (test_services.py). A walk runs in the environment that they would install.
ELSEWHERE = {
    "git clone",
    "cd penstock",
    "make setup",
    "source .venv/bin/activate",
    "penstock up",
    "penstock down",
    "pip install",
}
KILL = "kill -9 %1"
COMMAND_TIMEOUT = 900.0  # seconds; only a command that hangs exceeds it


@dataclass(frozen=True)
class Snippet:
    """One code block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets_of(page: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        yield Snippet(page, text.count("\n", 0, match.start()) + 1, match[2], "\n".join(lines))


def pattern_of(line: str) -> str:
    """Return the regular expression of the lines that differ from `line` only in numbers, paths and drawings, in the
    width of columns, and in the text of a sample."""
    line, sample, _ = line.partition("<|")
    parts, end = [], 0
    for match in VARIABLE.finditer(line):
        parts += [re.escape(line[end : match.start()]), PATTERNS[str(match.lastgroup)]]
        end = match.end()
    pattern = "".join([*parts, re.escape(line[end:].rstrip())])
    return re.sub(r"(?:\\ )+", r"\\s+", pattern) + (r"\s*<\|.*" if sample else r"\s*$")


class Terminal:
    """An interactive bash of 100 columns; a context manager, which ends the shell and its foreground command.

    Args:
        folder: working directory of the shell.
        environment: replaces that of this process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            variables = {"PS1": "[exit $?]# ", "PS2": "", "TERM": "xterm-256color"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], {**environment, **variables})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.wait_for_prompt(60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *details: object) -> None:
        os.close(self._fd)  # hangs up the foreground command
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def type(self, text: str) -> None:
        """Send keys, for example "ls\\n" or "\\x1a", which is Ctrl-Z."""
        os.write(self._fd, text.encode())

    def wait_for(self, reached: Callable[[str], bool], seconds: float) -> str:
        """Read until the text since this call satisfies `reached`, and return it without escape sequences.

        Raises:
            AssertionError: it does not within these seconds, or the shell ended.
        """
        deadline, output = time.monotonic() + seconds, b""
        while True:
            text = ESCAPES.sub("", output.decode(errors="replace")).replace("\r", "")
            if reached(text):
                return text
            assert wait([self._fd], max(0.0, deadline - time.monotonic())), f"no end after {seconds} s:\n{text[-3000:]}"
            data = os.read(self._fd, 1 << 16)
            assert data, f"the shell ended:\n{text[-3000:]}"
            output += data

    def wait_for_prompt(self, seconds: float) -> tuple[int, str]:
        """Return the exit code of the last command and its output, which begins with the command as it was typed."""
        text = self.wait_for(lambda text: PROMPT.search(text) is not None, seconds)
        prompt = PROMPT.search(text)
        assert prompt is not None
        return int(prompt[1]), text[: prompt.start()]


def commands_of(snippet: Snippet) -> Iterator[str]:
    """Yield the commands of a shell block as they are typed, also over several lines."""
    command = ""
    for line in snippet.text.splitlines():
        command += line + "\n"
        if not line.endswith("\\"):
            if not any(command.startswith(name) for name in ELSEWHERE):
                yield command
            command = ""


def is_killed(snippets: list[Snippet], number: int) -> bool:
    """Return whether the next shell block kills the command of this one."""
    following = [snippet for snippet in snippets[number + 1 :] if snippet.language == "bash"]
    return bool(following) and following[0].text == KILL


def last_round(snippet: Snippet) -> str:
    """Return the beginning of the last round's line of an output, as in "round 12 (13/30)"."""
    return re.findall(r"^round +\d+ \(\d+/\d+\)", snippet.text, re.MULTILINE)[-1]


def walk(snippets: list[Snippet], folder: Path) -> tuple[str, list[str]]:
    """Type the commands of code blocks into a terminal in `folder`. Return all that was printed, and the lines of
    outputs on the page that have no counterpart in what the commands before them printed.

    Raises:
        AssertionError: a command failed.
    """
    printed, checked, missing = "", 0, []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    packages = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "HOME": str(folder)}
    with Terminal(folder, environment) as terminal:
        for number, snippet in enumerate(snippets):
            if snippet.language == "python":
                name = re.match(r"# (\w+\.py)\n", snippet.text)
                assert name is not None, f"{snippet}: the first line does not name the file"
                (folder / name[1]).write_text(snippet.text + "\n")
            for command in commands_of(snippet) if snippet.language == "bash" else ():
                terminal.type(command)
                if is_killed(snippets, number) and command.startswith("penstock train"):
                    until = last_round(snippets[number + 1])
                    printed += terminal.wait_for(lambda text, until=until: until in text, COMMAND_TIMEOUT)
                    terminal.type("\x1a")  # Ctrl-Z
                    code = terminal.wait_for_prompt(60)[0]
                    assert code == 148, "Ctrl-Z did not stop the command"
                    continue
                code, output = terminal.wait_for_prompt(COMMAND_TIMEOUT)
                assert code == 0, f"{snippet}: {command}{output[-3000:]}"
                printed += output
            if snippet.language == "text":
                missing += [f"{snippet}: {line}" for line in missing_lines(snippet, printed[checked:])]
                checked = len(printed) if is_last_output(snippets, number) else checked
    (folder / "printed.txt").write_text(printed)
    return printed, missing


def is_last_output(snippets: list[Snippet], number: int) -> bool:
    """Return whether commands follow before the next output."""
    following = [snippet.language for snippet in snippets[number + 1 :] if snippet.language in ("bash", "text")]
    return not list(takewhile("text".__eq__, following))


def missing_lines(snippet: Snippet, printed: str) -> list[str]:
    """Return the lines of an output, but for "...", that do not have the form of any printed line."""
    lines = [line for line in snippet.text.splitlines() if line.strip() not in ("", "...")]
    return [line for line in lines if not any(map(re.compile(pattern_of(line)).match, printed.splitlines()))]
