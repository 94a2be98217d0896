"""The same kills on a GPU, with weights over CUDA IPC and deterministic kernels.

PENSTOCK_TRAIN_OPTIONS may hold further `penstock train` options that a machine's SGLang needs, for instance
--engine-pythonpath.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from harness import ROUNDS, Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(900)
def test_kills_on_a_gpu_lose_nothing(tmp_path: Path) -> None:
    size = dict(hidden=256, heads=4, groups=2, head_dim=64, ffn=768, vocab=64, dtype="bfloat16", max_length=40960)
    with World(tmp_path, **size) as world:
        further = shlex.split(os.environ.get("PENSTOCK_TRAIN_OPTIONS", ""))
        flags = [*tiny_flags(world), "--deterministic-mode", "--sglang-mem-fraction-static", "0.3", *further]
        flags += ["--stage-retries", "2"]
        pipeline = Pipeline(world, "gpu", str(world.root / "store"), flags)
        schedule = [
            ("rollout-before-upload", "engine"),
            ("train-mid-step", "trainer"),
            ("publish-after", "driver"),
        ]
        kills = kill_at(pipeline, schedule)
        assert all(kill["num_killed"] for kill in kills)
        assert verdict(pipeline)["replayed_rounds"] == ROUNDS
