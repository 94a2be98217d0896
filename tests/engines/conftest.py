"""Worlds of Megatron ranks: one in this process, or two processes that run a program of this folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the only rank."""
    from engines.megatron.parallel import init_parallel, shutdown_parallel

    threads = torch.get_num_threads()
    init_parallel(0, 1, f"file://{tmp_path_factory.mktemp('world')}/meet")
    yield
    shutdown_parallel()
    torch.set_num_threads(threads)


@pytest.fixture
def run_two_ranks(tmp_path: Path) -> Callable[[str, float], str]:
    """Runs `PROGRAM RANK DIRECTORY` twice, side by side, and gives what they printed; both must end well within `timeout` seconds."""

    def run(program: str, timeout: float) -> str:
        path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        line = [sys.executable, str(HERE / "forked_ranks.py"), str(HERE / program), "2", str(tmp_path)]
        process = subprocess.Popen(
            line, env=environment, stdout=(tmp_path / "log").open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("*log")))
        assert code == 0, logs[-6000:]
        return logs

    return run
