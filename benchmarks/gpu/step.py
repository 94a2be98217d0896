"""Compare the speed of Penstock's training step between sets of Megatron options, in one process per rank.

    python benchmarks/gpu/step.py --model 30b-a3b --layers 3 --variants "" moe_grouped_gemm=true --output OUT.json
    python benchmarks/gpu/step.py --model small --layout expert=1             # rehearsal on a CPU

A variant is a comma-separated list of option=value; "" is the default. Every variant starts from the same weights and
trains the same GRPO round, log-probs and metrics included. Its first loss and gradient norm must be those of the first
variant. `--layout expert=2` starts the ranks that the layout needs, one per GPU.

MFU: 6 x active parameters x tokens plus causal attention, no recomputation, over the data sheet's dense bf16 peak
(`engines/megatron/parallel.py`). Writes JSON; on a GPU it includes the TFLOP/s of one large bf16 matrix product.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.engines.cluster import cpu_threads_per_process
from penstock.engines.families.shape import Experts, ModelShape
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from penstock.engines.training import train_backend

sys.path.insert(0, str(Path(__file__).parent.parent))

from train import MODELS, OPTIMIZER, TOLERANCE, make_batch, model_shape

SIZES = {  # the shapes of Qwen3
    **MODELS,
    "small-moe": replace(MODELS["small"], ffn=64),
    "4b": replace(MODELS["0.6b"], layers=36, hidden=2560, heads=32, ffn=9728),
    "8b": replace(MODELS["0.6b"], layers=36, hidden=4096, heads=32, ffn=12288),
    "30b-a3b": replace(MODELS["0.6b"], layers=48, hidden=2048, heads=32, groups=4, ffn=6144),
}
UNTIED = ("8b", "30b-a3b")  # the LM head is not the embedding
EXPERTS = {"small-moe": (8, 2, 64), "30b-a3b": (128, 8, 768)}  # number of experts, experts per token, width


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="0.6b")
    parser.add_argument("--layers", type=int, help="cut the model to this depth")
    parser.add_argument("--variants", nargs="+", default=[""])
    parser.add_argument("--layout", default="", help="parallel sizes, such as context=2,tensor=1")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--pack", type=int, default=16384, help="tokens of a micro-batch on one GPU")
    parser.add_argument("--packs", type=int, default=2, help="micro-batches of an optimizer step on each data rank")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the operators that take the most time")
    parser.add_argument("--output", type=Path, default=Path("step.json"))
    options = parser.parse_args()
    layout = ParallelLayout(**parse_pairs(options.layout))
    ranks = layout.tensor * layout.pipeline * max(layout.context, layout.expert)
    os.environ |= train_backend().rank_environment(layout, cpu_threads_per_process(None, ranks))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        mp.spawn(run_rank, (ranks, f"file://{scratch}/rendezvous", layout, options), nprocs=ranks)
    print(options.output.read_text())
    return 0


def parse_pairs(text: str) -> dict[str, Any]:
    """Return {"a": 1, "b": True, "c": "x"} for "a=1,b=true,c=x"."""
    values: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def run_rank(rank: int, ranks: int, rendezvous: str, layout: ParallelLayout, options: argparse.Namespace) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    init_parallel(rank, ranks, rendezvous, layout)
    if options.deterministic:
        from penstock.engines.megatron.engine import use_deterministic_kernels

        use_deterministic_kernels()
    shape = sized_shape(options.model, options.layers)
    report: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "model": options.model,
        "layers": shape.num_layers,
        "layout": options.layout,
        "pack": options.pack,
        "length": options.length,
        "deterministic": options.deterministic,
        "variants": {},
    }
    weights: dict[str, torch.Tensor] = {}
    for variant in options.variants:
        result, report["fingerprint"] = measure_variant(shape, layout, variant, options, weights)
        report["variants"][variant or "default"] = result
        if rank == 0:
            first = report["variants"][options.variants[0] or "default"]
            for name in ("loss", "grad_norm"):
                tolerance = TOLERANCE["bf16" if torch.cuda.is_available() else "fp32"]
                assert abs(result[name] - first[name]) <= tolerance * max(abs(first[name]), 1e-2), (variant, result)
            options.output.write_text(json.dumps(report, indent=1))
            print(variant or "default", json.dumps(result), flush=True)
    if rank == 0 and torch.cuda.is_available():
        report["matmul_tflops"] = measure_matmul()
        options.output.write_text(json.dumps(report, indent=1))
    shutdown_parallel()


def measure_variant(
    shape: ModelShape,
    layout: ParallelLayout,
    variant: str,
    options: argparse.Namespace,
    weights: dict[str, torch.Tensor],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the measurements and the fingerprint of an engine with the options of a variant.

    Args:
        weights: weights of the first variant in host memory; filled if empty.
    """
    from penstock.engines.megatron.engine import MegatronEngine
    from penstock.engines.megatron.weights import local_parameters
    from penstock.engines.training import EngineBuild
    from penstock.stages.train.config import TrainConfig
    from penstock.stages.train.step import Models, train_rollout

    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    config = TrainConfig(params_dtype=dtype, max_tokens_per_gpu=options.pack, **OPTIMIZER)
    engine = MegatronEngine(
        EngineBuild(shape, dtype, config.optimizer_options, layout=layout, options=parse_pairs(variant))
    )
    with torch.no_grad():
        for name, tensor in (entry for chunk in engine.chunks for entry in local_parameters(chunk)):
            if name in weights:
                tensor.copy_(weights[name])
            else:
                weights[name] = tensor.detach().to("cpu", copy=True)
    engine.optimizer.reload_model_params()

    num_ranks = engine.data_parallel_rank_and_size[1] * layout.context
    num_sequences = options.pack * num_ranks // options.length
    batch = make_batch(replace(SIZES[options.model], length=options.length, num_sequences=num_sequences), options.packs)
    metrics: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3 + options.steps):
        start = time.perf_counter()
        metrics.append(train_rollout(Models(policy=engine), batch, config, temperature=1.0).metrics)
        metrics[-1]["whole"] = time.perf_counter() - start
    if options.profile:
        print_profile(partial(train_rollout, Models(policy=engine), batch, config, temperature=1.0))

    def median(name: str) -> float | None:
        values = [step[name] for step in metrics[3:] if name in step]
        return round(statistics.median(values), 4) if values else None

    result = {
        "loss": metrics[0]["train/loss"],
        "grad_norm": metrics[0]["train/grad_norm"],
        "tokens": len(batch.token_ids),
        "tokens_per_second": median("perf/actor_train_tok_per_s"),
        "tflops_per_gpu": median("perf/actor_train_tflops"),
        "mfu": median("perf/actor_train_mfu"),
        "seconds with planning and log-probs": median("whole"),
        "first step's seconds": round(metrics[0]["whole"], 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }
    fingerprint = engine.fingerprint()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result, fingerprint


def sized_shape(name: str, layers: int | None) -> ModelShape:
    """Return the shape of a model, cut to `layers` layers if given."""
    changes: dict[str, Any] = {"tied_embeddings": name not in UNTIED, "max_position_embeddings": 65536}
    if layers is not None:
        changes["num_layers"] = layers
    if name in EXPERTS:
        num_experts, top_k, width = EXPERTS[name]
        experts = Experts(num_experts=num_experts, top_k=top_k, ffn_hidden_size=width, shared_ffn_hidden_size=0)
        changes |= {"architecture": "Qwen3MoeForCausalLM", "experts": experts}
    return model_shape(SIZES[name]).model_copy(update=changes)


def measure_matmul(size: int = 8192) -> float:
    """Return the TFLOP/s of a bf16 matrix product [size, size] x [size, size] on random data."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return round(20 * 2 * size**3 / (time.perf_counter() - start) / 1e12, 1)


def print_profile(step: Any) -> None:
    """Print the operators of rank 0 that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        step()
    if dist.get_rank() > 0:
        return
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80), flush=True)


if __name__ == "__main__":
    sys.exit(main())
