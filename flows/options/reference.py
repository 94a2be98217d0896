"""Write the page docs/options.md: every name that a command line may have besides the options of Penstock, with its
class. It is made from the tables that the commands use: `python -m penstock.flows.options.reference > docs/options.md`.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator

from penstock.engines.backends import BACKENDS, engine_backend
from penstock.engines.megatron.options.args import ALIASES
from penstock.engines.megatron.options.table import KEEPS_RESULTS, ROUNDING_MODULE, TABLE
from penstock.flows.config import flag_of_field
from penstock.flows.options import refused

HEAD = f"""# Names of {", ".join([*refused.TRAINERS, "Megatron"])} and of engines

Every name that `penstock train` and the other flows accept besides the options of Penstock, which
[Configuration](reference/configuration.md) lists with their spellings. The page is made from the code, and a test
compares both.

| class | meaning |
|---|---|
| synonym | stands for other options, named once in the log |
| accepted | asks for what Penstock does anyway; the reason is logged once |
| refused | an error before anything starts, with what to use instead |

Any other name is an error that suggests the nearest one, if one is near.
"""


def options_page() -> str:
    """Return the page docs/options.md."""
    lines = [HEAD, "## Synonyms", "", *table(("name", "means"), sorted(synonym_rows()))]
    lines += [
        "",
        "## Accepted names of other trainers",
        "",
        *table(("name", "why"), refused.ACCEPTED.items()),
    ]
    lines += ["", "## Refused names of other trainers", "", *table(("name", "what to use"), refused.REFUSED.items())]
    lines += ["", "## Options of Megatron", "", *megatron_lines()]
    for name in BACKENDS:
        lines += ["", f"## Options of {engine_backend(name).title} and its router"]
        for text, rows in engine_backend(name).flag_tables().items():
            lines += ["", *textwrap.wrap(text, 120), "", *table(("name", "what Penstock does"), rows.items())]
    return "\n".join(lines) + "\n"


def synonym_rows() -> Iterator[tuple[str, str]]:
    """Yield (name, the flags that it stands for)."""
    for key, flags in refused.SYNONYMS.items():
        yield key, " ".join("VALUE" if word == "..." else word for flag in flags for word in flag)
    for alias, fields in ALIASES.items():
        words = [f"{flag_of_field(name)} {'VALUE' if value is ... else value}" for name, value in fields.items()]
        yield flag_of_field(alias), " ".join(words)


def megatron_lines() -> Iterator[str]:
    """Yield the lines about Megatron's options, by class."""
    yield "Accepted unchanged; some options of Penstock have names of Megatron, too. Effective:"
    yield ""
    yield from table(
        ("name", "effect"),
        [(flag_of_field(name), rule.text) for name, rule in TABLE.items() if rule.kind == "effective"],
    )
    yield ""
    names = ", ".join(f"`{flag_of_field(name)}`" for name in KEEPS_RESULTS)
    yield from textwrap.wrap(
        f"These change no bit of a result and may change on resume, as may those without effect: {names}. "
        f"Exception: `--recompute-modules {ROUNDING_MODULE}`, which changes rounding.",
        180,
        break_on_hyphens=False,
    )
    checked = [f"`{flag_of_field(name)}`" for name, rule in TABLE.items() if rule.kind == "checked"]
    yield ""
    yield "Checked against the config.json of `--hf-checkpoint`, and not needed:"
    yield ""
    yield from textwrap.wrap(", ".join(checked), 180, break_on_hyphens=False)
    for kind, title in (
        ("ignored", "Accepted without effect"),
        ("refused", "Refused, unless the value is the one that Penstock uses anyway"),
    ):
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, rule in TABLE.items():
            if rule.kind == kind:
                by_reason[rule.text].append(f"`{flag_of_field(name)}`")
        yield ""
        yield f"{title}:"
        yield ""
        yield "| names | reason |"
        yield "|---|---|"
        yield from (f"| {', '.join(names)} | {cell(reason)} |" for reason, names in by_reason.items())


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a Markdown table of two columns, the first of which has code."""
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    yield from (f"| `{name}` | {cell(text)} |" for name, text in rows)


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(options_page(), end="")
