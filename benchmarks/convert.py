"""`python benchmarks/convert.py`: what a conversion costs beside copying the same bytes on the same disk, and beside
transformers + torch.save.

A synthetic checkpoint (random bf16 weights, layers of a real model's sizes, few of them) lies on the disk. In turns it
is copied, converted, converted, copied, and so on; every turn begins with files that are not in memory and ends when
what was written is safe (fsync). Each conversion runs in a process of its own, which also says how much memory it took
at most. Only the ratios travel to other machines.
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

SHARD_BYTES = 1_000_000_000  # small ones, so that the memory that is allowed (1.5 shards and 1 GiB) is little
MODELS: dict[str, dict[str, Any]] = {  # layers of these sizes; see models.md of the hub's configs
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
        "--directory", help="on the disk to measure; it needs room for three copies (default: a temporary one)"
    )
    parser.add_argument("--turns", type=int, default=5, help="of copying and of converting")
    options = parser.parse_args()
    print(
        "| model | GB | copy GB/s | convert GB/s | ratio | bits read back | back to HF "
        "| transformers + torch.save: times slower | peak memory, of allowed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for title, config in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.directory) as scratch:
            print(row(title, Path(scratch), {**COMMON, **config}, options.turns), flush=True)


def row(title: str, root: Path, config: dict[str, Any], turns: int) -> str:
    """Measure one model."""
    source = root / "hf"
    make_checkpoint(source, config)
    files = sorted(source.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    allowed = 1.5 * max(path.stat().st_size for path in files) + (1 << 30)
    copied, converted, peaks = [], [], []
    for turn in range(turns):
        work: list[Callable[[], None]] = [
            lambda: copied.append(timed(root, copy, source, root / "out")),
            lambda: converted.append(in_process(root, convert, source, root / "out", peaks)),
        ]
        for step in work if turn % 2 == 0 else reversed(work):
            step()
    verified = in_process(root, convert_and_verify, source, root / "out", [])
    back = export_after_conversion(root, source)
    loaded = in_process(root, load_and_save, source, root / "out", [])
    copy_s, convert_s = statistics.median(copied), statistics.median(converted)
    return (
        f"| {title} | {size / 1e9:.1f} | {size / 1e9 / copy_s:.2f} | {size / 1e9 / convert_s:.2f} "
        f"| **{copy_s / convert_s:.2f}** "
        f"({min(copied):.1f}-{max(copied):.1f} s, {min(converted):.1f}-{max(converted):.1f} s) "
        f"| {copy_s / verified:.2f} "
        f"| {copy_s / back:.2f} | {loaded / convert_s:.1f} | {max(peaks) / 1e9:.2f} of {allowed / 1e9:.2f} GB |"
    )


# ---- what is measured ------------------------------------------------------------------------------------------------


def copy(source: Path, target: Path) -> None:
    """The kernel's own copy, made safe."""
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    for path in target.iterdir():
        sync(path)


def convert(source: Path, target: Path, verify: bool = False) -> None:
    from penstock.stages.convert.to_torch_dist import convert_hf
    from penstock.storage.store import Store

    convert_hf(Store(str(target)), source, verify=verify)


def convert_and_verify(source: Path, target: Path) -> None:
    convert(source, target, verify=True)


def back_to_hf(source: Path, target: Path) -> None:
    from penstock.stages.convert.export_plan import Origin
    from penstock.stages.convert.to_hf import export_to
    from penstock.storage.store import Store

    export_to(Store(str(target), probe=False), str(source), Origin(source / "hf_assets"), str(target))


def load_and_save(source: Path, target: Path) -> None:
    """What one would write without Penstock."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    target.mkdir()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    torch.save(model.state_dict(), target / "model.pt")
    sync(target / "model.pt")


def export_after_conversion(root: Path, source: Path) -> float:
    convert(source, root / "store")
    model = next(path for path in (root / "store" / "models").glob("attempt-*") if path.is_dir())
    seconds = in_process(root, back_to_hf, model, root / "out", [])
    shutil.rmtree(root / "store")
    return seconds


# ---- how it is measured ----------------------------------------------------------------------------------------------


def timed(root: Path, work: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    """Seconds, from files that are not in memory; what was written is removed."""
    forget(source)
    start = time.monotonic()
    work(source, target)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    os.sync()
    return seconds


def in_process(root: Path, work: Callable[[Path, Path], None], source: Path, target: Path, peaks: list[int]) -> float:
    """The same in a new process, its imports not counted; `peaks` gets the most memory that it had."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, root, work, source, target))
    process.start()
    seconds, peak = ours.recv()
    process.join()
    peaks.append(peak)
    return seconds


def _child(pipe: Any, root: Path, work: Callable[[Path, Path], None], source: Path, target: Path) -> None:
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
    seconds = timed(root, work, source, target)
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def forget(directory: Path) -> None:
    """Take files out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync(path, forget=True)


def sync(path: Path, forget: bool = False) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if forget:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def make_checkpoint(directory: Path, config: dict[str, Any]) -> None:
    """Random weights under the hub's names, written as they are made."""
    import torch

    from penstock.engines.families import read_shape, tensor_layout
    from penstock.stages.convert.hf.weights import TensorInfo, plan_shards, write_index, write_shard

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
