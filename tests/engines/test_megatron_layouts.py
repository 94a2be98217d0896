"""Data, tensor, sequence, pipeline, virtual pipeline and context parallelism over two real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.integration
def test_every_layout_of_two_ranks_is_the_same_model(tmp_path: Path) -> None:
    """Losses, gradients, gathered weights, bit-exact resume, and checkpoints that load under another layout."""
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "megatron_ranks.py"), str(rank), str(tmp_path)],
            env=environment,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
