"""What a weight update owes to SGLang and to torch: tensors that travel together, and patience with shared memory's manager."""

from __future__ import annotations

import threading

import psutil
import pytest
import torch

from engines.sglang.wire import FlatBucket, buckets

QUERY_KEY = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("max_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("latent", [QUERY_KEY, QUERY_KEY[::-1], QUERY_KEY[1:]], ids=" ".join)
def test_what_sglang_fuses_stays_in_one_bucket(latent: tuple[str, ...], max_bytes: int) -> None:
    """Every tensor comes once, whatever comes between the two of a layer, and also if there is only one."""
    between = "input_layernorm"
    names = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in (latent[0], between, *latent[1:])]
    cut = [[name for name, _ in bucket] for bucket, _ in buckets(((name, torch.zeros(8)) for name in names), max_bytes)]
    assert sorted(name for bucket in cut for name in bucket) == sorted(names)
    for bucket in cut:
        assert 32 * len(bucket) <= max_bytes or len(bucket) <= len(latent)
        for number in range(3):
            assert sum(f"layers.{number}." in name and between not in name for name in bucket) in (0, len(latent))


def test_a_slow_manager_of_shared_memory_is_waited_for() -> None:
    """Torch gives it a second to answer; here it takes 2.5."""
    FlatBucket([("first", torch.zeros(4))]).payload()
    managers = [child for child in psutil.Process().children() if child.name().startswith("torch_shm")]
    assert managers
    for manager in managers:
        manager.suspend()
    awake = threading.Timer(2.5, lambda: [manager.resume() for manager in managers])
    awake.start()
    try:
        assert awake.is_alive() and FlatBucket([("second", torch.zeros(4))]).payload()
        assert not awake.is_alive(), "it was not asked"
    finally:
        awake.join()
