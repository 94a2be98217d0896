"""The command line's three families: our own flags, Megatron's unchanged, SGLang's with `--sglang-` in front and its router's with
`--router-`.

Our flags are the config fields themselves (flows/config.py); Megatron's and SGLang's names are read from the installed packages. An unknown
flag is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any

from flows.config import PostTrainConfig, RunConfig, flag, options, read_toml, validated
from flows.words import shown
from storage.config import extra_of
from storage.errors import OptionError

Values = dict[str, dict[str, Any]]
STORE_FLAGS = ("--store", "--store-options", "--store-single-writer")
ENGINE_PREFIXES = ("--sglang-", "--router-")  # behind them come SGLang's and its router's own names
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"  # look like a hyphen, and come with copied text


def parse(argv: Sequence[str]) -> PostTrainConfig:
    """The config of `--config FILE.toml` (any number, later ones win) and flags (which win over files).

    Raises:
        InputError: unknown flag, missing value, or whatever the config refuses; one sentence.
    """
    return validated(values_of(argv))


def parse_store(argv: Sequence[str], command: str) -> RunConfig:
    """Return where the store of `penstock COMMAND` is. A `--config` file may hold other options, the command line may not.

    Raises:
        OptionError: an option that the command would ignore.
    """
    for name, _ in split(argv):
        if name != "--config" and name not in STORE_FLAGS:
            if name not in own_flags() and not name.startswith(ENGINE_PREFIXES) and name not in megatron_flag_names():
                raise OptionError(unknown_flag(name, STORE_FLAGS))
            raise OptionError(f"{name} has no effect on penstock {command}, which takes {', '.join(STORE_FLAGS)}: leave it out")
    values = values_of(argv).get("run", {})
    names = [name.removeprefix("--").replace("-", "_") for name in STORE_FLAGS]
    return validated({"run": {name: values[name] for name in names if name in values}}).run


def values_of(argv: Sequence[str], onto: Values | None = None) -> Values:
    """What a command line and its `--config` files say, over `onto`; not yet validated.

    Raises:
        OptionError: unknown flag or missing value.
    """
    values: Values = {} if onto is None else onto
    given = split(argv)
    for name, words in given:
        if name == "--config" and not any(words):
            raise OptionError("--config needs a value: the path of a TOML file")
    for path in [path for name, words in given if name == "--config" for path in words]:
        _merge(values, read_toml(path))
    cleared: set[str] = set()
    for name, words in given:
        if name != "--config":
            _apply(values, name, words, cleared)
    return values


def split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line: `--a 1 --b --c=x y` -> [("--a", ["1"]), ("--b", []), ("--c", ["x", "y"])].

    Raises:
        OptionError: a word before the first flag, `--` alone, or a flag with another character in place of its hyphens.
    """
    out: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            out.append((name.replace("_", "-"), [value] if equals else []))
        elif word == "--" or (len(word) > 2 and word[0] in _DASHES and not word[1:2].isdecimal()):
            raise OptionError(f"{shown(word)} is not a flag: write it with two hyphens (ASCII 45) and a name, --name value")
        elif out:
            out[-1][1].append(word)
        else:
            raise OptionError(f"{shown(word)} stands before the first flag: options are written --name value")
    return out


@cache
def own_flags() -> dict[str, tuple[str, str, Any]]:
    """Flag -> (section, field name, field), every spelling included."""
    table: dict[str, tuple[str, str, Any]] = {}
    for section, name, field in options():
        for spelling in (flag(name), *(f"--{alias}" for alias in extra_of(field)["aliases"])):
            assert spelling not in table, f"{spelling} stands for both {table.get(spelling)} and {section}.{name}"
            table[spelling] = (section, name, field)
    return table


def _apply(values: Values, name: str, words: list[str], cleared: set[str]) -> None:
    own = own_flags()
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else None
    if name in own:
        section, key, field = own[name]
        target = values.setdefault(section, {})
        new = _value(name, field.annotation, words)
        repeatable = (
            isinstance(new, list | dict) and f"{section}.{key}" in cleared
        )  # a file's list is replaced, a repeated flag's grows
        target[key] = _joined(target[key], new) if repeatable else new
        cleared.add(f"{section}.{key}")
    elif positive in own and _is(own[positive][2].annotation, bool):
        if words:
            raise OptionError(f"{name} is a switch, it takes no value; found {shown(words[0])}")
        values.setdefault(own[positive][0], {})[own[positive][1]] = False
    elif name.startswith(ENGINE_PREFIXES):
        program, _, key = name.removeprefix("--").partition("-")
        values.setdefault("rollout", {}).setdefault(program, {})[key.replace("-", "_")] = _literal(words)
    elif name in (engine := megatron_flag_names()):
        values.setdefault("train", {}).setdefault("megatron", {})[engine[name]] = _literal(words)
    else:
        raise OptionError(unknown_flag(name, [*own, *engine]))


@cache
def megatron_flag_names() -> dict[str, str]:
    """Megatron's flags -> field names, read from the installed package's source."""
    from engines.megatron.args import megatron_flags

    return {flag(name): name for name in megatron_flags()}


def unknown_flag(name: str, known: Sequence[str]) -> str:
    """One sentence with the nearest known flag."""
    return f"unknown flag {shown(name)[1:-1]}{nearest(name, known) or ': `penstock train --help` lists them'}"


def nearest(word: str, known: Sequence[str]) -> str:
    """`: did you mean X?`, or nothing if nothing is near."""
    near = difflib.get_close_matches(word[:64], known, n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else ""


def help_text(command: str) -> str:
    """All options by section, with defaults and what a resumed run may do with them."""
    spelled = {"post_train": "train", "evaluate": "eval"}.get(command, command)
    lines = [f"penstock {spelled} [--config FILE.toml] [options]"]
    section = ""
    for owner, name, field in options():
        if owner != section:
            section = owner
            lines += ["", f"[{section}]"]
        extra = extra_of(field)
        spellings = " ".join([flag(name), *(f"--{alias}" for alias in extra["aliases"])])
        default = "" if field.is_required() else f" (default {field.get_default(call_default_factory=True)!r})"
        lines.append(f"  {spellings}{default}")
        lines += [f"      {line}" for line in textwrap.wrap(field.description or "", 110)]
    lines += [
        "",
        "Megatron-core's own flags are taken unchanged, SGLang's with --sglang- in front and its router's with --router-. Times of change:",
        "a resumed run keeps model, data and algorithm options; schedule and placement options may change.",
    ]
    return "\n".join(lines)


def _value(name: str, annotation: Any, words: list[str]) -> Any:
    """Words of the command line as what pydantic will check (it converts numbers itself)."""
    if _is(annotation, bool):
        if words and words[0].lower() not in ("true", "false"):
            raise OptionError(f"{name} is a switch, it takes no value; found {shown(words[0])}")
        if len(words) > 1:
            raise OptionError(f"{name} is a switch, it takes no value; found {shown(' '.join(words))}")
        return not words or words[0].lower() == "true"
    if not words:
        raise OptionError(f"{name} needs a value")
    if inner := _list_item(annotation):
        if typing.get_origin(inner) is tuple:  # NAME PATH pairs
            size = len(typing.get_args(inner))
            if len(words) % size:
                raise OptionError(f"{name} takes {size} words at a time (NAME PATH); found {shown(' '.join(words))}")
            return [words[i : i + size] for i in range(0, len(words), size)]
        return list(words)
    if _is(annotation, dict) and len(words) == 1 and words[0].lstrip().startswith("{"):
        return _json_object(name, words[0])
    if _is(annotation, dict):
        pairs = [word.partition("=") for word in words]
        if bad := [word for word, equals, _ in pairs if not equals]:
            raise OptionError(f"{name} takes key=value words; found {shown(bad[0])}")
        if any(not key for key, _, _ in pairs):
            raise OptionError(f"{name} takes key=value words; found one without a key: {shown(' '.join(words))}")
        return {key: _literal([value]) for key, _, value in pairs}
    if len(words) > 1:
        raise OptionError(f"{name} takes one value; found {shown(' '.join(words))}")
    return None if words[0].lower() == "none" else words[0]


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"{name} takes a JSON object or key=value words; the JSON is malformed ({str(error)[:80]}): repair it"
        ) from None
    assert isinstance(value, dict), "JSON that begins with a brace is an object"
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is(annotation: Any, kind: type) -> bool:
    return any(option is kind or typing.get_origin(option) is kind for option in _alternatives(annotation))


def _list_item(annotation: Any) -> Any:
    for option in _alternatives(annotation):
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


def _literal(words: list[str]) -> Any:
    """An engine's or a file system's value: number, switch, JSON or text; several words make a list."""
    if not words:
        return True
    if len(words) > 1:
        return [_literal([word]) for word in words]
    word = words[0]
    if word[:1] in ("{", "[", '"'):
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return word
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _joined(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(new, dict) else [*old, *new]


def _merge(into: Values, values: Values) -> None:
    for section, entries in values.items():
        for key, value in entries.items():
            old = into.setdefault(section, {}).get(key)
            into[section][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
