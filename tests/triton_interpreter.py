"""Run a check of Triton kernels without a GPU, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_in_interpreter(check: str) -> None:
    """Call the function `check` ("package.module:function") in a new process: the interpreter must be chosen before the
    kernels are defined."""
    pytest.importorskip("triton")
    module, function = check.split(":")
    subprocess.run(
        [sys.executable, "-c", f"from {module} import {function}; {function}()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        check=True,
        timeout=600,
    )
