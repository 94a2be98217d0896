"""Make the page options.md of the documentation site: every name that a command line may have besides the options of
Penstock, with its class, from the tables that the commands use.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from penstock.engines.backends import BACKENDS, engine_backend
from penstock.flows.options import refused

HEAD = f"""# Names of {", ".join([*refused.TRAINERS, "Megatron"])} and of engines

Every name that `penstock train` and the other flows accept besides the options of Penstock, which
[Configuration](reference/configuration.md) lists with their spellings.

| class | meaning |
|---|---|
| synonym | stands for other options, named once in the log |
| accepted | asks for what Penstock does anyway; the reason is logged once |
| refused | an error before anything starts, with what to use instead |

Any other name is an error that suggests the nearest one, if one is near.
"""


def options_page() -> str:
    """Return the page."""
    lines = [HEAD, "## Synonyms", "", *table(("name", "means"), sorted(synonym_rows()))]
    lines += [
        "",
        "## Accepted names of other trainers",
        "",
        *table(("name", "why"), refused.ACCEPTED.items()),
    ]
    lines += ["", "## Refused names of other trainers", "", *table(("name", "what to use"), refused.REFUSED.items())]
    for name in BACKENDS:
        lines += ["", f"## Options of {engine_backend(name).title} and its router"]
        for text, rows in engine_backend(name).flag_tables().items():
            lines += ["", *textwrap.wrap(text, 120), "", *table(("name", "what Penstock does"), rows.items())]
    return "\n".join(lines) + "\n"


def synonym_rows() -> Iterator[tuple[str, str]]:
    """Yield (name, the flags that it stands for)."""
    for key, flags in refused.SYNONYMS.items():
        yield key, " ".join("VALUE" if word == "..." else word for flag in flags for word in flag)


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a Markdown table of two columns, the first of which has code."""
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    yield from (f"| `{name}` | {cell(text)} |" for name, text in rows)


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
