"""The same loop on a GPU: nothing but the configuration differs (benchmarks/gpu/round.py prints the figures).

PENSTOCK_TRAIN_OPTIONS may hold further `penstock train` options that a machine's SGLang needs, for instance
--engine-pythonpath.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]


FAMILIES = ("tiny-vl", "tiny-qwen3-vl", "tiny-qwen3-vl-moe")


@pytest.mark.parametrize(("model", "gap"), [("0.6b", 0.05), *((family, 0.02) for family in FAMILIES)])
def test_three_rounds_with_trainer_and_engine_on_one_gpu(model: str, gap: float, tmp_path: Path, agrees) -> None:
    further = shlex.split(os.environ.get("PENSTOCK_TRAIN_OPTIONS", ""))
    words = [str(tmp_path), "--model", model, "--rounds", "3", "--", *further]
    subprocess.run([sys.executable, str(ROOT / "benchmarks/gpu/round.py"), *words], check=True, timeout=900)
    agrees(Store(str(tmp_path / "round")), RunKeys("round"), num_rounds=3, gap=gap)  # bf16 on both sides
