"""Numbers of a round of training: token means put together over ranks, seconds, speed. Names are slime's (docs/algorithms.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from engines.megatron.engine import MegatronEngine
from stages.train.batching import Batch

Metrics = dict[str, float]
PHASES = {  # phase -> metric of its seconds
    "old_logprobs": "perf/log_probs_time",
    "ref_logprobs": "perf/ref_log_probs_time",
    "teacher_logprobs": "perf/teacher_log_probs_time",
    "values": "perf/values_time",
    "critic": "perf/critic_train_time",
    "update": "perf/actor_train_time",
}


def over_ranks(engine: MegatronEngine, steps: list[dict[str, Any]]) -> list[Metrics]:
    """Add up the shares of all ranks, in one exchange for the whole round; tensor-parallel ranks hold the same share.

    Args:
        engine: whose ranks.
        steps: of each optimizer step {"sums": name -> this rank's share of a sum, "alike": name -> number that all ranks have}.
    """
    first = engine.tensor_group is None or engine.tensor_group.rank() == 0
    mine = [{name: float(value) for name, value in step["sums"].items()} if first else {} for step in steps]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    shares = [share for share in shares if share[0]]
    return [
        {name: sum(share[i][name] for share in shares) for name in shares[0][i]} | step["alike"] for i, step in enumerate(steps)
    ]


def speed(engine: MegatronEngine, batch: Batch, seconds: dict[str, float]) -> Metrics:
    """Seconds per phase, and what they mean per GPU of the policy's update."""
    metrics = {metric: seconds[name] for name, metric in PHASES.items() if name in seconds}
    if "update" not in seconds:
        return metrics
    num_tokens = len(batch.token_ids)
    flops = engine.shape.train_flops(num_tokens, int((batch.lengths**2).sum())) / dist.get_world_size()
    rate = flops / seconds["update"]
    metrics |= {"perf/actor_train_tok_per_s": num_tokens / seconds["update"], "perf/actor_train_tflops": rate / 1e12}
    peak = engine.peak_flops
    return metrics | ({"perf/actor_train_mfu": rate / peak} if peak else {})


class Clock:
    """Seconds per phase. Every phase ends in numbers on the host, so that a GPU's queue is empty when it is read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start
