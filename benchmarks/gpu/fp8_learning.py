"""Compare the learning of a run with fp8 engines with that of a run with bf16 engines: the demo's task with a model
that is wide enough for fp8 blocks.

    python benchmarks/gpu/fp8_learning.py DIRECTORY [--rounds 40] [--engines bf16 fp8] [-- OPTIONS]
    python benchmarks/gpu/fp8_learning.py DIRECTORY --engines bf16 --rounds 4        # rehearsal on a CPU

OPTIONS are further options of `penstock train`. SFT teaches arithmetic and plants a habit, as in `penstock demo`. Then
GRPO removes the habit once with each kind of engine: both trainers start from the same bf16 weights (--ref-load). With
two GPUs the runs are made at the same time. Prints the held-out accuracy of each evaluated policy version, and the mean
absolute difference of log-probs between trainer and engine in each round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.flows.commands.demo import export_directory, make_demo_data, recipe_config
from penstock.flows.commands.demo_model import make_tiny_model
from penstock.flows.runtime import environment
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import make_parser, parse_options, write_report

SIZES: dict[str, Any] = {
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "groups": 2,
    "head_dim": 64,
    "ffn": 768,
}  # widths of whole fp8 blocks
MEASURED = ("rollout/raw_reward", "train/train_rollout_logprob_abs_diff")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for model, data and stores; a later call reuses them")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    options = parse_options(parser)
    environment.set_default_variables()
    model = make_model(options.directory, options.seed)
    with ThreadPoolExecutor(max(1, torch.cuda.device_count())) as pool:
        jobs = [
            pool.submit(train, engines, model, index % max(1, torch.cuda.device_count()), options)
            for index, engines in enumerate(options.engines)
        ]
        figures = {engines: job.result() for engines, job in zip(options.engines, jobs)}
    write_report(options, figures)
    return 0


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory of the model that SFT has taught arithmetic and a habit."""
    data, model = directory / "data", directory / "model"
    if not data.exists():
        make_demo_data(data, seed)
        make_tiny_model(model, seed=seed, dtype="bfloat16", **SIZES)
    config = recipe_config("sft", directory, model, data / "sft.jsonl", seed)
    exported = open_store(config.run).committed(RunKeys(config.run.run).export_prefix(config.run.num_rollout))
    if exported is None and (code := run_flow("sft", config)):
        sys.exit(code)
    return export_directory(config)


def train(engines: str, model: Path, gpu: int, options: Any) -> dict[str, Any]:
    """Run GRPO with one kind of engine, and return rewards, accuracies and log-prob differences."""
    directory, run = options.directory, f"{engines}-engines"
    start = directory / "bf16" if engines == "bf16" else make_fp8_copy(model, directory)
    if engines == "bf16" and not start.exists():
        start.symlink_to(model)
    words = ["--config", "demo-grpo", "--run", run, "--store", str(directory / run)]
    words += ["--hf-checkpoint", str(start), "--ref-load", str(model), "--num-rollout", str(options.rounds)]
    words += ["--prompt-data", str(directory / "data/train.jsonl"), "--eval-interval", "10"]
    words += ["--eval-prompt-data", "heldout", str(directory / "data/heldout.jsonl")]
    words += ["--params-dtype", "bf16" if torch.cuda.is_available() else "fp32", *options.train_options]
    with (directory / f"{run}.log").open("wb") as log:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [sys.executable, "-m", "penstock", "train", *words]
        subprocess.run(command, env=env, stdout=log, stderr=log, check=True)
    store, keys = Store(str(directory / run)), RunKeys(run)
    evaluations = {v: store.committed(keys.eval_prefix(v, "heldout")) for v in range(options.rounds + 1)}
    rounds = [
        commit.summary
        for r in range(options.rounds)
        for prefix in (keys.rollout_prefix(r), keys.step_prefix(r))
        if (commit := store.committed(prefix))
    ]
    return {
        "held-out accuracy": {v: commit.summary["eval/heldout"] for v, commit in evaluations.items() if commit},
        **{name: [round(summary[name], 5) for summary in rounds if name in summary] for name in MEASURED},
    }


def make_fp8_copy(model: Path, directory: Path) -> Path:
    """Return the directory of the model's export with block-quantized weights."""
    if (directory / "fp8" / "config.json").exists():
        return directory / "fp8"
    converted = convert_hf(Store(str(directory / "store")), model)
    origin = Origin(Path(converted.uri) / "hf_assets", "fp8")
    return Path(export_to(Store(str(directory)), converted.uri, origin, str(directory / "fp8")).uri)


if __name__ == "__main__":
    sys.exit(main())
