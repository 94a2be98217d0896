"""Hooks of the documentation site (mkdocs.yml): generated pages, and files outside docs/ that become pages of the site.

Pages link to files outside docs/ by relative paths (`../examples/search`), which also work in a checkout. On the site
README files become pages, and every other linked file is copied as text, so the site needs no network. A link to a file
that does not exist is a warning, which `mkdocs build --strict` turns into an error.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
GENERATED = runpy.run_path(str(ROOT / "docs" / "scripts" / "reference.py"))["generated_pages"]()
TOP_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def page_of(path: str) -> str:
    """Return the site's name for a file of the repository (both relative to their roots).

    Files of docs/ keep their names, README files become the page of their directory, other files become text files.
    """
    if path in TOP_PAGES:
        return TOP_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + ("/index.md" if (ROOT / path).is_dir() else "")
    if (ROOT / path / "README.md").is_file():
        return f"{path}.md"
    if path.endswith("/README.md"):
        return f"{posixpath.dirname(path)}.md"
    return f"source/{path}.txt"


def outside_links(path: Path) -> set[str]:
    """Return the existing files and directories outside docs/ that a page links to, relative to the repository."""
    targets = (match[2] for match in LINK.finditer(path.read_text(encoding="utf-8")) if ":" not in match[2])
    resolved = ((path.parent / target).resolve() for target in targets)
    existing = (file for file in resolved if file.exists() and file.is_relative_to(ROOT))
    return {file.relative_to(ROOT).as_posix() for file in existing if not file.is_relative_to(ROOT / "docs")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the examples to the navigation, and pages that it does not list as a section `More`."""
    listed = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    more = sorted(page for page in pages - listed if not page.startswith("design/"))
    if more:
        config.nav.append({"More": more})
    examples = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))
    config.nav.insert(4, {"Examples": [f"examples/{name}.md" for name in examples]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the pages and text files that are made from files outside docs/."""
    waiting = {"CONTRIBUTING.md", "CHANGELOG.md"}
    waiting |= {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/README.md")}
    for path in (ROOT / "docs").rglob("*.md"):
        waiting |= outside_links(path)
    done: set[str] = set()
    while waiting - done:
        path = sorted(waiting - done)[0]
        done.add(path)
        source = ROOT / path / "README.md" if (ROOT / path).is_dir() else ROOT / path
        name = page_of(path)
        if not source.is_file() or files.get_file_from_path(name):
            continue
        if source.suffix == ".md":
            waiting |= outside_links(source)
        text = source.read_text(encoding="utf-8")
        if source.suffix == ".md":
            text = rewrite_links(text, source.relative_to(ROOT).as_posix(), name)
        files.append(File.generated(config, name, content=text))
    for name, text in {**GENERATED, "design/index.md": list_of_decisions()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def list_of_decisions() -> str:
    """Return the page that lists the design notes."""
    lines = ["# Decisions", "", "Design notes: what was decided, why, and what was rejected.", ""]
    for path in sorted((ROOT / "docs" / "design").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


def rewrite_links(text: str, source: str, page: str) -> str:
    """Return `text`, the content of the file `source`, with its relative links changed for the page `page` of the
    site."""

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target or not (ROOT / posixpath.dirname(source) / target).exists():
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return f"[{label}]({posixpath.relpath(page_of(path), posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(rewrite, text)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page of docs/ to files outside docs/."""
    source = Path(page.file.abs_src_path) if page.file.abs_src_path else None
    if source is None or not source.is_relative_to(ROOT / "docs"):
        return markdown
    return rewrite_links(markdown, source.relative_to(ROOT).as_posix(), page.file.src_uri)
