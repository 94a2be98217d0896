"""What a weight update owes to SGLang and to torch: tensors that travel together, and patience with shared memory's manager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engines.sglang import wire
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


@pytest.mark.parametrize("message, num_tries", [("Shared memory manager connection has timed out", 3), ("something else", 1)])
def test_a_slow_manager_of_shared_memory_is_asked_again(message: str, num_tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives its daemon a second to answer; any other failure is told at once."""
    pickled, tries = wire.ForkingPickler.dumps, []

    def dumps(content: object) -> memoryview:
        tries.append(content)
        if len(tries) < 3:
            raise RuntimeError(message)
        return pickled(content)

    monkeypatch.setattr(wire, "ForkingPickler", SimpleNamespace(dumps=dumps))
    bucket = FlatBucket([("weight", torch.zeros(4))])
    if num_tries == 3:
        assert bucket.payload()
    else:
        with pytest.raises(RuntimeError, match=message):
            bucket.payload()
    assert len(tries) == num_tries
