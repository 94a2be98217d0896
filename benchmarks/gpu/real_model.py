"""Train a real model on real tasks (examples/smollm2) on one GPU, and report the seconds of the start and of a round by
part, rewards, the gap of each round, and the held-out accuracy with its 95 % intervals.

    python examples/smollm2/model.py model && python examples/smollm2/data.py data
    python benchmarks/gpu/real_model.py DIRECTORY --model model --data data [--seed 0] [--rounds 100] [-- OPTIONS]
    python benchmarks/gpu/real_model.py DIRECTORY --model model --data data --kills 10 --replay 0,50,99 [-- OPTIONS]

OPTIONS are further options of `penstock train`, such as --advantage-estimator gspo. The default recipe is that of the
example, whose reward is imported from the current directory: run this in the root of the repository. The parts of a
round are medians over all rounds but the first two.

--kills N kills trainer, engine and driver with SIGKILL, N times in all, equally often, in rounds and moments drawn from
the seed; the driver is started again at once. A kill costs the time of its round and the next one, including their
evaluation and checkpoint, minus twice the median round. --replay verifies the run and trains the named rounds again.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from bisect import bisect
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from scaling_runs import KILLS, PENSTOCK, POLL_SECONDS, kill_one

from penstock.flows.commands.demo import EQUAL, num_trained
from penstock.storage.commit import CheckpointRef, Commit, RunKeys
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
KILL_DELAY = 2.0  # seconds after the update of a round in which a process is killed: about a round


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for all files and logs")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory that examples/smollm2/data.py wrote")
    parser.add_argument("--config", type=Path, default=RECIPE, help="recipe")
    parser.add_argument("--name", default="grpo", help="name of the run, followed by its seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kills", type=int, default=0, help="number of kills, at most one in three rounds")
    parser.add_argument("--replay", help='rounds to replay after the run: "0,50,99" or "all"')
    options = parse_options(parser)
    if options.kills * 3 > options.rounds:
        parser.error(f"--kills {options.kills} needs at least {options.kills * 3} --rounds, found {options.rounds}")
    run, ranges = f"{options.name}-seed{options.seed}", replay_ranges(options.replay, options.rounds)
    options.directory.mkdir(parents=True, exist_ok=True)
    start = time.time()
    lines, kills = run_training(run, options)
    seconds = round(time.time() - start, 1)
    store, keys = Store(str(options.directory / run)), RunKeys(run)
    rollouts = [read_commit(store, keys.rollout_prefix(r)) for r in range(options.rounds)]
    steps = [read_commit(store, keys.step_prefix(r)) for r in range(options.rounds)]
    figures = {
        "wall seconds": seconds,
        "seconds from the start": start_times(store, keys, start),
        "lines of the start": [line for line in lines if line[0] < steps[0].created_at - start + 1],
        "rounds": describe_rounds(store, keys, rollouts, steps),
        "held out": {task: held_out(store, keys, task, options.rounds) for task in TASKS},
    }
    if kills:
        figures["kills"] = describe_kills(kills, [step.created_at for step in steps])
    figures["settings of the model"] = {"model": str(options.model), "data": str(options.data)}
    options.model = options.data = options.config = None  # do not report paths of this machine
    write_report(options, figures)
    if ranges:
        figures["verify and replay"] = verify_and_replay(run, options.directory, ranges)
        write_report(options, figures)
    return 0


Lines = list[tuple[float, str]]  # seconds from the start, line
Kill = tuple[float, str]  # time, target


def run_training(run: str, options: Any) -> tuple[Lines, list[Kill]]:
    """Run `penstock train` to its end, and kill its processes during the run. Return its output lines and the kills."""
    words = ["train", "--config", options.config, "--run", run, "--store", options.directory / run]
    words += ["--hf-checkpoint", options.model, "--num-rollout", options.rounds]
    words += ["--prompt-data", options.data / "train.jsonl"]
    for task in TASKS:
        words += ["--eval-prompt-data", task, options.data / f"heldout-{task}.jsonl"]
    words += ["--seed", options.seed, "--rollout-seed", options.seed, *options.train_options]
    waiting, kills, lines = plan_kills(options.kills, options.rounds, options.seed), [], []
    with (options.directory / f"{run}.log").open("w", encoding="utf-8") as log:
        start = time.time()
        print(0.0, f"start, {start:.1f} s since the epoch", file=log, flush=True)
        process, reader = start_command(words, start, lines, log)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if not waiting or num_trained(str(options.directory / run), RunKeys(run)) <= waiting[0][0]:
                continue
            _, delay, target = waiting[0]
            time.sleep(delay)
            at = time.time()
            if kill(process, target):
                print(round(at - start, 2), f"killed: {target}", file=log, flush=True)
                kills.append((at, target))
                waiting.pop(0)
                if target == "driver":
                    process, reader = start_command(words, start, lines, log)
        reader.join()
    if process.returncode:
        raise SystemExit(f"run {run} failed with exit code {process.returncode}: see {options.directory / run}.log")
    return lines, kills


def start_command(words: list[Any], start: float, lines: Lines, log: TextIO) -> tuple[subprocess.Popen[str], Thread]:
    """Start a `penstock` command. A thread appends its lines to `lines` and to the log."""
    command = [*PENSTOCK, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")

    def read() -> None:
        for line in process.stdout or ():
            lines.append((round(time.time() - start, 2), line.rstrip()[:160]))
            print(*lines[-1], file=log, flush=True)

    reader = Thread(target=read, daemon=True)
    reader.start()
    return process, reader


def plan_kills(number: int, rounds: int, seed: int) -> list[tuple[int, float, str]]:
    """Return (round, seconds after its update, target) of each kill. Some rounds without a kill follow each one."""
    rng = random.Random(seed)
    targets = [KILLS[index % len(KILLS)] for index in range(number)]
    rng.shuffle(targets)
    span = rounds // max(number, 1)
    return [
        (index * span + rng.randrange(max(1, span - 4)), rng.uniform(0, KILL_DELAY), target)
        for index, target in enumerate(targets)
    ]


def kill(process: subprocess.Popen[str], target: str) -> bool:
    """Kill a process of the kind `target` with SIGKILL, and return whether there was one. The children of a killed
    driver end by themselves while it is restarted."""
    if target != "driver":
        return kill_one(process.pid, target)
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return True


def describe_kills(kills: list[Kill], updates: list[float]) -> dict[str, Any]:
    """Return the seconds lost to each kill.

    Args:
        kills: time and target of each kill.
        updates: time at which the update of each round was committed.
    """
    usual = statistics.median(after - before for before, after in pairwise(updates))
    recoveries, end = [], len(updates) - 1
    for at, target in kills:
        if (interrupted := bisect(updates, at)) > end:
            continue  # killed after the last update
        following = min(interrupted + 1, end)
        lost = updates[following] - updates[interrupted - 1] - (following - interrupted + 1) * usual
        seconds = {"seconds to its update": round(updates[interrupted] - at, 2), "seconds lost": round(lost, 2)}
        recoveries.append({"round": interrupted, "target": target, **seconds})
    means = {
        name: round(statistics.fmean(r["seconds lost"] for r in recoveries if r["target"] == name), 2)
        for name in sorted({r["target"] for r in recoveries})
    }
    total = round(sum(r["seconds lost"] for r in recoveries), 2)
    return {"recoveries": recoveries, "mean seconds lost by target": means, "seconds lost": total}


def verify_and_replay(run: str, directory: Path, ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the last line of `penstock verify`, and the verdict of the replay of each round of the ranges, and of the
    rounds since the checkpoint before each range. All processes run at the same time."""
    where = [run, "--store", str(directory / run)]
    reports = [directory / f"{run}-replay-{first}.json" for first, _ in ranges]
    processes = []
    for (first, last), report in zip(ranges, reports, strict=True):
        report.unlink(missing_ok=True)
        words = ["replay", *where, "--from", str(first), "--to", str(last), "--json", str(report)]
        with report.with_suffix(".log").open("w") as log:
            processes.append(subprocess.Popen([*PENSTOCK, *words], stdout=log, stderr=subprocess.STDOUT))
    audit = subprocess.run([*PENSTOCK, "verify", *where], capture_output=True, text=True, check=False)
    for process in processes:
        process.wait()
    verdicts: dict[int, str] = {first: "not replayed" for first, _ in ranges}
    for report in filter(Path.exists, reports):
        verdicts |= {int(r): replayed["verdict"] for r, replayed in json.loads(report.read_text()).items()}
    return {
        "verify": (audit.stdout.splitlines() or audit.stderr.splitlines())[-1],
        "rounds that are equal bit for bit": f"{list(verdicts.values()).count(EQUAL)} of {len(verdicts)}",
        "verdicts": {r: verdicts[r] for r in sorted(verdicts)},
    }


def replay_ranges(text: str | None, rounds: int) -> list[tuple[int, int]]:
    """Return the ranges of policy versions that replay the rounds of --replay."""
    if text == "all":
        return [(0, rounds)]
    return [(int(word), int(word) + 1) for word in text.split(",")] if text else []


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
        f"means of {BLOCK} rounds": block_means(curves),
        "gap of each round": [round(value, 5) for value in curves[GAP]],
        "rounds with a NaN": sum(any(value != value for value in summary.values()) for summary in summaries),
    }


def block_means(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    return {
        name: [round(statistics.fmean(values[at : at + BLOCK]), 5) for at in range(0, len(values), BLOCK)]
        for name, values in curves.items()
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
