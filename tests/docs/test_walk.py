"""The first page, typed into a terminal as it is printed: every command succeeds, and every line of output on the page
has the form of a line that the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, Snippet, snippets_of, walk


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the pages use of a checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.mark.integration
@pytest.mark.full
def test_first_page_works_as_printed_without_a_gpu(checkout: Path) -> None:
    page = ROOT / "docs" / "start.md"
    end = page.read_text(encoding="utf-8").partition("## Your own model on one GPU")[0].count("\n")
    printed, missing = walk([snippet for snippet in snippets_of(page) if snippet.line <= end], checkout)
    assert missing == [], printed[-20000:]
    assert "Killed" in printed, "kill -9 did not end the run"
    assert printed.count("16 of 16 rounds are equal bit for bit") == 1
    assert (checkout / "penstock-demo/store").is_dir() and (checkout / "tiny-model/config.json").is_file()
    rewards = [float(reward) for reward in re.findall(r"^round +\d+ \(\d+/20\) +reward (\S+)", printed, re.MULTILINE)]
    demo, own = rewards[:20], rewards[20:]  # the line of the round in which the kill comes may be missing
    assert len(own) >= 18 and min(sum(curve[-3:]) / 3 - curve[0] for curve in (demo, own)) > 0.1


# ---- the walk itself, without engines --------------------------------------------------------------------------------


def blocks_of(folder: Path, *blocks: tuple[str, str]) -> list[Snippet]:
    page = folder / "page.md"
    page.write_text("".join(f"```{language}\n{text}\n```\n" for language, text in blocks))
    return list(snippets_of(page))


def test_walk_writes_files_runs_commands_and_compares_outputs(tmp_path: Path) -> None:
    blocks = blocks_of(
        tmp_path,
        ("python", "# a.py\nprint('reward', 0.25, '▁▂▃')"),
        ("bash", "make setup   # run elsewhere\npython \\\n    a.py"),
        ("text", "reward 0.5  ▁█\n..."),
    )
    printed, missing = walk(blocks, tmp_path)
    assert "reward 0.25" in printed and missing == []


def test_walk_notices_failed_commands_and_other_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snippet, "__str__", lambda snippet: str(snippet.line))
    with pytest.raises(AssertionError, match="false"):
        walk(blocks_of(tmp_path, ("bash", "false")), tmp_path)
    assert walk(blocks_of(tmp_path, ("bash", "echo reward 1"), ("text", "rewards 1")), tmp_path)[1] == ["4: rewards 1"]
