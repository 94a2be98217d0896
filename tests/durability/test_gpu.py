"""The same kills on a GPU, with weights over CUDA IPC and deterministic kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import GPU_MODEL, GPU_OPTIONS, ROUNDS, Pipeline, World, tiny_flags
from matrix import kill_at, verdict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(900)
def test_kills_on_a_gpu_lose_nothing(tmp_path: Path) -> None:
    with World(tmp_path, **GPU_MODEL) as world:
        flags = [*tiny_flags(world), *GPU_OPTIONS, "--sglang-mem-fraction-static", "0.3", "--stage-retries", "2"]
        pipeline = Pipeline(world, "gpu", str(world.root / "store"), flags)
        schedule = [("rollout-before-upload", "engine"), ("train-mid-step", "trainer"), ("publish-after", "driver")]
        kills = kill_at(pipeline, schedule)
        assert all(kill["num_killed"] for kill in kills)
        assert verdict(pipeline)["replayed_rounds"] == ROUNDS
