"""Details of weight updates: fused tensors stay together, and a slow shared-memory manager is retried."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.engines.sglang import weight_payload
from penstock.engines.sglang.weight_payload import FlatBucket
from penstock.engines.weights.buckets import split_into_buckets

QUERY_KEY = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("max_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("latent", [QUERY_KEY, QUERY_KEY[::-1], QUERY_KEY[1:]], ids=" ".join)
def test_fused_tensors_stay_in_one_bucket(latent: tuple[str, ...], max_bytes: int) -> None:
    """Every tensor comes once, whatever comes between the two of a layer, also if there is only one of them."""
    between = "input_layernorm"
    names = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in (latent[0], between, *latent[1:])]
    cut = [
        [name for name, _ in bucket]
        for bucket, _ in split_into_buckets(((name, torch.zeros(8)) for name in names), max_bytes)
    ]
    assert sorted(name for bucket in cut for name in bucket) == sorted(names)
    for bucket in cut:
        assert 32 * len(bucket) <= max_bytes or len(bucket) <= len(latent)
        for number in range(3):
            assert sum(f"layers.{number}." in name and between not in name for name in bucket) in (0, len(latent))


@pytest.mark.parametrize(
    "message, num_tries", [("Shared memory manager connection has timed out", 3), ("something else", 1)]
)
def test_a_slow_shared_memory_manager_is_retried(message: str, num_tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives its daemon a second to answer; other errors are raised at once."""
    pickled, tries = weight_payload.ForkingPickler.dumps, []

    def dumps(content: object) -> memoryview:
        tries.append(content)
        if len(tries) < 3:
            raise RuntimeError(message)
        return pickled(content)

    monkeypatch.setattr(weight_payload, "ForkingPickler", SimpleNamespace(dumps=dumps))
    bucket = FlatBucket([("weight", torch.zeros(4))])
    if num_tries == 3:
        assert bucket.serialize()
    else:
        with pytest.raises(RuntimeError, match=message):
            bucket.serialize()
    assert len(tries) == num_tries
