"""Registry of the checks of IFEval's and IFBench's instructions.

To add an instruction, write a function with the decorator `register_check` in a module of this folder that
builtin/ifbench.py imports.
"""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}  # instruction id in the data set -> function that checks an answer


def register_check(instruction_id: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a function as the check of an instruction.

    The function takes the answer's text and, under their names in the data set, the arguments of the instruction; it
    returns whether the answer follows the instruction.
    """

    def register(function: Check) -> Check:
        CHECKS[instruction_id] = function
        return function

    return register
