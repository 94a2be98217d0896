"""Every layout of two and four ranks trains the same policy as one rank, and resumes from another layout's
checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("layout_ranks.py")
TIMEOUT = 900.0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("num_ranks", "selection", "num_cases"),  # a case is a model under a layout
    [
        (2, "some", 7),
        pytest.param(4, "all", 34, marks=pytest.mark.full),  # also those of two ranks, in two pairs
    ],
)
def test_every_layout_trains_the_same_policy(num_ranks: int, selection: str, num_cases: int, tmp_path: Path) -> None:
    """Compare metrics, gradients and weights with static and dynamic micro-batches, and after resuming under another
    layout."""
    path = os.pathsep.join([str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path), str(num_ranks), selection],
        env=environment,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.wait()
    said = log.read_text()
    assert code == 0, said[-5000:]
    assert said.count(": differences ") == num_cases, said[-5000:]
