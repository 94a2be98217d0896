"""Megatron in this process, and worlds of two ranks: processes that run a program of this folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from penstock_command import HANG

HERE = Path(__file__).parent


@pytest.fixture
def deterministic_kernels(world: None) -> Iterator[None]:
    """On a GPU, whose fastest kernels for fp32 do not give the same bits twice."""
    import torch

    from penstock.engines.megatron.engine import use_deterministic_kernels

    if torch.cuda.is_available():
        use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_two_ranks(tmp_path: Path) -> Callable[..., str]:
    """Runs `PROGRAM RANK DIRECTORY [SELECTION]` twice, side by side, and gives what they printed."""

    def run(program: str, *selection: str) -> str:
        path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        line = [sys.executable, str(HERE / "forked_ranks.py"), str(HERE / program), "2", str(tmp_path), *selection]
        process = subprocess.Popen(
            line,
            env=environment,
            stdout=(tmp_path / "log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=HANG)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("*log")))
        assert code == 0, logs[-6000:]
        return logs

    return run
