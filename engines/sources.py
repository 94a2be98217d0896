"""Syntax trees of installed sources, from which the doors read names without importing a package."""

from __future__ import annotations

import ast
import time

NUM_TRIES = 50
PAUSE = 0.02  # seconds


def parsed(source: str | bytes, name: str = "<source>") -> ast.Module:
    """The syntax tree of a Python source, whatever other threads do.

    CPython 3.11 counts the depth of the trees that it hands out in one place for all threads, so two threads that parse at the same time
    can fail with "SystemError: AST constructor recursion depth mismatch" (python/cpython#106905; seen in a deployment, where Prefect
    parses sources too).
    Nothing is wrong with the source then, and it is parsed again.
    """
    for _ in range(NUM_TRIES - 1):
        try:
            return ast.parse(source, name)
        except SystemError:
            time.sleep(PAUSE)
    return ast.parse(source, name)
