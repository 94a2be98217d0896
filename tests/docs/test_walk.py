"""Pages for beginners, typed into a terminal as they are printed: every command succeeds, and every line of output on
the page has the form of a line that the commands print."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from doc_pages import ROOT, Snippet, Terminal, pattern_of, snippets_of

# Commands that other tests run: installation (tests/flows/test_packaging.py, test_setup.py) and services
# (test_services.py). The test runs in the environment that they would install.
ELSEWHERE = {"git clone", "cd penstock", "make setup", "source .venv/bin/activate", "make up"}
KILL = "kill -9 %1"
COMMAND_TIMEOUT = 900.0  # seconds; only a command that hangs exceeds it


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


def walk(page: Path, folder: Path) -> tuple[str, list[str]]:
    """Type the commands of a page into a terminal. Return all that was printed, and the lines of outputs on the page
    that have no counterpart in what the commands before them printed.

    Raises:
        AssertionError: a command failed.
    """
    snippets, printed, checked = list(snippets_of(page)), "", 0
    missing: list[str] = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the pages use of a checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.mark.integration
@pytest.mark.full
def test_tour_works_as_printed(checkout: Path) -> None:
    printed, missing = walk(ROOT / "docs" / "tour.md", checkout)
    assert missing == [], printed[-20000:]
    assert "Killed" in printed, "kill -9 did not end the run"
    assert printed.count("16 of 16 rounds are equal bit for bit") == 1
    assert len(re.findall(r"^round +\d+ \(\d+/30\)", printed, re.MULTILINE)) >= 30
    assert (checkout / "penstock-demo/store").is_dir() and (checkout / "tiny-model/config.json").is_file()


@pytest.mark.integration
@pytest.mark.full
def test_first_curve_works_as_printed(checkout: Path) -> None:
    printed, missing = walk(ROOT / "docs" / "first-curve.md", checkout)
    assert missing == [], printed[-20000:]
    rewards = [float(reward) for reward in re.findall(r"^round +\d+ \(\d+/20\) +reward (\S+)", printed, re.MULTILINE)]
    demo, own = rewards[:20], rewards[-20:]
    assert len(rewards) >= 40 and min(sum(curve[-3:]) / 3 - curve[0] for curve in (demo, own)) > 0.1


# ---- the walk itself, without engines --------------------------------------------------------------------------------


def page_of(folder: Path, *blocks: tuple[str, str]) -> Path:
    page = folder / "page.md"
    page.write_text("".join(f"```{language}\n{text}\n```\n" for language, text in blocks))
    return page


def test_walk_writes_files_runs_commands_and_compares_outputs(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        ("python", "# a.py\nprint('reward', 0.25, '▁▂▃')"),
        ("bash", "make setup   # run elsewhere\npython \\\n    a.py"),
        ("text", "reward 0.5  ▁█\n..."),
    )
    printed, missing = walk(page, tmp_path)
    assert "reward 0.25" in printed and missing == []


def test_walk_notices_failed_commands_and_other_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snippet, "__str__", lambda snippet: str(snippet.line))
    with pytest.raises(AssertionError, match="false"):
        walk(page_of(tmp_path, ("bash", "false")), tmp_path)
    assert walk(page_of(tmp_path, ("bash", "echo reward 1"), ("text", "rewards 1")), tmp_path)[1] == ["4: rewards 1"]
