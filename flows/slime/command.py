"""`penstock import-slime`: make a recipe from a slime launch script."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.flows.options.argv import short_repr, split_args
from penstock.flows.runtime.runner import run_flow
from penstock.flows.slime.recipe import format_recipe, import_script
from penstock.storage.errors import OptionError

USAGE = """penstock import-slime SCRIPT.sh [--output FILE.toml] [--run]

Translates a slime launch script into a recipe for `penstock train --config`. The script is read, never executed: its
variables, arrays and sourced model files are followed. Every flag becomes an option, or a comment with the reason.

  --output FILE   write the recipe to FILE instead of standard output; an existing file is not replaced
  --run           start the recipe"""


def main(argv: list[str]) -> int:
    """Run `penstock import-slime`.

    Raises:
        OptionError: the script or an option is invalid.
        ModelError: the script trains a model that is not supported.
    """
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
