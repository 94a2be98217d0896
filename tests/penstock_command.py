"""Call the `penstock` command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

HANG = 1500  # seconds; several times the longest command on a busy machine: only a hang exceeds it
ROOT = Path(__file__).parents[1]


def penstock(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `penstock WORDS` and return its exit code and output.

    Raises:
        AssertionError: it failed and `check` is set, or it hung; the message then has the Python stack of each thread.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", "penstock", *words]
    environment = {"PYTHONPATH": str(ROOT), **(os.environ if env is None else env)}
    process = subprocess.Popen(
        command, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        for child in family:
            child.kill()  # they hold the pipes open
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(words)} hung:\n{out[-3000:]}\n{err[-12000:]}") from None
    assert not check or process.returncode == 0, out[-3000:] + err[-3000:]
    return subprocess.CompletedProcess(command, process.returncode, out, err)
