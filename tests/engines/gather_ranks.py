"""Run as two processes by `test_megatron_optimizer.py`: two data-parallel ranks that gather weights during the forward
pass, and ranks that offload optimizer state, get the same bits as ranks that do neither.

Between two processes of one machine gathers finish too early for a missing wait to be noticed. So with late gathers a
bucket is only gathered when something waits for it: a reader that does not wait gets stale weights, and the digests
differ.

usage: gather_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel
from penstock.engines.training import STATE_KINDS
from tests.engines.megatron_reference import LENGTHS, MIXTURE, SHAPE, UNTIED, cross_entropy, make_engine, make_pack

SHAPES = {"tied": SHAPE, "untied": UNTIED}
# the untied head has its own bucket
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 1000, "init_method_std": 0.15}


class LateGather:
    """A handle whose gather runs when it is waited for."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket

    def wait(self) -> None:
        self.bucket.param_gather_handle = None
        type(self.bucket).start_param_sync(self.bucket, force_sync=True)


def start_late_gather(bucket: Any, force_sync: bool = False) -> None:
    assert not force_sync and bucket.param_gather_handle is None
    bucket.param_gather_handle, bucket.param_gather_dispatched = LateGather(bucket), True


def run(
    shape: ModelShape, rank: int, directory: Path, late: bool = False, dtype: Any = "fp32", **overrides: Any
) -> list[Any]:
    """Return everything an engine computes over several steps, with every way to read its weights in between."""
    engine = make_engine(shape, dtype=dtype, overrides=BUCKETS | overrides)
    buckets = [
        bucket for chunk in engine.wrapped for bucket in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    assert len(buckets) > 3
    for bucket in buckets if late else ():
        bucket.start_param_sync = partial(start_late_gather, bucket)
    packs = [make_pack(LENGTHS, rank), make_pack([9, 30], rank + 2)]

    def step(forward_only: bool = False) -> list[Any]:
        outputs = engine.forward_backward(packs, cross_entropy, forward_only=forward_only)
        losses = [output["loss"].item() for output in outputs]
        return losses if forward_only else [*losses, engine.optimizer_step()]

    results: list[Any] = [step(), step(), step(forward_only=True), step(), engine.digest(), step()]
    engine.offload(STATE_KINDS)
    engine.onload(STATE_KINDS)
    snapshot = engine.snapshot_weights()
    results += [
        step(),
        {name: float(tensor.double().sum()) for name, tensor in engine.gather_weights().tensors},
        step(),
    ]
    with engine.using_weights(snapshot):
        results += [step(forward_only=True), engine.digest()]
    results += [step()]
    engine.save(directory, {})
    results += [step(), engine.load(directory), step(), step()]
    engine.save(directory / "weights", None)
    results += [step()]
    engine.load_weights(directory / "weights")
    return [*results, step(), engine.digest(), engine.optimizer_state_digest()]


def compare(what: str, results: list[Any], expected: list[Any]) -> None:
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert ours == theirs, (what, index, ours, theirs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    init_parallel(rank, 2, f"file://{directory}/world")
    for name, shape in SHAPES.items():
        expected = run(shape, rank, directory / f"{name}-plain")
        compare(name, run(shape, rank, directory / f"{name}-late", late=True, overlap_param_gather=True), expected)
    expected = run(MIXTURE, rank, directory / "grouped-plain", moe_grouped_gemm=True)
    overlapped = {"moe_grouped_gemm": True, "overlap_param_gather": True}
    compare("grouped", run(MIXTURE, rank, directory / "grouped-late", late=True, **overlapped), expected)
    expected = run(MIXTURE, rank, directory / "bf16-plain", dtype="bf16")
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6, "overlap_param_gather": True}
    compare("offload", run(MIXTURE, rank, directory / "bf16-offload", late=True, dtype="bf16", **offload), expected)
    shutdown_parallel()
