"""Disable the CUDA graphs of prefills, and warn if engines may decode larger batches than SGLang captures CUDA graphs
for by default.

Penstock does not raise the default: graphs take memory outside --sglang-mem-fraction-static, also while the trainer
uses the GPU, so a run that fits could run out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.engines.options import EngineOptions
from penstock.engines.sglang import older_release
from penstock.engines.sglang.checks.speculative import is_speculative
from penstock.engines.sglang.passthrough import check_sglang_args, sglang_flags

GIB = 1 << 30
# SGLang's arg_groups/memory_hook.py: memory of a GPU in GiB, below which a row applies -> largest batch with a graph
# for engines of fewer than 4 GPUs, and of 4 or more.
LIMITS = {20: (8, 8), 35: (48, 160), 60: (32, 160), 160: (256, 512)}
LIMITS_OF_LARGER_GPUS = (512, 512)
# Flags that set the batches with a graph, or disable graphs; also as older releases spell them.
SET_BY_USER = (
    *("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "cuda_graph_max_bs", "cuda_graph_bs", "cuda_graph_config"),
    *("disable_cuda_graph", "disable_decode_cuda_graph"),
)
# In the name of every flag that chooses the graphs of prefills, also as older releases spell it.
OF_PREFILL = re.compile("(?=.*cuda_graph)(?=.*(prefill|piecewise|breakable|config|tc_compiler))")
SPECULATIVE_REQUESTS = 48  # SGLang's default of --max-running-requests with speculative decoding


def without_prefill_graphs(args: dict[str, Any]) -> dict[str, Any]:
    """Return the server flags `args` plus the flag that disables CUDA graphs of prefills, unless the flags choose them.

    By default SGLang runs the model three times for each of 58 lengths at the start, which takes 7 s for a model of
    135M parameters on an H100 (benchmarks/results/smollm2-h100.json); the first start compiles kernels with or without
    them. A rollout prefills in few, large batches; what graphs would save there was not measured.
    """
    name = "cuda_graph_backend_prefill"
    if name not in sglang_flags() or any(OF_PREFILL.match(flag.replace("-", "_")) for flag in args):
        return args
    return {**args, name: "disabled"}


def graph_warning(options: EngineOptions, num_samples: int, gpu_bytes: int) -> str | None:
    """Return a warning if an engine may decode larger batches than it captures CUDA graphs for by default. Arguments as
    in `EngineBackend.graph_warning`."""
    args = check_sglang_args(options.spec.args)
    if any(args.get(name) for name in SET_BY_USER) or args.get("cuda_graph_backend_decode") == "disabled":
        return None
    size, batch = options.gpus_per_engine, largest_batch(args, num_samples)
    limit = graph_limit(gpu_bytes, size, is_older=_is_older(options))
    if batch <= limit:
        return None
    more_gib = max(0.1, (graph_mib(args, batch) - graph_mib(args, limit)) / 1024)
    return (
        f"an engine may decode batches of {batch} samples, but by default SGLang captures CUDA graphs for at most "
        f"{limit} on {'a GPU' if size == 1 else f'{size} GPUs'} of {gpu_bytes / GIB:.0f} GiB; larger batches run "
        f"without a graph and may take several times as long per token: give --sglang-cuda-graph-max-bs {batch} if "
        f"each GPU has {more_gib:.1f} GiB left for it (SGLang's estimate), or {limit} to keep the default without this "
        "warning"
    )


def largest_batch(args: Mapping[str, Any], num_samples: int) -> int:
    """Return the largest decode batch of an engine that has `num_samples` samples in flight. Data-parallel ranks divide
    the samples, and the limit of running requests, among them."""
    ranks = _num_ranks(args)
    running = _positive_integer(args, "max_running_requests") or (SPECULATIVE_REQUESTS if is_speculative(args) else 0)
    batch = -(-num_samples // ranks)
    return min(batch, max(1, running // ranks)) if running else batch


def graph_limit(gpu_bytes: int, gpus_per_engine: int, *, is_older: bool = False) -> int:
    """Return the largest decode batch for which SGLang captures a CUDA graph by default."""
    rows = {**LIMITS, **(older_release.GRAPH_LIMITS if is_older else {})}.items()
    limits = next((limits for below, limits in rows if gpu_bytes < below * GIB), LIMITS_OF_LARGER_GPUS)
    return limits[gpus_per_engine >= 4]


def graph_mib(args: Mapping[str, Any], batch: int) -> float:
    """Return the MiB of a GPU that SGLang reserves for graphs of decode batches up to `batch`, if it chooses
    --mem-fraction-static itself."""
    per_rank = (3 if batch <= 300 else 4.5) if args.get("enable_dp_attention") else 0
    return batch * (2 + per_rank * _num_ranks(args))


def _is_older(options: EngineOptions) -> bool:
    """Return whether the engines run an SGLang before 0.5.21; False if their SGLang is not the one installed here."""
    return options.spec.python is None and bool(sglang_flags()) and older_release.is_installed()


def _num_ranks(args: Mapping[str, Any]) -> int:
    return _positive_integer(args, "dp_size") or _positive_integer(args, "data_parallel_size") or 1


def _positive_integer(args: Mapping[str, Any], name: str) -> int:
    """Return the value of a flag, or 0 if it is not given or is not a positive integer (SGLang refuses it then)."""
    value = args.get(name)
    return max(0, value) if type(value) is int else 0
