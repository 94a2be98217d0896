"""Parse Python source code, for example of an installed package, to read its names without importing it."""

from __future__ import annotations

import ast
import time
from typing import Any, Literal

NUM_TRIES = 50
RETRY_SECONDS = 0.02


def parse_source(source: str | bytes, name: str = "<source>", mode: Literal["exec", "eval"] = "exec") -> Any:
    """Return the syntax tree of Python source code (`ast.Module`, or `ast.Expression` with the mode "eval"); safe if
    other threads parse at the same time.

    Up to 3.11.7, CPython has one recursion counter of the parser for all threads, so two threads that parse at the same
    time can fail with "SystemError: AST constructor recursion depth mismatch" although the source is valid
    (python/cpython#106905; seen in a deployment, where Prefect parses sources, too). Such a failure is retried.
    """
    for _ in range(NUM_TRIES - 1):
        try:
            return ast.parse(source, name, mode)
        except SystemError:
            time.sleep(RETRY_SECONDS)
    return ast.parse(source, name, mode)
