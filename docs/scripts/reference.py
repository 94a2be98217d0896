"""Make the pages of the reference that exist only on the site; site_hooks.py adds them when it is built (`make docs`).

reference/configuration.md comes from the pydantic models of the options, reference/commands.md from the --help texts of
the commands, and options.md from the tables of other programs' names.
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from penstock.engines.backends import BACKENDS, engine_backend
from penstock.engines.megatron.megatron_options import MegatronOptions
from penstock.flows import cli
from penstock.flows.config import OPTIONS, SECTIONS, SWITCHES
from penstock.flows.options import refused
from penstock.flows.options.argv import flag_of_field
from penstock.flows.options.help import SHORT, about_section, first_sentence
from penstock.storage.config import field_meta

DOCS = Path(__file__).resolve().parents[1]
# Flags of slime, and flags that descriptions of slime name.
SLIME = set((DOCS.parent / "tests" / "flows" / "slime_names.txt").read_text(encoding="utf-8").split())
MEGATRON = {  # options of Penstock that Megatron-core has, too
    *("--calculate-per-token-loss", "--lr", "--min-lr", "--weight-decay", "--adam-beta1", "--adam-beta2", "--adam-eps"),
    *("--clip-grad", "--params-dtype", "--deterministic-mode", "--tensor-model-parallel-size", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size"),
    *("--expert-tensor-parallel-size", "--virtual-pipeline-model-parallel-size", "--mtp-num-layers"),
}
SECTION_TITLES = {
    "run": "The run",
    "convert": "Model, conversion and export",
    "rollout": "Prompts, generation, rewards, engines",
    "rollout.overlong": "Overlong penalty",
    "train": "Algorithm, optimizer, batches, parallelism",
    "train.lora": "Adapters",
    "train.opd": "Distillation",
    "train.opd.hinted": "Distillation from the policy with hints",
    "train.opd.engine": "Distillation from a teacher in an engine of the run",
    "train.opsm": "Sequence masking",
    "train.megatron": "Options of Megatron-core",
    "eval": "Evaluation and promotion",
    "debug": "Debugging and profiling",
}
CHANGE = {
    "identity": "fixed for the run (fork to change it)",
    "schedule": "may change on resume, which is recorded",
    "placement": "may change on resume",
}
TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "switch"}
MAX_HELP_LINES = 60  # longer help texts list all options, which have a page of their own


def generated_pages() -> dict[str, str]:
    """Return the text of each page by its path on the site."""
    return {
        "reference/configuration.md": configuration_page(),
        "reference/commands.md": commands_page(),
        "options.md": options_page(),
    }


# ---- options ---------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Return reference/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Every option, by section. An option is a flag (`--rollout-batch-size 32`) and a TOML key",
        "(`rollout_batch_size = 32` under `[rollout]`); a switch is turned off by `--no-NAME`. Values come from",
        "`--config FILE.toml` (any number of files, or names of bundled recipes), then from flags, which override",
        "them. The line below an option has its type and bound, its default, whether a resumed run may change it,",
        "and where the name comes from:",
        "slime, Megatron or Penstock.",
        "",
        "Options of Megatron-core are accepted under Megatron's names, those of engines as `--<engine>-NAME`",
        "and those of its router as `--router-NAME`. [Names of slime, Megatron and engines](../options.md) lists them,",
        "with the names that are synonyms, accepted without effect, or refused.",
        "",
        *common_options(),
    ]
    for section in SECTIONS:
        options = [(name, field) for owner, name, field in OPTIONS if owner == section]
        lines += [f"## [{section}] {SECTION_TITLES[section]}", "", f"{len(options)} options.", ""]
        if section in SWITCHES:
            lines += [plain_text(about_section(section)), ""]
        for name, field in options:
            lines += [*option_entry(name, field), ""]
    return "\n".join(lines)


def common_options() -> Iterator[str]:
    """Yield the section of the options that most runs need: those of `penstock train --help`."""
    fields = {flag_of_field(name): (name, field) for _, name, field in OPTIONS}
    groups = SHORT["train"].options
    flags = [(title, flag) for title, words in groups.items() for flag in words.split()]
    yield from (
        f"## The {len(flags)} options you will use {{ #common }}",
        "",
        "| for | option | meaning |",
        "|---|---|---|",
    )
    for title, flag in flags:
        name, field = fields[flag]
        link = f"[`{flag}`](#{name.replace('_', '-')})"
        yield f"| {title} | {link} | {cell(first_sentence(field.description or ''))} |"
    yield ""


def option_entry(name: str, field: FieldInfo) -> Iterator[str]:
    """Yield the lines of one option."""
    meta = field_meta(field)
    flag = flag_of_field(name)
    yield f"### `{flag}` {{ #{name.replace('_', '-')} }}"
    yield ""
    facts = [type_text(field), f"default {default_text(field)}", CHANGE[meta.mutability], f"name: {origin(flag)}"]
    if meta.aliases:
        facts.append("also " + ", ".join(f"`--{alias}`" for alias in meta.aliases))
    if meta.secret:
        facts.append("[may contain a secret](../security.md#secrets-in-a-configuration)")
    yield f"<small>{' · '.join(facts)}</small>"
    yield ""
    yield plain_text(field.description or "")


def origin(flag: str) -> str:
    """Return the program from which Penstock took the name of a flag."""
    is_megatrons = flag in MEGATRON or flag[2:].replace("-", "_") in MegatronOptions.model_fields
    return "Megatron" if is_megatrons else "slime" if flag in SLIME else "Penstock"


def plain_text(text: str) -> str:
    """Return a docstring as one line of Markdown, with flags and placeholders as they are."""
    text = " ".join(text.split()).replace("<", "&lt;")
    return re.sub(r"(?<![`\w-])(--[a-z][a-z0-9-]*\*?)", r"`\1`", text)


def type_text(field: FieldInfo) -> str:
    """Return type and bounds of an option, such as `integer ≥ 1`."""
    signs = {annotated_types.Ge: ("≥", "ge"), annotated_types.Gt: ("&gt;", "gt"), annotated_types.Le: ("≤", "le"),
             annotated_types.Lt: ("&lt;", "lt")}  # fmt: skip
    bounds = []
    for item in field.metadata:
        if type(item) in signs:
            sign, attribute = signs[type(item)]
            bounds.append(f"{sign} {getattr(item, attribute):,}")
    return " ".join([annotation_text(field.annotation), " and ".join(bounds)]).strip()


def annotation_text(annotation: Any) -> str:
    """Return a Python type in words."""
    origin_type, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin_type in (typing.Union, types.UnionType):
        return annotation_text(next(arg for arg in args if arg is not type(None)))
    if origin_type is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin_type is list:
        return f"list ({annotation_text(args[0])})"
    if origin_type is tuple:
        return "pair" if len(args) == 2 else "tuple"
    if origin_type is dict:
        return "table"
    return TYPE_NAMES.get(annotation, "file")


def default_text(field: FieldInfo) -> str:
    """Return the default of an option."""
    value = field.get_default(call_default_factory=True)
    if value in (None, "", [], {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


# ---- names of other programs -----------------------------------------------------------------------------------------

OPTIONS_HEAD = f"""# Names of {", ".join([*refused.TRAINERS, "Megatron"])} and of engines

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
    lines = [OPTIONS_HEAD, "## Synonyms", "", *table(("name", "means"), sorted(synonym_rows()))]
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
    """Yield (synonym, the flags that it stands for)."""
    for key, flags in refused.SYNONYMS.items():
        yield key, " ".join("VALUE" if word == "..." else word for flag in flags for word in flag)


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of two columns. The first column is set as code."""
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    yield from (f"| `{name}` | {cell(text)} |" for name, text in rows)


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- commands --------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return reference/commands.md."""
    lines = [
        "# Commands",
        "",
        "```text",
        cli.USAGE,
        "```",
        "",
        "Exit codes: 0 done, 1 failed, 2 an invalid request (one line on standard error), 130 Ctrl-C, 143 SIGTERM.",
        "Options of the store (`--store`, `--store-options`) and `--config` are those of",
        "[Configuration](configuration.md).",
        "",
    ]
    for command in cli.COMMANDS:
        lines += [f"## `penstock {command}` {{ #{command} }}", "", *command_entry(command), ""]
    return "\n".join(lines)


def command_entry(command: str) -> list[str]:
    """Return the text about one command: its help or, if that is long, its first line and a link to the options."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main([command, "--help"])
    text = out.getvalue().strip()
    if len(text.splitlines()) <= MAX_HELP_LINES:
        return ["```text", text, "```"]
    first = text.splitlines()[0]
    return ["```text", first, "```", "", "Takes the options of [Configuration](configuration.md)."]
