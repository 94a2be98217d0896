"""Train a real model on real tasks (examples/smollm2) on one GPU, and report the seconds of the start and of a round by
part, rewards, the gap of each round, and the held-out accuracy with its 95 % intervals.

    python examples/smollm2/model.py model && python examples/smollm2/data.py data
    python benchmarks/gpu/real_model.py DIRECTORY --model model --data data [--seed 0] [--rounds 100] [-- OPTIONS]

OPTIONS are further options of `penstock train`, such as --advantage-estimator gspo. The recipe is that of the example,
whose reward is imported from the current directory: run this in the root of the repository. The parts of a round are
medians over all rounds but the first two.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.storage.refs import CheckpointRef, Commit, RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from learning import read_commit
from report import make_parser, parse_options, write_report
from run import median_seconds, read_publish_seconds, round_seconds

RECIPE = Path("examples/smollm2/run.toml")
TASKS = ("sums", "sorting")
WARM_UP_ROUNDS = 2
GAP = "train/train_rollout_logprob_abs_diff"
CURVES = ("rollout/raw_reward", "rollout/rewards/correct", "rollout/response_len/mean", "train/grad_norm", GAP)
ENERGY = ("perf/rollout_energy_joules", "perf/train_energy_joules")
BLOCK = 10  # rounds of which a mean is reported


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for stores and logs")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory that examples/smollm2/data.py wrote")
    parser.add_argument("--name", default="grpo", help="name of the run, followed by its seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    options = parse_options(parser)
    run = f"{options.name}-seed{options.seed}"
    options.directory.mkdir(parents=True, exist_ok=True)
    start = time.time()
    lines = run_training(run, options)
    store, keys = Store(str(options.directory / run)), RunKeys(run)
    rollouts = [read_commit(store, keys.rollout_prefix(r)) for r in range(options.rounds)]
    steps = [read_commit(store, keys.step_prefix(r)) for r in range(options.rounds)]
    figures = {
        "wall seconds": round(time.time() - start, 1),
        "seconds from the start": start_times(store, keys, start),
        "lines of the start": [line for line in lines if line[0] < steps[0].created_at - start + 1],
        "rounds": describe_rounds(store, keys, rollouts, steps),
        "held out": {task: held_out(store, keys, task, options.rounds) for task in TASKS},
    }
    figures["settings of the model"] = {"model": str(options.model), "data": str(options.data)}
    options.model = options.data = None  # paths of this machine
    write_report(options, figures)
    return 0


def run_training(run: str, options: Any) -> list[tuple[float, str]]:
    """Run `penstock train` to its end. Return its lines, each with the seconds from the start at which it came."""
    words = ["--config", RECIPE, "--run", run, "--store", options.directory / run, "--hf-checkpoint", options.model]
    words += ["--prompt-data", options.data / "train.jsonl", "--num-rollout", options.rounds]
    for task in TASKS:
        words += ["--eval-prompt-data", task, options.data / f"heldout-{task}.jsonl"]
    words += ["--seed", options.seed, "--rollout-seed", options.seed, *options.train_options]
    start, lines = time.time(), []
    with (options.directory / f"{run}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "penstock", "train", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout or ():
            lines.append((round(time.time() - start, 2), line.rstrip()[:160]))
            print(*lines[-1], file=log, flush=True)
    if process.wait():
        raise SystemExit(f"run {run} failed with exit code {process.returncode}: see {options.directory / run}.log")
    return lines


def start_times(store: Store, keys: RunKeys, start: float) -> dict[str, float]:
    """Return the seconds from the start of the command to the stages of the first round."""
    base = store.read(CheckpointRef.model_validate_json(store.read(f"{keys.prefix}/base.json") or b"").key)
    assert base is not None
    rollout, step = read_commit(store, keys.rollout_prefix(0)), read_commit(store, keys.step_prefix(0))
    evaluations = [read_commit(store, keys.eval_prefix(0, task)) for task in TASKS]
    times = {
        "model converted": Commit.model_validate_json(base).created_at,
        "first evaluation started": min(commit.created_at - sum(commit.seconds.values()) for commit in evaluations),
        "first evaluations committed": max(commit.created_at for commit in evaluations),
        "rollout started": rollout.created_at - sum(rollout.seconds.values()),
        "rollout committed": rollout.created_at,
        "update committed": step.created_at,
    }
    return {name: round(at - start, 2) for name, at in times.items()}


def describe_rounds(store: Store, keys: RunKeys, rollouts: list[Commit], steps: list[Commit]) -> dict[str, Any]:
    """Return seconds, speeds and curves of the rounds."""
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    measured = range(WARM_UP_ROUNDS, len(steps))
    parts = [round_seconds(store, keys, r, published) for r in measured]
    summaries = [rollout.summary | step.summary for rollout, step in zip(rollouts, steps, strict=True)]
    curves = {name: [summary[name] for summary in summaries] for name in CURVES}
    tokens = [s["rollout/response_len/mean"] * s["rollout/num_samples"] for s in summaries]
    total_tokens = [s["rollout/total_lengths"] * s["rollout/num_samples"] for s in summaries]
    means = {
        name: [round(statistics.fmean(values[at : at + BLOCK]), 5) for at in range(0, len(values), BLOCK)]
        for name, values in curves.items()
    }
    return {
        "median seconds by part": {name: round(value, 4) for name, value in median_seconds(parts).items()},
        "slowest and fastest round": [round(f(part["round"] for part in parts), 3) for f in (max, min)],
        "seconds of the first publish": published.get(0),
        "wall seconds from the first to the last update": round(steps[-1].created_at - steps[0].created_at, 1),
        "generated tokens/s, median": median_speed([tokens[r] / rollouts[r].seconds["generate"] for r in measured]),
        "trained tokens/s (with prompts), median": median_speed(
            [total_tokens[r] / steps[r].seconds["update"] for r in measured]
        ),
        "kilojoules of the GPU": {name: energy(summaries, name) for name in ENERGY},
        f"means of {BLOCK} rounds": means,
        "gap of each round": [round(value, 5) for value in curves[GAP]],
        "rounds with a NaN": sum(any(value != value for value in summary.values()) for summary in summaries),
    }


def median_speed(speeds: list[float]) -> int:
    return round(statistics.median(speeds))


def energy(summaries: list[dict[str, float]], name: str) -> float | None:
    """Return the sum over the rounds, or None if the GPU's energy was not measured."""
    values = [summary[name] for summary in summaries if name in summary]
    return round(sum(values) / 1e3, 2) if values else None


def held_out(store: Store, keys: RunKeys, task: str, rounds: int) -> dict[str, Any]:
    """Return accuracy [low, high] and mean reward on a task's held-out rows, by number of trained rounds."""
    result = {}
    for version in range(rounds + 1):
        if (commit := store.committed(keys.eval_prefix(version, task))) is not None:
            name = f"eval/{task}"
            numbers = [commit.summary[f"{name}-pass@1{suffix}"] for suffix in ("", "-ci_low", "-ci_high")]
            accuracy, low, high = (round(number, 4) for number in numbers)
            result[version] = {"accuracy": accuracy, "interval": [low, high], "reward": round(commit.summary[name], 4)}
    return result


if __name__ == "__main__":
    sys.exit(main())
