"""The help texts of the commands that take the options of a run: --help is short, --help-all has every option."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.backends import BACKENDS, engine_backend
from penstock.flows.config import OPTIONS, SECTIONS, SWITCHES, recipe_names
from penstock.flows.options.argv import flag_of_field
from penstock.flows.options.refused import OTHER_NAMES
from penstock.storage.config import field_meta

WIDTH = 118  # columns
MAX_ABOUT = 90  # characters about an option in the short help, unless its first sentence cannot be cut


COMMAND_OPTIONS = {  # options of the commands of SHORT that are not in the config: flag -> usage, description
    "--config": (
        "--config FILE.toml|RECIPE ...",
        "Read options from TOML files or from bundled recipes. Later files override earlier ones; flags override "
        f"files. The recipes are {', '.join(recipe_names())}.",
    ),
    "--dry-run": ("--dry-run", "Check the options, the data and the reward, print the plan, and start nothing."),
    "--verbose": ("--verbose", "Print Prefect's log lines, and the traceback of an error."),
    "--help-all": ("--help-all", "List all options."),
}


@dataclass(frozen=True)
class ShortHelp:
    """The short help of a command: what it does, an example, and its most used options (title -> flags)."""

    what: str
    example: str
    options: dict[str, str]
    see_also: str = ""


_RUN = "--run --store --num-rollout"
_DATA = "--prompt-data --input-key --label-key --apply-chat-template"
_GPUS = "--actor-num-gpus-per-node --tensor-model-parallel-size --max-tokens-per-gpu"
_ENGINES = "--rollout-num-gpus-per-engine --colocate"

SHORT: dict[str, ShortHelp] = {
    "train": ShortHelp(
        "Trains a policy by reinforcement learning: converts the model, then generates, grades, trains and publishes "
        "in rounds, with checkpoints and evaluations. The same command resumes the run.",
        "penstock train --hf-checkpoint DIR --prompt-data train.jsonl --label-key answer --rm-type math "
        "--num-rollout 100 --run my-run",
        {
            "run": _RUN,
            "model and data": f"--hf-checkpoint {_DATA}",
            "rollout": "--rollout-batch-size --n-samples-per-prompt --rollout-max-response-len --rollout-temperature "
            "--rm-type --custom-rm-path",
            "training": "--advantage-estimator --lr --lora-rank",
            "GPUs": f"{_GPUS} {_ENGINES}",
            "evaluation, checkpoints": "--eval-prompt-data --eval-interval --save-interval",
        },
        "--async-buffer-size 1 generates while a round is trained; --dry-run checks the options and prints the plan.",
    ),
    "sft": ShortHelp(
        "Trains a model on demonstrations: rows with messages; the assistant's messages are trained. No engine starts. "
        "The same command resumes the run.",
        "penstock sft --hf-checkpoint DIR --prompt-data chats.jsonl --input-key messages --num-epoch 1 --run my-sft",
        {
            "run": f"{_RUN} --num-epoch",
            "model and data": "--hf-checkpoint --prompt-data --input-key --rollout-batch-size --rollout-shuffle",
            "training": "--global-batch-size --lr --lr-warmup-iters --calculate-per-token-loss",
            "GPUs": _GPUS,
        },
    ),
    "eval": ShortHelp(
        "Scores a Hugging Face checkpoint on data sets: generates responses, grades them, commits the metrics.",
        "penstock eval --hf-checkpoint DIR --eval-prompt-data gsm8k test.jsonl --eval-label-key answer "
        "--eval-rm-type math --run my-eval",
        {
            "run": "--run --store",
            "model and data": "--hf-checkpoint --eval-prompt-data --eval-input-key --eval-label-key "
            "--apply-chat-template",
            "sampling": "--n-samples-per-eval-prompt --eval-temperature --eval-max-response-len",
            "score": "--eval-rm-type --pass-threshold",
            "GPUs": "--num-engines --rollout-num-gpus-per-engine",
        },
        "See also `penstock eval --compare --help` and `penstock regrade --help`.",
    ),
}

_PROGRAMS = (
    "Flags of Megatron-core are accepted unchanged, flags of an engine with its name as prefix (--ENGINE-NAME), flags "
    "of its router as --router-NAME."
)
_REFERENCE = (
    "The page options.html of the site that `make docs` builds lists every name, including those that are accepted "
    "without effect and those that are refused."
)
_RESUME = (
    "A resumed run keeps its model, data and algorithm options. Number of rounds, intervals, engines, GPUs, memory "
    "options and time limits may change."
)


def short_help(command: str) -> str:
    """Return the --help text of a command of `SHORT`: its most used options, each with the first sentence about it."""
    text = SHORT[command]
    fields = {flag_of_field(name): field for _, name, field in OPTIONS}
    lines = [f"penstock {command} [--config FILE.toml|RECIPE] [options]", "", *_wrap(text.what, "  "), ""]
    lines += textwrap.wrap(text.example, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    width = max(len(flag) for flags in text.options.values() for flag in flags.split())
    for title, flags in text.options.items():
        lines += ["", f"{title}:"]
        for flag in flags.split():
            about = f"{first_sentence(fields[flag].description or '')}{_default(fields[flag])}"
            wrapped = _wrap(about, " " * (width + 4))
            lines += [f"  {flag:<{width}}  {wrapped[0].lstrip()}", *wrapped[1:]]
    lines += ["", *_wrap(text.see_also)] if text.see_also else []
    other = (
        f"penstock {command} --help-all lists all {len(fields)} options, --help WORD those about a word. {_PROGRAMS}"
    )
    return "\n".join([*lines, *_wrap(other)])


def search_help(command: str, word: str) -> str:
    """Return the text of `penstock COMMAND --help WORD`. It lists the options that have the word in their name, then
    those for which an alias or another trainer's name has it, then those with the word in their description."""
    wanted = re.sub(r"[\W_]+", "-", word.lower()).strip("-")
    options = [(flag, usage, "", about) for flag, (usage, about) in COMMAND_OPTIONS.items()]
    for _, name, field in OPTIONS:
        flag = flag_of_field(name)
        others = [other for other, ours in OTHER_NAMES.items() if flag in ours.split()]
        about = " ".join((field.description or "").split())
        options.append((flag, f"{flag}{_default(field)}", " ".join([*field_meta(field).aliases, *others]), about))
    found: list[tuple[int, list[str]]] = []  # rank, lines about an option
    for flag, title, other_names, about in options:
        if wanted in f"{flag} {other_names}" or wanted in re.sub(r"[\W_]+", "-", about.lower()):
            rank = 0 if wanted in flag else 1 if wanted in other_names else 2
            found.append((rank, [f"  {title}", *_wrap(about, " " * 6)]))
    found.sort(key=lambda each: each[0])
    count = "1 option" if len(found) == 1 else f"{len(found)} options"
    title = f"{count} of penstock {command} about {word!r}:" if found else f"no option is about {word!r}"
    return "\n".join([title, *(line for _, lines in found for line in lines)])


def full_help(command: str, usage: str, *, may_change_only: bool = False) -> str:
    """Return the --help-all text of a command: its usage, and all options by section with their defaults, or only those
    that a resumed run may change (`may_change_only`)."""
    lines = [usage, "", "OPTIONS OF PENSTOCK, in a file below [section]"]
    section = ""
    for owner, name, field in OPTIONS:
        if may_change_only and field_meta(field).mutability == "identity":
            continue
        if owner != section:
            section = owner
            lines += ["", f"[{section}]"]
            lines += _wrap(about_section(section), "  ") if section in SWITCHES else []
        spellings = " ".join([flag_of_field(name), *(f"--{alias}" for alias in field_meta(field).aliases)])
        lines += [f"  {spellings}{_default(field)}", *_wrap(field.description or "", " " * 6)]
    lines.append("")
    if may_change_only:
        lines += _wrap(_PROGRAMS)
    else:
        for engine in BACKENDS:
            backend = engine_backend(engine)
            where = f"with the prefix --{engine}- (in a file below [rollout.engine_options])"
            lines += ["", f"OPTIONS OF {backend.title.upper()}, {where}", "", *_wrap(backend.help, "  "), ""]
        lines += _wrap(_REFERENCE)
    return "\n".join([*lines, *_wrap(_RESUME)])


def about_section(section: str) -> str:
    """Return the description of an optional section, and the flags that add and remove it."""
    flag = SWITCHES[section]
    about = f"{flag} adds the section, and so does each of its options; --no-{flag[2:]} removes it."
    return f"{SECTIONS[section].__doc__} {about}"


def flow_usage(command: str) -> str:
    """Return what --help-all prints above the options of a run for a command of `SHORT`: its usage, what it does, and
    the options of the command itself."""
    usage = [f"penstock {command} [--config FILE.toml|RECIPE] [options]", "", *_wrap(SHORT[command].what, "  ")]
    usage += ["", *_wrap(SHORT[command].see_also, "  ")] if SHORT[command].see_also else []
    usage.append("")
    for title, about in COMMAND_OPTIONS.values():
        usage += [f"  {title}", *_wrap(about, " " * 6)]
    return "\n".join(usage)


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, cut at a semicolon or colon outside parentheses if it is long."""
    line = " ".join(text.split()).partition(". ")[0].rstrip(".")
    ends = [match.start() for match in re.finditer("[;:] ", line)]
    ends = [end for end in ends if end > 20 and line[:end].count("(") == line[:end].count(")")]
    return line[: ends[0]] if len(line) > MAX_ABOUT and ends else line


def _default(field: Any) -> str:
    """Return ` (default X)`; nothing for a switch that is off and for an empty default."""
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    return "" if value is False or value in (None, "", [], {}) else f" (default {value})"


def _wrap(text: str, indent: str = "") -> Sequence[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) or [""]
