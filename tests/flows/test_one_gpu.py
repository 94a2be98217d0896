"""The same loop on a GPU: nothing but the configuration differs (benchmarks/one_gpu.py prints the figures)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from storage.refs import RunKeys
from storage.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]


def test_three_rounds_with_trainer_and_engine_on_one_gpu(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks/one_gpu.py"), str(tmp_path)], check=True, timeout=900)
    store, keys = Store(str(tmp_path / "store")), RunKeys("one-gpu")
    for r in range(3):
        rollout, step = store.committed(keys.rollout(r)), store.committed(keys.step(r))
        assert rollout is not None and rollout.policy_version == r
        assert step is not None and step.summary["train/train_rollout_logprob_abs_diff"] < 0.05, "bf16 on both sides"
        assert r > 0 or step.summary["train/kl_loss"] < 1e-8, "reference = actor at round 0"
