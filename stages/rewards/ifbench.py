"""Reward: the response follows every instruction that its row names (IFEval 2311.07911, IFBench 2507.02833), strictly.

Metadata: `instruction_id_list`, and `kwargs`, one dictionary per instruction (one for all will do; None stands for absent). The
checks are our own and need neither a model, nor a download, nor the network (stages/rewards/instructions).
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from stages.rewards.answer_text import answer_text
from stages.rewards.instructions import ifbench_formats, ifbench_words, ifeval
from storage.errors import RewardError
from storage.sample import Sample

CHECKS = {**ifeval.CHECKS, **ifbench_words.CHECKS, **ifbench_formats.CHECKS}
_NEED_A_MODEL = {"words:start_verb": "a tagger of parts of speech"}


def ifbench(sample: Sample) -> float:
    """1 if all instructions are followed by what stands behind the thought, else 0.

    Raises:
        RewardError: the row names no instruction, an unknown one, or leaves out one of its arguments.
    """
    text = answer_text(sample.response)
    instructions = instructions_of(sample.metadata)
    return float(bool(text.strip()) and all([CHECKS[name](text, **arguments) for name, arguments in instructions]))


def instructions_of(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of every instruction of a row. Raises RewardError."""
    names = [str(name).strip() for name in metadata.get("instruction_id_list") or []]
    if not names:
        raise RewardError("the metadata has no `instruction_id_list`: ifbench needs one, and `kwargs` beside it")
    given = metadata.get("kwargs") or {}
    each = given if isinstance(given, list) else [given] * len(names)
    each = [*each, *[{}] * (len(names) - len(each))]
    return [(name, _arguments(name, arguments or {})) for name, arguments in zip(names, each)]


def _arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if name in _NEED_A_MODEL:
        raise RewardError(f"instruction {name!r} needs {_NEED_A_MODEL[name]}, which Penstock does without: leave such rows out")
    if name not in CHECKS:
        near = difflib.get_close_matches(name, CHECKS, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/rewards.md says which are known; leave such rows out"
        raise RewardError(f"instruction {name!r:.60} is unknown: {hint}")
    needed = [parameter for parameter in inspect.signature(CHECKS[name]).parameters if parameter != "text"]
    absent = [parameter for parameter in needed if given.get(parameter) is None]
    if absent:
        raise RewardError(f"instruction {name!r} needs the argument {absent[0]!r} in its `kwargs`; they have {given}")
    return {parameter: _whole(given[parameter]) for parameter in needed}


def _whole(value: Any) -> Any:
    """3.0 as 3: a column of numbers with gaps is read as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
