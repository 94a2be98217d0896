"""Every option, command, metric and file format has exactly one reference entry; generated pages are not committed."""

from __future__ import annotations

import ast
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.flows import cli
from penstock.flows.config import OPTIONS
from penstock.flows.options.argv import flag_of_field
from penstock.storage.commit import Commit, RunKeys, commit_key

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
METRIC = re.compile(r"^(rollout|train|perf|eval|multi_turn|cost|system)/[\w./@<>-]*$")
# What code adds to names: prefixes of the critic's metrics, and parts that are completed by a variable.
INCOMPLETE = re.compile(r"[/_-]$|^(eval|rollout|train)/<>(-<>|/<>)?$|^train/value_")
FOLDERS = ("flows", "stages", "engines", "storage")
SOURCES = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
GENERATED = runpy.run_path(str(DOCS / "scripts" / "reference.py"))["generated_pages"]()


def read(page: str) -> str:
    return GENERATED.get(page) or (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", GENERATED)
def test_generated_page_is_made_and_not_committed(page: str) -> None:
    assert GENERATED[page].startswith("# ") and len(GENERATED[page].splitlines()) > 100
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"/docs/{page}" in ignored and not (DOCS / page).exists()


def test_every_option_has_one_entry() -> None:
    entries = re.findall(r"^### `(--[a-z0-9-]+)`", read("reference/configuration.md"), re.MULTILINE)
    assert Counter(entries) == Counter(flag_of_field(name) for _, name, _ in OPTIONS)


def test_no_option_has_a_second_entry_among_the_names_of_slime_megatron_and_sglang() -> None:
    rows = set(re.findall(r"^\| `(--[a-z0-9-]+)` \|", read("options.md"), re.MULTILINE))
    assert rows and rows & {flag_of_field(name) for _, name, _ in OPTIONS} == set()


def test_every_command_has_one_entry() -> None:
    entries = re.findall(r"^## `penstock ([a-z-]+)`", read("reference/commands.md"), re.MULTILINE)
    assert entries == list(cli.COMMANDS)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def metrics_in_code() -> set[str]:
    """Return the names of metrics in string literals; replaced parts of f-strings are `<>`."""
    names = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                names.add("".join(part.value if isinstance(part, ast.Constant) else "<>" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return {name for name in names if METRIC.match(name) and not INCOMPLETE.search(name)}


def documented_metrics(text: str) -> Iterator[str]:
    """Yield the metrics in the first columns of a page's tables."""
    for row in re.findall(r"^\| (`[^|]*?) \|", text, re.MULTILINE):
        yield from (name for name in re.findall(r"`([^`]+)`", row) if METRIC.match(name))


def pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for a name whose parts in angle brackets are any text."""
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w*>)", name)))


def test_every_metric_of_the_code_has_one_entry() -> None:
    entries = Counter(documented_metrics(read("metrics.md")))
    assert {name for name, number in entries.items() if number > 1} == set()
    missing = [
        name
        for name in metrics_in_code()
        if not any(pattern(name).fullmatch(entry) or pattern(entry).fullmatch(name) for entry in entries)
    ]
    assert sorted(missing) == []


def test_every_documented_metric_is_in_the_code() -> None:
    source = "\n".join(SOURCES)
    for name in documented_metrics(read("metrics.md")):
        # The last literal part of a name; the critic's metrics and some means are made of two literals.
        part = [part for part in re.split(r"/|<\w*>", name) if part.strip("_-@")][-1]
        assert re.sub(r"^critic-|(?<=response_length)_\w+$", "", part.strip("_-")) in source, name


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_key_of_a_run_has_one_entry() -> None:
    keys = RunKeys("<run>")
    examples = [
        *(keys.record, keys.report, keys.status, commit_key(keys.rollout_prefix(12)), commit_key(keys.step_prefix(12))),
        *(commit_key(keys.checkpoint_prefix(20)), commit_key(keys.eval_prefix(20, "<task>"))),
        commit_key(keys.export_prefix(60)),
    ]
    cells = Counter(re.findall(r"^\| `([^`]+)`", read("reference/formats.md"), re.MULTILINE))
    assert {key: cells[key] for key in examples} == dict.fromkeys(examples, 1)


def test_every_field_of_a_commit_is_described() -> None:
    section = read("reference/formats.md").partition("### Commit records")[2].partition("\n### ")[0]
    assert {field for field in Commit.model_fields if f"`{field}`" not in section} == set()
