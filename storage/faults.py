"""Places where a test may stop this process to kill somebody. Without its environment variable nothing here does anything.

`PENSTOCK_FAULTS` names a directory that a harness shares with every process of a run. A harness arms a point by creating a file of
that name; whoever reaches the point first renames it and waits until the harness has killed what it wants to kill and has removed
the file. So kills come from outside, by SIGKILL, and at an exact place. The harness is tests/durability/.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "PENSTOCK_FAULTS"


def reach(point: str) -> None:
    """Stop here if a harness has armed `point`, until it lets go."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    reached = Path(directory) / f"{point}.reached"
    try:
        (Path(directory) / point).rename(reached)
    except FileNotFoundError:
        return  # not armed, or another process was faster
    while reached.exists():
        time.sleep(0.002)
