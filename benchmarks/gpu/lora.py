"""Compare full training with LoRA on one GPU: step time, peak memory, merging, the size of a checkpoint, and the
publishing of adapters.

    python benchmarks/gpu/lora.py --model 4b --rank 32 --output lora.json
    python benchmarks/gpu/lora.py --model 1.5b --rank 32 --length 1200 --sequences 168 --pack 14400 --parts training
    python benchmarks/gpu/lora.py --model 4b --parts adapter merged [-- OPTIONS]
    python benchmarks/gpu/lora.py --model small --length 64 --sequences 8 --pack 256 --responses 4   # on a CPU

Both train the same GRPO round. If full training runs out of memory, its entry says so. "merge_seconds" is the time in
which all weights with adapters added are gathered, which a weight update needs besides the transfer to the engine.

The parts "adapter" and "merged" start trainer and engine on the same GPU, without offload, and publish with
`--lora-publish adapter` and `merged`: the seconds of an update from the call to the last acknowledgement, those of the
first request after it (one token), and the response tokens per second of `--responses` requests at once. OPTIONS are
further options of `penstock train`. Writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.engines.backends import engine_backend
from penstock.engines.families.shape import ModelShape
from penstock.engines.lora import LoraOptions
from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel
from penstock.flows.runtime import environment
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_models import make_model
from publish import UPDATES, trainer_and_engines
from report import parse_options
from step import SIZES, measure_matmul, sized_shape
from train import OPTIMIZER, make_batch, model_shape

PARTS = ("training", "adapter", "merged")
QWEN2_5_1_5B = replace(SIZES["0.6b"], layers=28, hidden=1536, heads=12, groups=2, ffn=8960)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SIZES, "1.5b"], default="4b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of the round, one optimizer step")
    parser.add_argument("--pack", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--responses", type=int, default=128, help="requests whose speed is measured")
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--memory-share", type=float, default=0.4, help="--sglang-mem-fraction-static")
    parser.add_argument("--output", type=Path, default=Path("lora.json"))
    options = parse_options(parser)
    environment.set_default_variables()
    report: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        **{name: value for name, value in vars(options).items() if name != "output"},
    }
    if "training" in options.parts:
        report |= compare_training(options)
    for part in ("adapter", "merged"):
        if part in options.parts:
            report[f"publish {part}"] = measure_publishing(part, options)
            print(part, json.dumps(report[f"publish {part}"]), flush=True)
    options.output.write_text(json.dumps(report, indent=1))
    print(options.output.read_text())
    return 0


def compare_training(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of training with adapters and of full training."""
    is_1_5b = options.model == "1.5b"
    size = QWEN2_5_1_5B if is_1_5b else SIZES[options.model]
    shape = sized_shape(options.model, None) if not is_1_5b else model_shape(size)
    batch = make_batch(replace(size, length=options.length, num_sequences=options.sequences), 1)
    report: dict[str, Any] = {"tokens": len(batch.token_ids)}
    adapters = LoraOptions(lora_rank=options.rank)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        init_parallel(0, 1, f"file://{scratch}/rendezvous")
        for name, lora in (("lora", adapters), ("full", None)):
            try:
                report[name], report["fingerprint"] = measure(shape, lora, batch, options, Path(scratch) / name)
            except torch.OutOfMemoryError as error:
                report[name] = {"out of memory": str(error).partition(".")[0]}
            free_memory()
            print(name, json.dumps(report[name]), flush=True)
        if torch.cuda.is_available():
            report["matmul_tflops"] = measure_matmul()
        shutdown_parallel()
    if "step_seconds" in report["full"]:
        report["speedup"] = round(report["full"]["step_seconds"] / report["lora"]["step_seconds"], 3)
    return report


def measure_publishing(how: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of publishing with --lora-publish `how`, and of generation afterwards."""
    words = ["--lora-rank", str(options.rank), "--lora-publish", how, *options.train_options]
    words += ["--sglang-mem-fraction-static", str(options.memory_share)] if torch.cuda.is_available() else []
    updates, first, speeds = [], [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        model = make_model(options.model, Path(scratch))
        with trainer_and_engines(Store(f"{scratch}/store"), model, words) as (pool, publish):
            for _ in range(UPDATES):
                updates.append(publish())
                first.append(generate(pool.urls, 1, 1))
            for _ in range(2):
                seconds = generate(pool.urls, options.responses, options.response_tokens)
                speeds.append(options.responses * options.response_tokens / seconds)
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return {
        "goal": "update below 0.05 s" if how == "adapter" else None,
        "update_seconds": statistics.median(updates[1:]),
        "first_request_seconds": statistics.median(first[1:]),
        "tokens_per_second": round(speeds[-1], 1),
        "device_gib": round((total - free) / 2**30, 2),  # of trainer, engine and this process
        "all_update_seconds": updates,
        "all_first_request_seconds": first,
    }


def generate(urls: list[str], num_responses: int, num_tokens: int) -> float:
    """Return the seconds of generating responses of `num_tokens` tokens at once."""
    prompts = [[10 + (index * 7 + position) % 40 for position in range(32)] for index in range(num_responses)]
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}

    async def call() -> float:
        async with engine_backend().connect(urls) as client:
            start = time.perf_counter()
            await client.generate_each(prompts, [sampling] * num_responses)
            return time.perf_counter() - start

    return asyncio.run(call())


def measure(
    shape: ModelShape, lora: LoraOptions | None, batch: Any, options: argparse.Namespace, directory: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the measurements of one engine, and its fingerprint.

    Args:
        shape: shape of the model.
        lora: options of the adapters; None: full training.
        batch: the round.
        options: of the command line.
        directory: for a checkpoint.
    """
    from penstock.engines.megatron.engine import MegatronEngine
    from penstock.engines.training import EngineBuild
    from penstock.stages.train.config import TrainConfig
    from penstock.stages.train.step import Models, train_rollout

    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    config = TrainConfig(params_dtype=dtype, max_tokens_per_gpu=options.pack, **OPTIMIZER)
    engine = MegatronEngine(EngineBuild(shape, dtype, config.optimizer_options, lora=lora, seed=1))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], []
    for _ in range(3 + options.steps):
        start = time.perf_counter()
        metrics.append(train_rollout(Models(policy=engine), batch, config, temperature=1.0).metrics)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    engine.digest()
    start = time.perf_counter()
    engine.digest()
    digest_seconds, start = time.perf_counter() - start, time.perf_counter()
    num_bytes = sum(tensor.nbytes for _, tensor in engine.gather_weights().tensors)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    merge_seconds, start = time.perf_counter() - start, time.perf_counter()
    engine.save(directory, {})
    save_seconds = time.perf_counter() - start
    return {
        "step_seconds": round(statistics.median(seconds[3:]), 4),
        "update_seconds": round(statistics.median(step["perf/actor_train_time"] for step in metrics[3:]), 4),
        "peak_gib": None if peak is None else round(peak / 2**30, 2),
        "digest_seconds": round(digest_seconds, 4),
        "merge_seconds": round(merge_seconds, 4),
        "published_bytes": num_bytes,
        "save_seconds": round(save_seconds, 3),
        "checkpoint_bytes": sum(path.stat().st_size for path in directory.iterdir()),
    }, engine.fingerprint()


def free_memory() -> None:
    """Free the GPU memory of an engine that is not referenced any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
