"""Compare the speed of model conversion with copying the same files, and with transformers + torch.save.

    python benchmarks/convert.py

The source is a synthetic checkpoint on disk: random bf16 weights, a few layers with the sizes of a real model. It is
copied and converted alternately. Every measurement starts with the source files evicted from the page cache, and ends
after fsync of the output. Each conversion runs in a new process, whose peak memory is reported. Compare only the ratios
between machines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD_BYTES = 1_000_000_000  # small, because a conversion may use 1.5 shards + 1 GiB of memory
MODELS: dict[str, dict[str, Any]] = {  # title -> config.json with the layer sizes of the named model
    "dense (Qwen3-4B's layers)": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=14,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "experts (Qwen3-30B-A3B's layers)": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=2,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
}
COMMON = dict(
    max_position_embeddings=4096, rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", torch_dtype="bfloat16"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory",
        help="scratch directory on the disk to measure, with space for three copies of a model (default: in /tmp)",
    )
    parser.add_argument("--turns", type=int, default=5, help="number of times that each model is copied and converted")
    options = parser.parse_args()
    print(
        "| model | GB | copy GB/s | convert GB/s | copy / convert time | copy / convert + verify time "
        "| copy / export time | transformers + torch.save / convert time | peak memory of limit |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for title, config in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.directory) as scratch:
            print(benchmark_model(title, Path(scratch), {**COMMON, **config}, options.turns), flush=True)


def benchmark_model(title: str, root: Path, config: dict[str, Any], turns: int) -> str:
    """Benchmark one model with `config` as its config.json, and return its row of the Markdown table."""
    source = root / "hf"
    write_random_checkpoint(source, config)
    files = sorted(source.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    allowed = 1.5 * max(path.stat().st_size for path in files) + (1 << 30)
    copied, converted, peaks = [], [], []
    for turn in range(turns):
        work: list[Callable[[], None]] = [
            lambda: copied.append(measure(copy, source, root / "out")),
            lambda: converted.append(measure_in_process(convert, source, root / "out", peaks)),
        ]
        for step in work if turn % 2 == 0 else reversed(work):
            step()
    verified = measure_in_process(convert_and_verify, source, root / "out", [])
    exported = measure_export(root, source)
    loaded = measure_in_process(load_and_save, source, root / "out", [])
    copy_s, convert_s = statistics.median(copied), statistics.median(converted)
    return (
        f"| {title} | {size / 1e9:.1f} | {size / 1e9 / copy_s:.2f} | {size / 1e9 / convert_s:.2f} "
        f"| **{copy_s / convert_s:.2f}** "
        f"({min(copied):.1f}-{max(copied):.1f} s, {min(converted):.1f}-{max(converted):.1f} s) "
        f"| {copy_s / verified:.2f} "
        f"| {copy_s / exported:.2f} | {loaded / convert_s:.1f} | {max(peaks) / 1e9:.2f} of {allowed / 1e9:.2f} GB |"
    )


# ---- measured operations ---------------------------------------------------------------------------------------------


def copy(source: Path, target: Path) -> None:
    """Copy all files with `shutil.copyfile`, and fsync them."""
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    for path in target.iterdir():
        sync(path)


def convert(source: Path, target: Path, verify: bool = False) -> None:
    """Convert a Hugging Face directory to torch_dist, into a store in `target`."""
    from penstock.stages.convert.to_torch_dist import convert_hf
    from penstock.storage.store import Store

    convert_hf(Store(str(target)), source, verify=verify)


def convert_and_verify(source: Path, target: Path) -> None:
    convert(source, target, verify=True)


def export_to_hf(source: Path, target: Path) -> None:
    """Export a converted model to Hugging Face format."""
    from penstock.stages.convert.targets import Origin
    from penstock.stages.convert.to_hf import export_to
    from penstock.storage.store import Store

    export_to(Store(str(target), probe=False), str(source), Origin(source / "hf_assets"), str(target))


def load_and_save(source: Path, target: Path) -> None:
    """Load a model with transformers and write it with `torch.save`: a conversion without Penstock."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    target.mkdir()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    torch.save(model.state_dict(), target / "model.pt")
    sync(target / "model.pt")


def measure_export(root: Path, source: Path) -> float:
    """Convert a model, and return the seconds of exporting it to Hugging Face format."""
    convert(source, root / "store")
    model = next(path for path in (root / "store" / "models").glob("attempt-*") if path.is_dir())
    seconds = measure_in_process(export_to_hf, model, root / "out", [])
    shutil.rmtree(root / "store")
    return seconds


# ---- measurement -----------------------------------------------------------------------------------------------------


def measure(work: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    """Return the wall-clock seconds of `work(source, target)`, with `source` evicted from the page cache at the start.
    Delete `target` afterwards."""
    evict(source)
    start = time.monotonic()
    work(source, target)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    os.sync()
    return seconds


def measure_in_process(work: Callable[[Path, Path], None], source: Path, target: Path, peaks: list[int]) -> float:
    """Return the seconds of `work(source, target)` in a new process, without imports. Append the peak memory of the
    process, in bytes, to `peaks`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_run_child, args=(sender, work, source, target))
    process.start()
    seconds, peak = receiver.recv()
    process.join()
    peaks.append(peak)
    return seconds


def _run_child(pipe: Any, work: Callable[[Path, Path], None], source: Path, target: Path) -> None:
    for module in (
        "transformers.models.auto",
        "penstock.stages.convert.to_torch_dist",
        "penstock.stages.convert.to_hf",
        "torch._dynamo",
    ):
        importlib.import_module(module)
    from penstock.engines.megatron.compat import import_megatron

    import_megatron()
    importlib.import_module("penstock.engines.megatron.engine")
    seconds = measure(work, source, target)
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def evict(directory: Path) -> None:
    """Evict the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync(path, evict=True)


def sync(path: Path, evict: bool = False) -> None:
    """Write a file to disk (fsync), and optionally evict it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if evict:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def write_random_checkpoint(directory: Path, config: dict[str, Any]) -> None:
    """Write a Hugging Face checkpoint with random weights, one tensor at a time."""
    import torch

    from penstock.engines.families import read_shape, tensor_layout
    from penstock.stages.convert.hf_checkpoint import TensorInfo, plan_shards, write_index, write_shard

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    layout = tensor_layout(read_shape(directory))
    groups = [
        [(name, TensorInfo(torch.bfloat16, layout.hf_shapes[name])) for name in layout.hf_names_of(megatron)]
        for megatron in layout.megatron_names()
    ]
    parts = plan_shards(groups, SHARD_BYTES)
    for part in parts:
        random = ((name, torch.empty(info.shape, dtype=info.dtype).normal_(0, 0.02)) for name, info in part.tensors)
        write_shard(directory / part.file, part, random)
    write_index(directory, parts)


if __name__ == "__main__":
    main()
