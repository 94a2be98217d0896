"""Compare the wall time of asynchronous training with that of the synchronous loop, and the accuracy that the policies
reach: the demo's task on two CPU cores. All processes of the engine are kept on one core and the trainer on the other
one, and the sizes of a round make generation and training take about equally long.

    python benchmarks/async_modes.py DIRECTORY [--seeds 0 1 2] [--rounds 24] [--modes synchronous ahead streaming]
        [-- further train options]

For each seed, `penstock sft` makes the initial policy, and every mode trains it. Wall time: from the start of the first
rollout to the commit of the last step; evaluations are before and after it. Steady time: from the commit of the second
step, because kernels are compiled in the first two. Prints JSON: for each mode the ratios to the synchronous times, the
held-out accuracy and the staleness of the trained tokens; for each run its times. The lowest possible ratio is
max(generation, training) / (generation + training), with the seconds of a synchronous round. The same command does not
repeat finished runs. The wall time of a run that was interrupted has no meaning: remove such a run with `penstock rm`.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from penstock.flows.commands.demo import make_model_and_data
from penstock.flows.commands.demo_model import make_tiny_model
from penstock.storage.commit import RunKeys
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from learning import export_directory, read_commit, recipe_path, train
from report import make_parser, parse_options, write_report

MODES = {
    "synchronous": [],
    "ahead": ["--async-buffer-size", "1"],
    "streaming": ["--async-mode", "streaming", "--max-staleness", "2"],
}
LIMITS = {"synchronous": 0, "ahead": 1, "streaming": 2}  # maximum staleness, in policy versions
GOALS = {"ahead": 0.62, "streaming": 0.58}  # ratio to the synchronous wall time
LAYERS = 8  # of the model: with more layers than the demo, generation and training take about equal time
SIZES = ["--rollout-batch-size", "128", "--global-batch-size", "1024", "--trainer-threads", "1"]
# Part of the command line of a process -> its CPU core.
CORES = {"sglang/launch.py": 0, "sglang::": 0, "ray::SGLangServer": 0, "ray::TrainActor": 1}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for models, data, store and logs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parse_options(parser)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=pin_processes, name="pin processes", daemon=True).start()
    store, runs = Store(str(options.directory / "store")), []
    for seed in options.seeds:
        _, data = make_model_and_data(options.directory / "inputs", seed)
        model = options.directory / "inputs" / f"model-{LAYERS}-layers-seed{seed}"
        if not model.exists():
            make_tiny_model(model, seed, layers=LAYERS)
        arguments: list[str | Path] = ["--config", recipe_path("sft")]
        sft = train("sft", f"sft-seed{seed}", options.directory, model, data / "sft.jsonl", seed, arguments)
        start = export_directory(options.directory, sft)
        for mode in options.modes:
            name = f"{mode}-seed{seed}"
            arguments = ["--config", recipe_path("grpo"), "--num-rollout", str(options.rounds), "--eval-interval"]
            arguments += [str(options.rounds), "--eval-prompt-data", "heldout", data / "heldout.jsonl"]
            arguments += [*SIZES, *MODES[mode], *options.train_options]
            train("train", name, options.directory, start, data / "train.jsonl", seed, arguments)
            runs.append({"mode": mode, "seed": seed} | measure(store, RunKeys(name), LIMITS[mode]))
            print(runs[-1], file=sys.stderr, flush=True)
    write_report(options, {"goals": GOALS, "modes": compare(runs), "runs": runs})
    return 0


def pin_processes() -> None:
    """Keep the engine's processes on one core and the trainer on another one. Look for new processes all the time."""
    pinned: set[psutil.Process] = set()
    while True:
        for process in set(psutil.Process().children(recursive=True)) - pinned:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                cores = [core for word, core in CORES.items() if word in command]
                if cores:
                    pinned.add(process)
                for thread in process.threads() if cores else []:
                    os.sched_setaffinity(thread.id, cores[:1])
        time.sleep(0.5)


def measure(store: Store, keys: RunKeys, limit: int) -> dict[str, Any]:
    """Return wall time, accuracy and staleness of a finished run.

    Raises:
        AssertionError: a trained token is more than `limit` policy versions old, or a sample is trained twice.
    """
    rounds = store.committed_indices(f"{keys.prefix}/rollouts")
    rollouts = [read_commit(store, keys.rollout_prefix(r)) for r in rounds]
    steps = [read_commit(store, keys.step_prefix(r)) for r in rounds]
    samples = [list(read_samples(store, rollout)) for rollout in rollouts]
    ids = [sample.sample_id for of_round in samples for sample in of_round]
    assert len(set(ids)) == len(ids), "a sample is trained twice"
    oldest = max(r - sample.policy_versions[0] for r, of_round in zip(rounds, samples) for sample in trained(of_round))
    assert oldest <= limit, f"a trained token is {oldest} policy versions old, more than {limit}"
    generate = [rollout.seconds["generate"] for rollout in rollouts]
    evaluations = [read_commit(store, keys.eval_prefix(version, "heldout")) for version in (0, len(rounds))]
    return {
        "wall_seconds": steps[-1].created_at - rollouts[0].started_at,
        "steady_seconds": steps[-1].created_at - steps[1].created_at,
        "generate_seconds": statistics.median(generate),
        "train_seconds": statistics.median(sum(step.seconds.values()) for step in steps),
        "accuracy": [evaluation.summary["eval/heldout"] for evaluation in evaluations],
        "mean_staleness": statistics.fmean(rollout.summary["rollout/staleness/mean"] for rollout in rollouts),
        "max_staleness": oldest,
        "masked_tokens": sum(rollout.summary.get("rollout/masked_stale_tokens", 0) for rollout in rollouts),
    }


def trained(samples: list[Sample]) -> list[Sample]:
    """Return the samples with a trained token. Masked tokens do not count in their `policy_versions`."""
    return [sample for sample in samples if any(sample.loss_mask)]


def compare(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for every mode the ratios to the synchronous times of each seed, their medians, and the accuracies."""
    by_name = {(run["mode"], run["seed"]): run for run in runs}
    modes: dict[str, dict[str, Any]] = {}
    for mode in dict.fromkeys(run["mode"] for run in runs):
        of_mode = [run for run in runs if run["mode"] == mode]
        modes[mode] = {}
        for key in ("wall_seconds", "steady_seconds"):
            ratios = [run[key] / by_name["synchronous", run["seed"]][key] for run in of_mode]
            modes[mode] |= {f"ratios of {key}": ratios, f"median ratio of {key}": statistics.median(ratios)}
        modes[mode] |= {
            "accuracy": [run["accuracy"][-1] for run in of_mode],
            "mean_staleness": statistics.fmean(run["mean_staleness"] for run in of_mode),
            "max_staleness": max(run["max_staleness"] for run in of_mode),
        }
    return modes


if __name__ == "__main__":
    sys.exit(main())
