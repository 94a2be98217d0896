"""Registry of the instruction checks.

To add an instruction, write a function with the decorator `check` in a module of this folder that builtin/ifbench.py
imports.
"""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}  # instruction id of the data set -> check


def check(instruction_id: str) -> Callable[[Check], Check]:
    """Register a function as the check of an instruction.

    The function takes the text of the answer, and the arguments of the instruction under their names in the data set.
    """

    def register(function: Check) -> Check:
        CHECKS[instruction_id] = function
        return function

    return register
