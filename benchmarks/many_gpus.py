"""Run the whole loop with several placements of trainer and engines on two GPUs, and check each run.

The checks: log-probs of trainer and engine, `penstock verify`, a bit-for-bit replay, and with --layouts the replay of
one run's shards with other parallel layouts.

    python benchmarks/many_gpus.py DIRECTORY [--placements NAME ...] [--layouts NAME ...] [--concurrent N] [-- OPTIONS]

OPTIONS are further options of `penstock train`.

Writes DIRECTORY/results.json: placement -> rounds, publish seconds, memory metrics, and the outcomes of the checks. The
models have random weights (gpu_models.py). Concurrent runs share the GPUs, so their times are not comparable.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from gpu_models import RECIPE, make_model, write_prompts
from report import parse_options

TWO_RANKS = "--actor-num-gpus-per-node 2"
TP2 = f"{TWO_RANKS} --tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {  # name -> options of the trainer
    "dp2": TWO_RANKS,
    "tp2": TP2,
    "pp2": f"{TWO_RANKS} --pipeline-model-parallel-size 2",
    "cp2": f"{TWO_RANKS} --context-parallel-size 2",
}
ONE_ENGINE = "--rollout-num-gpus-per-engine 2 --sglang-disable-custom-all-reduce"
PLACEMENTS = {  # name -> (model, options); engines share the trainer's GPUs unless --rollout-num-gpus is given
    "one": ("0.6b", ""),
    "turns-tp2": ("0.6b", f"{TP2} --colocate"),
    **{name: ("0.6b", layout) for name, layout in LAYOUTS.items()},
    **{f"{name}-engine2": ("0.6b", f"{layout} {ONE_ENGINE}") for name, layout in LAYOUTS.items()},
    "moe-ep2": ("moe", f"{TWO_RANKS} --expert-model-parallel-size 2"),
    "apart-nccl": ("0.6b", "--rollout-num-gpus 1"),
    "apart-disk": ("0.6b", "--rollout-num-gpus 1 --update-weight-transport disk"),
    "turns-4b": ("4b", f"{TWO_RANKS} --colocate"),
    "fifty": ("tiny", f"{TWO_RANKS} --colocate --num-rollout 50 --rollout-max-response-len 32 --keep-checkpoints 1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument(
        "--layouts", nargs="*", choices=LAYOUTS, default=[], help="replay the placement 'one' with these layouts"
    )
    parser.add_argument("--concurrent", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of one command")
    options = parse_options(parser)
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    write_prompts(directory / "prompts.jsonl")
    for model in {PLACEMENTS[name][0] for name in options.placements}:
        make_model(model, directory)
    results: dict[str, Any] = {}

    def run(check: Callable[[str, argparse.Namespace], dict[str, Any]], name: str, key: str) -> None:
        results[key] = check(name, options)
        (directory / "results.json").write_text(json.dumps(results, indent=1))
        print(key, json.dumps(results[key]), flush=True)

    with ThreadPoolExecutor(options.concurrent) as pool:
        runs = []
        for name in options.placements:
            runs.append(pool.submit(run, check_placement, name, name))
            time.sleep(15 if options.concurrent > 1 else 0)  # SGLang measures the free memory while it starts
        for future in runs:
            future.result()
        for future in [pool.submit(run, replay_as, name, f"one as {name}") for name in options.layouts]:
            future.result()
    return 0 if all(result["ok"] for result in results.values()) else 1


def check_placement(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one placement and check the run. Return the measurements, and "ok"."""
    directory, (model, words) = options.directory, PLACEMENTS[name]
    start, where = time.perf_counter(), ["--store", str(directory / name)]
    inputs = ["--hf-checkpoint", str(directory / model), "--prompt-data", str(directory / "prompts.jsonl")]
    recipe = ["--config", str(RECIPE), "--rollout-sampling", "ignore_eos=true", "--deterministic-mode"]
    arguments = ["train", "--run", name, *recipe, *inputs, *where, *options.train_options, *words.split()]
    codes = {"train": penstock(options, name, *arguments)}
    result: dict[str, Any] = {"options": words, "rounds": measure_rounds(directory / name, name)}
    if codes["train"] == 0:
        codes["verify"] = penstock(options, name, "verify", name, *where)
        if not options.no_replay:
            report = directory / f"{name}-replay.json"
            codes["replay"] = penstock(options, name, "replay", name, *where, "--json", str(report))
            if report.exists():
                result["replay"] = {r: round["verdict"] for r, round in json.loads(report.read_text()).items()}
    seconds = round(time.perf_counter() - start, 1)
    return result | {"exit_codes": codes, "ok": set(codes.values()) == {0}, "seconds": seconds}


def replay_as(layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replay the run "one" with another layout. Return the differences of each round's loss and gradient norm, and
    "ok": the losses agree to 1e-3 and the gradient norms to 1 %."""
    report, name = options.directory / f"one-as-{layout}.json", f"one-as-{layout}"
    where = ["--store", str(options.directory / "one"), "--json", str(report)]
    code = penstock(options, name, "replay", "one", *where, *LAYOUTS[layout].split())
    rounds = json.loads(report.read_text()) if report.exists() else {}
    result: dict[str, Any] = {"options": LAYOUTS[layout], "exit_codes": {"replay": code}}
    for committed, (r, replayed) in zip(measure_rounds(options.directory / "one", "one"), rounds.items()):
        metrics = replayed["metrics"]
        result[r] = {
            "loss": abs(metrics["train/loss"] - committed["train/loss"]),
            "grad_norm": abs(metrics["train/grad_norm"] / committed["train/grad_norm"] - 1),
        }
    return result | {
        "ok": code == 0 and all(result[r]["loss"] < 1e-3 and result[r]["grad_norm"] < 0.01 for r in rounds)
    }


def penstock(options: argparse.Namespace, name: str, *arguments: str) -> int | None:
    """Run a command and return its exit code; None if it took too long."""
    with (options.directory / f"{name}.log").open("ab") as log:
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


def measure_rounds(store_directory: Path, run: str) -> list[dict[str, float]]:
    """Return the measurements of each committed round of a run."""
    store, keys = Store(str(store_directory)), RunKeys(run)
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
        rounds.append({name: round(value, 6) for name, value in metrics.items()})
    return rounds


if __name__ == "__main__":
    sys.exit(main())
