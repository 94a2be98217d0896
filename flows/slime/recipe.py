"""`penstock import-slime`: translate a slime launch script into a recipe, a TOML file for `penstock train --config`.

Every flag that the script gives to `train.py` or `train_async.py` becomes an option, or a comment that says why it does
not. Nothing of the script is executed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.engines.backends import engine_backend
from penstock.flows.config import SECTIONS, SWITCHES, PostTrainConfig, option_value, validate_config
from penstock.flows.options.argv import flag_of_field, short_repr, split_args
from penstock.flows.options.flags import (
    Values,
    apply_custom_config,
    apply_flag,
    did_you_mean,
    engine_prefixes,
    penstock_flags,
    split_flags,
)
from penstock.flows.options.refused import ACCEPTED, LISTED, REFUSED
from penstock.flows.runtime.runner import run_flow
from penstock.flows.slime.flag_table import OF_MODEL
from penstock.flows.slime.shell import Script, read_script
from penstock.storage.config import entries_of, field_meta
from penstock.storage.errors import EngineError, ModelError, OptionError
from penstock.storage.secrets import is_secret_name

USAGE = """penstock import-slime SCRIPT.sh [--output FILE.toml] [--run]

Translates a slime launch script into a recipe for `penstock train --config`. The script is read, never executed: its
variables, arrays and sourced model files are followed. Every flag becomes an option, or a comment with the reason.

  --output FILE   write the recipe to FILE instead of standard output; an existing file is not replaced
  --run           start the recipe"""
PROGRAMS = ("train.py", "train_async.py")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
UNKNOWN = re.compile(r"<[^>]+>")  # a value that `read_script` could not compute
# If the path of one of these contains an unknown variable, the recipe has it anyway, and the user completes it.
INPUTS = ("hf_checkpoint", "ref_load", "prompt_data", "eval_prompt_data")
# Names of models with supported architectures, and parts of names that mark models with other architectures.
SUPPORTED = re.compile(
    r"(glm-?4|glm-?z1|qwen-?2|qwen-?3|deepseek-?v3|deepseek-?r1|llama-?3|kimi-?k2|moonlight)", re.IGNORECASE
)
OTHER_ARCHITECTURE = re.compile(
    r"-next|-vl|omni|qwen-?3\.[5-9]|qwen3[5-9]|v3\.?2|k2\.5|glm-?4\.?\d?v|glm-?5|mimo|minimax|gpt-oss|gemma|nemotron",
    re.IGNORECASE,
)


@dataclass
class Recipe:
    """The translation of a script."""

    script: Path
    program: str  # train.py or train_async.py
    config: PostTrainConfig
    values: Values  # section -> option -> value
    comments: dict[tuple[str, str], str] = field(default_factory=dict)  # (section, option) -> comment
    dropped: list[str] = field(default_factory=list)  # flags that did not become options: "--flag value: reason"
    environment: list[str] = field(default_factory=list)  # names of variables that the script exports

    @property
    def flow(self) -> str:
        """Return the flow that runs the recipe."""
        return "sft" if self.config.train.loss_type == "sft_loss" else "train"


def main(argv: list[str]) -> int:
    """Run `penstock import-slime`. Return 0, or with --run the exit code of the run."""
    positional, own, rest = split_args(argv, {"--output": True, "--run": False})
    if rest or len(positional) != 1:
        found = f"; found {short_repr(' '.join([*positional, *rest]))}" if positional or rest else ""
        raise OptionError(f"penstock import-slime needs one script{found}: penstock import-slime SCRIPT.sh")
    recipe = import_script(Path(positional[0]))
    text = format_recipe(recipe)
    if "--output" in own:
        try:
            with Path(own["--output"]).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise OptionError(f"{own['--output']} exists: give --output another name") from None
        print(f"wrote {own['--output']}; dropped {len(recipe.dropped)} flags, each with the reason in a comment")
    elif "--run" not in own:
        print(text, end="")
    if "--run" not in own:
        return 0
    for line in recipe.dropped:
        print(f"dropped: {line}", file=sys.stderr)
    return run_flow(recipe.flow, recipe.config)


def import_script(path: Path) -> Recipe:
    """Return the recipe of a slime launch script. Raises an InputError if it cannot be translated."""
    secret = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
    environment = {k: v for k, v in os.environ.items() if not is_secret_name(k) and not secret.search(k.upper())}

    def find_source(source: str) -> Path | None:
        """Return the file that the script sources: at its path, in `models/` next to the script, or in
        `scripts/models/` of a folder above it."""
        name = Path(source).name
        candidates = [Path(source), path.parent / source, path.parent / "models" / name]
        candidates += [parent / "scripts" / "models" / name for parent in path.resolve().parents]
        return next((file for file in candidates if "<" not in str(file) and file.is_file()), None)

    try:
        script = read_script(path, find_source, environment)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"script {path} cannot be read ({reason}): give a slime launch script") from None
    program, argv = find_training_command(script, path)
    check_architecture(script, path, argv)
    recipe = Recipe(path, program, PostTrainConfig(), {}, environment=sorted(script.exported))
    recipe.dropped += [
        f"source {source}: does not exist here; a file with options of the model is not needed"
        for source in script.not_found
    ]
    translate_flags(recipe, argv)
    adapt(recipe)
    adapt_files(recipe)
    recipe.config = validate_config(recipe.values)
    recipe.dropped += [
        f"{name}: set in the environment of this command, not in the script" for name in sorted(script.from_environment)
    ]
    return recipe


def find_training_command(script: Script, path: Path) -> tuple[str, list[str]]:
    """Return the program (train.py or train_async.py) that a script runs, and its arguments."""
    for number, words in enumerate(script.commands):
        for position, word in enumerate(words):
            if (name := word.rpartition("/")[2]) in PROGRAMS:
                argv = words[position + 1 :]
                # Commands that begin with `--` are arguments before which the script lacks a backslash.
                for rest in script.commands[number + 1 :]:
                    if not rest[0].startswith("--"):
                        break
                    argv += rest
                return name, argv
    raise OptionError(f"script {path} runs neither {' nor '.join(PROGRAMS)}: give a slime launch script")


def check_architecture(script: Script, path: Path, argv: list[str]) -> None:
    """Check that the architecture of a script's model is supported, judging by the name of the model file that the
    script sources, and of the checkpoint in `argv`. Raises ModelError."""
    names = [Path(source).stem for source in script.sourced if "models/" in source]
    checkpoints = [Path(word).name for flag, word in pairwise(argv) if flag == "--hf-checkpoint"]
    names = [name for name in names if not UNKNOWN.search(name)]
    refused = [name for name in names if not SUPPORTED.match(name) or OTHER_ARCHITECTURE.search(name)]
    for name in refused or [name for name in checkpoints if OTHER_ARCHITECTURE.search(name)]:
        raise ModelError(
            f"script {path} trains {name}, whose architecture is not supported: docs/models.md lists the families, "
            "and --model-family-path adds one"
        )


# ---- flags -----------------------------------------------------------------------------------------------------------


def translate_flags(recipe: Recipe, argv: list[str]) -> None:
    """Set the values of the recipe from the arguments of train.py. Raises one OptionError that lists all unknown
    flags."""
    unknown, options_set, num_of_model = [], set[str](), 0
    for name, args in split_flags(argv):
        own = penstock_flags().get(name)
        text = " ".join([name, *args])
        if own is None and not (name in LISTED or name.startswith(engine_prefixes())):
            positive = "--" + name.removeprefix("--no-")
            if positive not in penstock_flags():
                unknown.append(name + did_you_mean(name, [*penstock_flags()]).rstrip("?"))
                continue
        if REFUSED.get(name) == OF_MODEL:
            num_of_model += 1
            continue
        if reason := ACCEPTED.get(text, ACCEPTED.get(name)):
            recipe.dropped.append(f"{text}: {reason}")
            continue
        if any(UNKNOWN.search(arg) for arg in args) and not (args := resolve_unknown(recipe, name, args)):
            continue
        try:
            if own is None and name.startswith(engine_prefixes()) and name not in LISTED:  # SGLang's or its router's
                program, _, key = name.removeprefix("--").partition("-")
                engine_backend("sglang").check_args({key: args}, router=program == "router")
            apply_flag(recipe.values, name, args, options_set)
        except (OptionError, EngineError) as error:
            recipe.dropped.append(f"{text}: {error}")
            continue
        if own is not None and flag_of_field(own[1]) != name:
            recipe.comments.setdefault((own[0], own[1]), f"{name} in the script")
    if num_of_model:
        recipe.dropped.append(f"{num_of_model} options that describe the model: config.json has them")
    if unknown:
        raise OptionError(f"script {recipe.script} has unknown flags: {'; '.join(unknown)}")


def resolve_unknown(recipe: Recipe, name: str, args: list[str]) -> list[str]:
    """Return the arguments that the recipe has for a flag of which some arguments are known only when the script runs.
    A path of INPUTS is kept with a comment, and a secret becomes a reference to its environment variable. For any other
    flag return [], after adding it to the dropped flags."""
    own = penstock_flags().get(name)
    if own is not None and own[1] in INPUTS:
        names = ", ".join(sorted(set(re.findall(r"<(\w+)>", " ".join(args)))))
        recipe.comments[own[0], own[1]] = f"write the path, or set {names} before `penstock import-slime`"
        return args
    if own is not None and field_meta(own[2]).secret:
        return [f"env:{arg[1:-1]}" if re.fullmatch(r"<\w+>", arg) else arg for arg in args]
    first = next(arg for arg in args if UNKNOWN.search(arg))
    recipe.dropped.append(f"{' '.join([name, *args])}: {first} is known only when the script runs")
    return []


def adapt(recipe: Recipe) -> None:
    """Change values that slime accepts but Penstock's checks would refuse, name the run, and let a run of
    train_async.py generate one rollout ahead. Each changed value gets a comment."""
    run, train, rollout = (recipe.values.setdefault(name, {}) for name in ("run", "train", "rollout"))
    ahead = {"async_buffer_size", "async_mode"}
    if train.get("loss_type") == "sft_loss":
        for name in (ahead | {"debug_train_only"}) & run.keys():
            recipe.dropped.append(f"{flag_of_field(name)} {run.pop(name)}: SFT has no engines")
    elif recipe.program == "train_async.py" and not ahead & run.keys():
        run["async_buffer_size"] = 1
        recipe.comments["run", "async_buffer_size"] = "train_async.py generates one rollout ahead"
    if not run.get("run") and not run.get("save"):
        run["run"] = re.sub(r"[^A-Za-z0-9._-]", "-", recipe.script.stem)
        recipe.comments["run", "run"] = "the script has no --save, which names the run"
    if isinstance(opd := train.get("opd"), dict) and "opd_teacher_load" not in opd and "rm_url" in rollout:
        opd["opd_teacher_url"] = rollout.pop("rm_url").removesuffix("/generate")
        recipe.comments["train.opd", "opd_teacher_url"] = "--rm-url in the script"
        if path := rollout.pop("custom_rm_path", None):
            recipe.dropped.append(f"--custom-rm-path {path}: the run itself asks the teacher for its log-probs")
        if "rm_type" not in rollout:
            rollout["rm_type"] = "zero"
            recipe.comments["rollout", "rm_type"] = "the teacher's log-probs are the only training signal"
    if rollout.get("engine_options", {}).get("enable_deterministic_inference"):
        rollout.setdefault("rollout_sampling_seeds", True)
        comment = "slime does so with --sglang-enable-deterministic-inference"
        recipe.comments["rollout", "rollout_sampling_seeds"] = comment


def adapt_files(recipe: Recipe) -> None:
    """Give each round a file of its own in the paths for debugging data, read the file of --custom-config-path, and
    leave out paths of option files that do not exist here."""
    debug, evals = (recipe.values.setdefault(name, {}) for name in ("debug", "eval"))
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        if (path := debug.get(name)) and "{rollout_id}" not in path:
            debug[name] = str(Path(path).with_stem(Path(path).stem + "_{rollout_id}"))
            recipe.comments["debug", name] = "one file for each round"
    path = debug.get("custom_config_path")
    if path and Path(path).is_file():
        recipe.dropped.append(f"--custom-config-path {path}: its options are in this file")
        apply_custom_config(recipe.values)
    elif path:
        del debug["custom_config_path"]
        recipe.dropped.append(
            f"--custom-config-path {path}: does not exist here; give it to `penstock train` as a flag, or write "
            "its keys below [rollout.plugin_args]"
        )
    if (path := evals.get("eval_config")) and not Path(path).is_file():
        del evals["eval_config"]
        interval = evals.pop("eval_interval", None)
        recipe.dropped.append(
            f"--eval-config {path}{f' --eval-interval {interval}' if interval else ''}: the file does not exist here; "
            "give both to `penstock train` as flags"
        )


# ---- TOML ------------------------------------------------------------------------------------------------------------


def format_recipe(recipe: Recipe) -> str:
    """Return the recipe as TOML, with comments."""
    lines = [
        f"# Made from {format_comment(recipe.script.name)} by `penstock import-slime`. Run it with: "
        f"penstock {recipe.flow} --config FILE"
    ]
    if recipe.environment:
        lines.append(f"# Environment variables that the script exports, not applied: {', '.join(recipe.environment)}")
    lines += [f"# Dropped: {format_comment(line)}" for line in dict.fromkeys(recipe.dropped)]
    values = recipe.config.model_dump(mode="json", exclude_none=True)
    written: dict[str, dict[str, Any]] = {}  # TOML table -> its entries
    for section in SECTIONS:
        entries = {name: value for name, value in entries_of(recipe.values, section).items() if value is not None}
        dumped = entries_of(values, section)
        if has_null(entries.get("plugin_args", {})):  # TOML has no null, but the option also takes JSON text
            dumped["plugin_args"] = entries["plugin_args"] = json.dumps(entries["plugin_args"], ensure_ascii=False)
        tables = {name: table for name, table in entries.items() if isinstance(table, dict)}
        plain = {name: dumped.get(name, value) for name, value in entries.items() if name not in tables}
        tables = {name: table for name, table in tables.items() if f"{section}.{name}" not in SECTIONS}
        is_added = section in SWITCHES and option_value(recipe.config, *section.rsplit(".", 1)) is not None
        if plain or is_added:
            written[section] = plain
        for name, table in tables.items():
            if given := {key: value for key, value in table.items() if value is not None}:
                written[f"{section}.{name}"] = given
    for path, entries in written.items():
        lines += ["", f"[{path}]"]
        for name, value in entries.items():
            comment = recipe.comments.get((path, name))
            lines.append(f"{format_key(name)} = {format_value(value)}")
            lines[-1] += f"  # {format_comment(comment)}" if comment else ""
    return "\n".join(lines) + "\n"


def format_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else format_value(key)


def format_value(value: Any) -> str:
    """Return a value as TOML. Entries of a table that are None are left out, because TOML has no null."""
    if isinstance(value, dict):
        entries = {str(key): item for key, item in value.items() if item is not None}
        return "{ " + ", ".join(f"{format_key(key)} = {format_value(item)}" for key, item in entries.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_comment(text: str) -> str:
    """Return a text as one line of a comment, in which TOML allows no control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def has_null(value: Any) -> bool:
    """Return whether a value or anything in it is None."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(has_null, items))
