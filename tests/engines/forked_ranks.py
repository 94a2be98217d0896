"""Runs a program of this folder as several ranks: what they all import is imported once, then they are forked.

usage: forked_ranks.py PROGRAM NUM_RANKS DIRECTORY      each rank runs PROGRAM RANK DIRECTORY and prints to DIRECTORY/rank-<n>.log
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from pathlib import Path

import stages.train.step  # noqa: F401  torch, Megatron and ours
from tests import families  # noqa: F401


def main(program: str, num_ranks: int, directory: Path) -> int:
    """The exit code of the first rank that failed; the others are ended then."""
    runpy.run_path(program, run_name="imports")
    gc.freeze()  # Megatron collects garbage at every save and load
    ranks = {fork(program, rank, directory): rank for rank in range(num_ranks)}
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status:
            for other in ranks:
                os.kill(other, 9)
            return 1
    return 0


def fork(program: str, rank: int, directory: Path) -> int:
    """Its pid."""
    if pid := os.fork():
        return pid
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [program, str(rank), str(directory)]
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
