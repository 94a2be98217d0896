"""Runs a program of this folder as several ranks: their common imports are done once, before the fork.

usage: forked_ranks.py PROGRAM NUM_RANKS DIRECTORY [SELECTION]

Each rank runs `PROGRAM RANK DIRECTORY [SELECTION]` and prints to DIRECTORY/rank-<n>.log.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from pathlib import Path

import penstock.stages.train.step  # noqa: F401  imports torch and Megatron
from tests import families  # noqa: F401


def main(program: str, num_ranks: int, directory: Path, *selection: str) -> int:
    """Run all ranks and return 1 if one failed, after killing the others; else 0."""
    runpy.run_path(program, run_name="imports")
    gc.freeze()  # Megatron runs the garbage collector at every save and load
    ranks = {fork(program, rank, directory, *selection): rank for rank in range(num_ranks)}
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status:
            for other in ranks:
                os.kill(other, 9)
            return 1
    return 0


def fork(program: str, rank: int, directory: Path, *selection: str) -> int:
    """Return the pid of the rank's process."""
    if pid := os.fork():
        return pid
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [program, str(rank), str(directory), *selection]
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
