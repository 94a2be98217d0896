"""Failpoints: named points in the code at which the test harness can halt a process, to kill it or another process.

The environment variable `PENSTOCK_FAULTS` names a directory that the harness shares with every process of a run. The
harness (tests/durability/) arms the failpoint `x` by creating the file `x`. The first process that reaches the
failpoint renames the file to `x.reached` and waits until the harness removes it. Without the variable, failpoints do
nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "PENSTOCK_FAULTS"


def failpoint(point: str) -> None:
    """If the test harness has armed `point`, wait until it removes `<point>.reached`."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    reached = Path(directory) / f"{point}.reached"
    try:
        (Path(directory) / point).rename(reached)
    except FileNotFoundError:
        return  # not armed, or another process has reached the failpoint first
    while reached.exists():
        time.sleep(0.002)
