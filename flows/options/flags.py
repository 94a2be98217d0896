"""Parse flags: Penstock's own, an engine's as `--<engine>-NAME`, its router's as `--router-NAME`.

Penstock's flags are the config fields (flows/config.py); a flag of an optional section creates the section, and
`--no-SECTION` removes one that a file has. An unknown flag is an error that suggests the nearest known one. An engine's
flags are checked later, by its backend.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.engines.backends import BACKENDS, DEFAULT
from penstock.flows.config import (
    OPTIONS,
    SECTIONS,
    SWITCHES,
    PostTrainConfig,
    create_section,
    read_config_text,
    read_toml,
    validate_config,
)
from penstock.flows.options.argv import flag_of_field, short_repr
from penstock.flows.options.paths import FUNCTIONS
from penstock.flows.options.refused import (
    ACCEPTED,
    LISTED,
    OTHER_NAMES,
    apply_listed_flag,
    log_once,
    synonym_of,
)
from penstock.flows.run_config import RunConfig
from penstock.stages.eval.data_sets import parse_yaml
from penstock.storage.config import field_meta, section_model
from penstock.storage.errors import OptionError, check_rules, nearest_name

Values = dict[str, dict[str, Any]]
STORE_FLAGS = ("--store", "--store-options", "--store-single-writer")
# Dashes and minus signs that text copied from a web page may have instead of hyphens.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"


def parse_config(argv: Sequence[str]) -> PostTrainConfig:
    """Return the config of `--config` files and flags. Later files override earlier ones; flags override files."""
    return validate_config(parse_values(argv))


def parse_store_options(argv: Sequence[str], command: str) -> RunConfig:
    """Return the store options of `penstock COMMAND`, a command that takes no other options.

    Other options are ignored in a `--config` file and rejected on the command line.
    """
    for name, _ in split_flags(argv):
        if name != "--config" and name not in STORE_FLAGS:
            is_known = name in penstock_flags() or name.startswith(engine_prefixes())
            problem = f"{name} has no effect on penstock {command}, which takes {', '.join(STORE_FLAGS)}: leave it out"
            raise OptionError(problem if is_known else describe_unknown_flag(name, STORE_FLAGS))
    return store_options_from_values(parse_values(argv))


def parse_values(argv: Sequence[str], base_values: Values | None = None) -> Values:
    """Return section -> option -> value from a command line and its `--config` files, not validated. The files and
    flags update `base_values` in place, if it is given."""
    values: Values = {} if base_values is None else base_values
    occurrences = split_flags(argv)
    problem = "--config needs a value: the path of a TOML file or the name of a bundled recipe"
    check_rules((name == "--config" and not any(args), problem) for name, args in occurrences)
    for path in [path for name, args in occurrences if name == "--config" for path in args]:
        merge_values(values, read_toml(path))
    options_set: set[str] = set()
    for name, args in occurrences:
        if name != "--config":
            apply_flag(values, name, args, options_set)
    engine = values.get("rollout", {}).get("engine", DEFAULT)
    passed_on = [name for name, _ in occurrences if name.startswith(engine_prefixes()) and name not in penstock_flags()]
    rules = (
        (
            (program := name.removeprefix("--").partition("-")[0]) not in ("router", engine),
            f"{name} is an option of --engine {program}, but --engine is {engine}: omit {name}, or give --engine "
            f"{program}",
        )
        for name in passed_on
    )
    check_rules(rules)
    apply_custom_config(values)
    return values


def merge_values(values: Values, new: Values) -> None:
    """Update `values` with the options of `new`. If an option is a table in both, the entries of the tables are
    merged."""
    for section, entries in new.items():
        target = values.setdefault(section, {})
        for key, value in entries.items():
            old = target.get(key)
            target[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def apply_custom_config(values: Values) -> None:
    """Set the options that the YAML file of --custom-config-path names. They override flags. A name that no option has
    becomes an attribute of the `args` of user-defined functions (--plugin-args).

    The path of the file is removed from `values`, because the run records the options themselves.
    """
    debug = values.get("debug")
    path = debug.get("custom_config_path") if isinstance(debug, dict) else None
    if not isinstance(debug, dict) or not isinstance(path, str):
        return  # not given, or refused when the config is validated
    del debug["custom_config_path"]
    for key, value in _read_yaml(path).items():
        flag = flag_of_field(key)
        section, name, nested = "rollout", "plugin_args", key
        words = [] if value is True or isinstance(value, dict | list) else [str(value)]  # no synonym takes a table
        negates = flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in penstock_flags()
        stands_for = synonym_of(flag, [] if value is False else words)
        if value is False and (negates or stands_for):
            continue  # false: the switch is not set
        if negates or stands_for or flag in SWITCHES.values():
            apply_flag(values, flag, words, set())
            continue
        if flag in penstock_flags():
            section, name, _ = penstock_flags()[flag]
            create_section(values, section)[name] = value
            continue
        if flag.startswith(engine_prefixes()):
            name, nested = name_engine_option(flag)
        values.setdefault(section, {}).setdefault(name, {})[nested] = value


def _read_yaml(path: str) -> dict[str, Any]:
    """Return option name (with underscores) -> value of the YAML file of --custom-config-path."""
    import yaml

    text = read_config_text(path, "--custom-config-path", "YAML")
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:150]
        raise OptionError(f"--custom-config-path {path} is not valid YAML ({reason}): correct it") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise OptionError(
            f"--custom-config-path {path} is not a mapping: write one `option_name: value` on each line, without dashes"
        )
    return {name.removeprefix("--").replace("-", "_"): value for name, value in values.items()}


def store_options_from_values(values: Values) -> RunConfig:
    """Return the store options (--store, --store-options, ...) among the values of a command line."""
    stores = {name: value for name, value in values.get("run", {}).items() if name.startswith("store")}
    return validate_config({"run": stores}).run


def update_config_from_argv(config: PostTrainConfig, argv: Sequence[str]) -> PostTrainConfig:
    """Return a config updated by the options of a command line. Batch sizes and numbers of rounds that were derived
    from options are derived again."""
    given, values = parse_values(argv), config.model_dump(mode="json")
    sizes = {"rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"}
    # An earlier derived value must not contradict a value of the command line.
    if sizes & {*given.get("rollout", {}), *given.get("train", {})}:
        values["train"]["global_batch_size"] = None
    elif "global_batch_size" in given.get("train", {}):
        values["train"]["num_steps_per_rollout"] = None
    run = {"num_epoch": values["run"]["num_epoch"], **given.get("run", {})}
    if values["run"]["num_epoch"] is not None and run["num_epoch"] is not None and "num_rollout" not in run:
        values["run"]["num_rollout"] = 0
    return validate_config(parse_values(argv, values))


def split_flags(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line: `--a 1 --b --c=x y` -> [("--a", ["1"]), ("--b", []), ("--c", ["x", "y"])]."""
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            flags.append((name.replace("_", "-"), [value] if equals else []))
            continue
        is_mistyped = word == "--" or (len(word) > 2 and word[0] in _DASHES and not word[1:2].isdecimal())
        advice = "write it with two hyphens (ASCII 45) and a name, --name value"
        rules = (
            (is_mistyped, f"{short_repr(word)} is not a flag: {advice}"),
            (not flags, f"{short_repr(word)} is before the first flag: write options as --name value"),
        )
        check_rules(rules)
        flags[-1][1].append(word)
    return flags


@cache
def penstock_flags() -> dict[str, tuple[str, str, Any]]:
    """Return Penstock's flags, including aliases and the switches that add optional sections: flag -> (section, field
    name, field)."""
    table: dict[str, tuple[str, str, Any]] = {}
    for section, name, field in OPTIONS:
        for spelling in (flag_of_field(name), *(f"--{alias}" for alias in field_meta(field).aliases)):
            assert spelling not in table, f"{spelling} means both {table.get(spelling)} and {section}.{name}"
            table[spelling] = (section, name, field)
    for path, switch in SWITCHES.items():
        section, _, name = path.rpartition(".")
        table[switch] = (section, name, SECTIONS[section].model_fields[name])
    return table


def apply_flag(values: Values, name: str, args: list[str], options_set: set[str]) -> None:
    """Set the option of one flag in `values`.

    Args:
        values: section -> option -> value, updated in place.
        name: the flag.
        args: the arguments of the flag.
        options_set: the options (`section.name`) that earlier flags have set, updated in place. The first flag of an
            option replaces the value from a file; a repeated flag of a list or dict option extends the list or dict.
    """
    own = penstock_flags()
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else None
    if synonyms := synonym_of(name, args):
        for flag, words in synonyms:
            apply_flag(values, flag, words, options_set)
    elif name in own and " ".join([name, *args]) not in ACCEPTED:
        apply_own_flag(values, name, args, options_set)
    elif positive in own and (section_model(own[positive][2]) or bool in member_types(own[positive][2].annotation)):
        if args:
            raise OptionError(f"{name} is a switch and takes no value; found {short_repr(args[0])}")
        section, key, field = own[positive]
        create_section(values, section)[key] = None if section_model(field) else False
    elif name in LISTED:
        apply_listed_flag(name, args)
    elif name.startswith(engine_prefixes()):
        option, key = name_engine_option(name)
        values.setdefault("rollout", {}).setdefault(option, {})[key] = parse_literal(args)
    else:
        raise OptionError(describe_unknown_flag(name, [*own]))


def apply_own_flag(values: Values, name: str, args: list[str], options_set: set[str]) -> None:
    """Set the option of one of Penstock's flags in `values`; the arguments are those of `apply_flag`."""
    section, key, field = penstock_flags()[name]
    target = create_section(values, section)
    if section_model(field) and parse_value(name, bool, args):
        create_section(target, key)
        return
    if section_model(field):
        target[key] = None
        return
    if name != flag_of_field(key):
        log_once(name, f"means {flag_of_field(key)}")
    new = parse_value(name, field.annotation, args)
    is_repeated = f"{section}.{key}" in options_set and key in target
    if is_repeated and isinstance(new, dict) and isinstance(target[key], dict):
        new = {**target[key], **new}
    elif is_repeated and isinstance(new, list):
        new = [*target[key], *new]
    elif is_repeated and key in FUNCTIONS.get(section, ()) and new != target[key]:
        log_once(name, f"{new} replaces {target[key]}, because only one function is called")
    target[key] = new
    options_set.add(f"{section}.{key}")


def engine_prefixes() -> tuple[str, ...]:
    """Return the prefixes of the flags that are passed to an engine or to its router."""
    return *(f"--{engine}-" for engine in BACKENDS), "--router-"


def name_engine_option(flag: str) -> tuple[str, str]:
    """Return what a flag of an engine or of its router sets: a dict option of section `rollout`, and the key in it.
    For example `--ENGINE-log-level` sets `log_level` in `engine_options`."""
    program, _, key = flag.removeprefix("--").replace("-", "_").partition("_")
    return ("router" if program == "router" else "engine_options"), key


def describe_unknown_flag(name: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown flag."""
    hint = did_you_mean(name, known) or ": `penstock train --help-all` lists them"
    if name == "--dry-run":
        hint = ": train, sft, eval and resume have it"
    return f"unknown flag {short_repr(name)[1:-1]}{hint}"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return `: did you mean X?`, or an empty string if no known word is near. If the known words are the flags of a
    run, the names that other trainers use lead to our flags as well."""
    plain = {name.lstrip("-"): name for name in known}
    if "--lr" in known:
        plain = {name: " or ".join(flags.split()) for name, flags in OTHER_NAMES.items()} | plain
    near = nearest_name(word.lstrip("-"), plain)
    return f": did you mean {plain[near]}?" if near else ""


def parse_value(name: str, annotation: Any, args: list[str]) -> Any:
    """Return the arguments of the flag `name` as a bool, list, dict, text or None, depending on the type of the option
    (`annotation`). Pydantic checks the value later and converts numbers."""
    kinds, text = member_types(annotation), " ".join(args)
    [item] = typing.get_args(kinds.get(list)) or [None]
    size = len(typing.get_args(item)) if typing.get_origin(item) is tuple else 1  # NAME PATH pairs
    is_switch, takes_one, found = bool in kinds, not kinds.keys() & {bool, list, dict}, f"found {short_repr(text)}"
    rules = (
        (
            is_switch and args and text.lower() not in ("true", "false"),
            f"{name} is a switch and takes no value; {found}",
        ),
        (not is_switch and not args, f"{name} needs a value: give one after it"),
        (list in kinds and len(args) % size, f"{name} takes {size} values at a time (NAME PATH); {found}"),
        (takes_one and len(args) > 1, f"{name} takes one value; {found}"),
    )
    check_rules(rules)
    if is_switch:
        return not args or text.lower() == "true"
    if list in kinds:
        return args if size == 1 else [args[i : i + size] for i in range(0, len(args), size)]
    if dict in kinds and not (str in kinds and len(args) == 1 and not re.match(r"[\w-]+=|\{", args[0])):
        return parse_dict(name, args)
    return None if text.lower() == "none" else text


def parse_dict(name: str, args: list[str]) -> dict[str, Any]:
    """Return the value of a dict option: a JSON object or key=value pairs."""
    if len(args) == 1 and args[0].lstrip().startswith("{"):
        try:
            value: dict[str, Any] = json.loads(args[0])
        except (ValueError, RecursionError) as error:
            raise OptionError(
                f"{name} takes a JSON object or key=value pairs; the JSON is malformed ({str(error)[:80]}): correct it"
            ) from None
        return value
    check_rules(("=" not in arg[1:], f"{name} takes key=value pairs; found {short_repr(arg)}") for arg in args)
    return {key: parse_literal([value]) for key, _, value in (arg.partition("=") for arg in args)}


def member_types(annotation: Any) -> dict[Any, Any]:
    """Return the members of a union type, or the type itself, by their class: `list[int] | None` -> {list: list[int],
    NoneType: NoneType}."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return {typing.get_origin(member) or member: member for member in members}


def parse_literal(args: list[str]) -> Any:
    """Return the value of an option whose type is unknown, because it belongs to an engine, its router or fsspec: a
    number, bool, JSON value or text, whichever the argument looks like. Without arguments the value is True; several
    arguments make a list."""
    if not args:
        return True
    if len(args) > 1:
        return [parse_literal([arg]) for arg in args]
    text = args[0]
    if text[:1] in ("{", "[", '"'):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
