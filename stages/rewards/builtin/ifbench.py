"""Reward `ifbench`: 1 if the response follows every instruction (of IFEval or IFBench) of its row, else 0.

The row's metadata has `instruction_id_list`, and `kwargs`: one dictionary per instruction, or one for all instructions.
The checks in stages/rewards/instructions need no model, no download and no network.
"""

from __future__ import annotations

import inspect
from typing import Any

from penstock.stages.rewards.builtin.math_answer import answer_text
from penstock.stages.rewards.instructions import ifbench_formats, ifbench_words, ifeval  # noqa: F401 - register CHECKS
from penstock.stages.rewards.instructions.text import CHECKS
from penstock.storage.errors import RewardError, nearest_name
from penstock.storage.samples.sample import Sample

_NEEDS_MODEL = {"words:start_verb": "a part-of-speech tagger"}


def ifbench(sample: Sample) -> float:
    """Return 1 if the answer (the text after </think>) follows all instructions, else 0. Raises RewardError."""
    text = answer_text(sample.response)
    instructions = read_instructions(sample.metadata)
    return float(bool(text.strip()) and all([CHECKS[name](text, **arguments) for name, arguments in instructions]))


def read_instructions(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (instruction id, arguments) of each instruction in a row's metadata. Raises RewardError like `ifbench`."""
    names = [str(name).strip() for name in metadata.get("instruction_id_list") or []]
    if not names:
        raise RewardError(
            "the row's metadata has no `instruction_id_list`, which the reward ifbench needs: add it, with its `kwargs`"
        )
    kwargs = metadata.get("kwargs") or {}
    per_instruction = kwargs if isinstance(kwargs, list) else [kwargs] * len(names)
    per_instruction = [*per_instruction, *[{}] * (len(names) - len(per_instruction))]
    return [(name, _read_arguments(name, arguments or {})) for name, arguments in zip(names, per_instruction)]


def _read_arguments(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Select from `kwargs` the arguments of the instruction `name`. Raises RewardError."""
    if name in _NEEDS_MODEL:
        raise RewardError(
            f"instruction {name!r} needs {_NEEDS_MODEL[name]}, which Penstock does not include: remove rows with it"
        )
    if name not in CHECKS:
        near = nearest_name(name, CHECKS)
        hint = f"did you mean {near}?" if near else "remove rows with it; docs/rewards.md lists the known ids"
        raise RewardError(f"instruction {name!r:.60} is unknown: {hint}")
    parameters = [parameter for parameter in inspect.signature(CHECKS[name]).parameters if parameter != "text"]
    for parameter in parameters:
        if kwargs.get(parameter) is None:
            raise RewardError(
                f"instruction {name!r} needs the argument {parameter!r}, which the row's `kwargs` do not give: add it, "
                "or remove the row"
            )
    arguments = {parameter: kwargs[parameter] for parameter in parameters}
    return {  # Parquet readers turn integers into floats in columns with nulls: convert 3.0 to 3
        parameter: int(value) if isinstance(value, float) and value.is_integer() else value
        for parameter, value in arguments.items()
    }
