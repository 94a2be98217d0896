"""No dead link and no dead anchor in the documentation, and every page is in the navigation of the site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "scripts" / "reference.py"))
GENERATED = {ROOT / "docs" / name: text for name, text in REFERENCE["generated_pages"]().items()}
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *GENERATED,
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *ROOT.glob("examples/*/README.md"),
    ]
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return GENERATED.get(page) or page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs and GitHub make them."""
    anchors = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE):
        if given := re.search(r"\{ #([\w-]+) \}$", title):
            anchors.add(given[1])
        plain = re.sub(r"[^\w\s-]", "", title).strip().lower()
        anchors.add(re.sub(r"[-\s]+", "-", plain))
    return anchors


def links_of(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))
    return [first or second for first, second in LINK.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_exist(page: Path) -> None:
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in GENERATED, f"{link} does not exist"
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


def test_pages_of_the_navigation_exist() -> None:
    listed = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {ROOT / "docs" / name for name in listed - {"contributing.md", "changelog.md", "design/index.md"}}
    assert {page for page in pages - GENERATED.keys() if not page.exists()} == set()


def test_pages_that_code_and_recipes_name_are_in_a_clone() -> None:
    folders = ("flows", "stages", "engines", "storage", "configs", "benchmarks", "examples")
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".toml", ".yaml")]
    named = {(path, name) for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text("utf-8"))}
    assert named and [f"{path}: {name}" for path, name in named if not (ROOT / name).exists()] == []
