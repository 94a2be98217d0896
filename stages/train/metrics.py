"""Metrics of a training round: sums over ranks, seconds per phase, throughput. docs/algorithms.md explains them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.engines.megatron.engine import MegatronEngine
from penstock.stages.train.batching import Batch

Metrics = dict[str, float]
PHASES = {  # phase -> name of the metric with its wall-clock seconds
    "old_logprobs": "perf/log_probs_time",
    "ref_logprobs": "perf/ref_log_probs_time",
    "teacher_logprobs": "perf/teacher_log_probs_time",
    "values": "perf/values_time",
    "critic": "perf/critic_train_time",
    "update": "perf/actor_train_time",
}


def sum_over_ranks(engine: MegatronEngine, steps: list[dict[str, Any]]) -> list[Metrics]:
    """Sum the metrics of every optimizer step over all ranks, with one all-gather for the whole round. The ranks of a
    tensor-parallel group hold the same values; only its first rank is counted.

    Args:
        engine: its parallel layout tells which ranks are counted.
        steps: one dictionary per optimizer step: {"partial_sums": metric -> this rank's part of the sum,
            "replicated": metric -> value that is equal on all ranks}.
    """
    counted = engine.tensor_group is None or engine.tensor_group.rank() == 0
    own = [{name: float(value) for name, value in step["partial_sums"].items()} if counted else {} for step in steps]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    shares = [share for share in shares if share[0]]
    return [
        {name: sum(share[i][name] for share in shares) for name in shares[0][i]} | step["replicated"]
        for i, step in enumerate(steps)
    ]


def speed_metrics(engine: MegatronEngine, batch: Batch, seconds: dict[str, float]) -> Metrics:
    """Return the seconds of each phase and, for the policy update, tokens/s (all GPUs), TFLOP/s per GPU and MFU."""
    metrics = {metric: seconds[name] for name, metric in PHASES.items() if name in seconds}
    if "update" not in seconds:
        return metrics
    num_tokens = len(batch.token_ids)
    squares, frozen = int((batch.lengths**2).sum()), engine.lora is not None
    flops = engine.shape.train_flops(num_tokens, squares, frozen=frozen)
    rate = flops / dist.get_world_size() / seconds["update"]
    metrics |= {"perf/actor_train_tok_per_s": num_tokens / seconds["update"], "perf/actor_train_tflops": rate / 1e12}
    peak = engine.peak_flops
    return metrics | ({"perf/actor_train_mfu": rate / peak} if peak else {})


class Clock:
    """Timer of phases: `with clock("update"):` stores the phase's wall-clock seconds after synchronizing the GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start
