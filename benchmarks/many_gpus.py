"""Run the whole loop with several placements of trainer and engines on two GPUs, and check each run.

The checks: log-probs of trainer and engine, `penstock verify`, and a bit-for-bit replay.

    python benchmarks/many_gpus.py DIRECTORY [--placements NAME ...] [--no-replay] [-- further `penstock train` options]

Writes DIRECTORY/results.json: placement -> rounds, publish seconds, memory metrics, and the outcomes of the checks. The
model has the shape of Qwen3-0.6B (one_gpu.py) with random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.flows.commands.demo_model import make_tiny_model
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from one_gpu import QWEN3_0_6B, RECIPE, write_prompts

TWO_RANKS = "--actor-num-gpus-per-node 2"
TP2 = f"{TWO_RANKS} --tensor-model-parallel-size 2 --sequence-parallel"
ONE_ENGINE = "--rollout-num-gpus-per-engine 2 --sglang-disable-custom-all-reduce"
PLACEMENTS = {  # name -> options; engines share the trainer's GPUs unless --rollout-num-gpus is given
    "turns-tp2": f"{TP2} --colocate --sglang-mem-fraction-static 0.6",
    "dp2-engine2": f"{TWO_RANKS} {ONE_ENGINE}",
    "apart-nccl": "--rollout-num-gpus 1",
    "pp2": f"{TWO_RANKS} --pipeline-model-parallel-size 2",
    "cp2": f"{TWO_RANKS} --context-parallel-size 2",
    "tp2-engine2": f"{TP2} {ONE_ENGINE}",
    "dp2": TWO_RANKS,
    "apart-disk": "--rollout-num-gpus 1 --update-weight-transport disk",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of one command")
    options, train_options = parser.parse_known_args()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "model").exists():
        make_tiny_model(directory / "model", **QWEN3_0_6B, dtype="bfloat16", max_length=40960)
    write_prompts(directory / "prompts.jsonl")
    results: dict[str, Any] = {}
    for name in options.placements:
        start = time.perf_counter()
        words = PLACEMENTS[name].split() + [word for word in train_options if word != "--"]
        results[name] = check_placement(directory, name, words, options)
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
        (directory / "results.json").write_text(json.dumps(results, indent=1))
        print(name, json.dumps(results[name]), flush=True)
    return 0 if all(result["ok"] for result in results.values()) else 1


def check_placement(directory: Path, name: str, words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Train with one placement and check the run. Return the measurements, and "ok"."""
    where = ["--store", str(directory / "store")]

    def penstock(*arguments: str) -> int | None:
        """Run a command; None if it took too long."""
        with (directory / f"{name}.log").open("ab") as log:
            try:
                return subprocess.run(
                    [sys.executable, "-m", "penstock", *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=options.timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return None

    inputs = ["--hf-checkpoint", str(directory / "model"), "--prompt-data", str(directory / "prompts.jsonl")]
    recipe = ["--config", str(RECIPE), "--rollout-sampling", "ignore_eos=true", "--deterministic-mode"]
    codes = {"train": penstock("train", "--run", name, *recipe, *inputs, *where, *words)}
    result: dict[str, Any] = {"options": " ".join(words), "rounds": measure_rounds(directory, name)}
    if codes["train"] == 0:
        codes["verify"] = penstock("verify", name, *where)
        if not options.no_replay:
            report = directory / f"{name}-replay.json"
            codes["replay"] = penstock("replay", name, *where, "--json", str(report))
            if report.exists():
                result["replay"] = {r: round["verdict"] for r, round in json.loads(report.read_text()).items()}
    return result | {"exit_codes": codes, "ok": set(codes.values()) == {0}}


def measure_rounds(directory: Path, run: str) -> list[dict[str, float]]:
    """Return the measurements of each committed round of a run."""
    store, keys = Store(str(directory / "store")), RunKeys(run)
    outbox = Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl"))
    lines = [json.loads(line) for line in outbox.read_text().splitlines()] if outbox.exists() else []
    rounds = []
    for r in store.committed_indices(f"{keys.prefix}/steps"):
        step, rollout = store.committed(keys.step_prefix(r)), store.committed(keys.rollout_prefix(r))
        assert step is not None and rollout is not None
        names = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "perf/train_time")
        metrics = {name: step.summary[name] for name in names}
        metrics["rollout"] = sum(rollout.seconds.values())
        for line in lines:
            if line.get("type") == "metrics" and line["step"] == r and "perf/update_weights_time" in line["metrics"]:
                metrics |= line["metrics"]
        rounds.append({name: round(value, 5) for name, value in metrics.items()})
    return rounds


if __name__ == "__main__":
    sys.exit(main())
