"""Pairs of faults 1 to 10 seconds apart, at random moments of short runs. A program; a test marked `full` runs one
seed.

    python tests/durability/pairs.py --results pairs.jsonl --seeds 0 1 2 3 4 5          60 pairs in six runs

The second fault finds the run while it recovers from the first one: a replacement engine that loads, a Ray that starts,
a driver that looks for its commits. Every run must end by itself, without a finding of `penstock verify`, and all its
rounds must replay bit for bit. A run that commits nothing for PATIENCE seconds after a pair hangs: the stacks of its
threads are appended to its log, and the program fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from harness import Pipeline, World, tiny_flags
from matrix import read_results

TARGETS = ("engine", "scheduler", "trainer", "raylet", "gcs", "runtime-env-agent", "prefect", "driver", "tree")
PATIENCE = 420.0  # seconds after a fault without a commit: a hang. Ray's longest wait is 60 s, and a stage is retried
APPEARS = 20.0  # seconds to wait for the first target of a pair; the second is any target that exists after the gap
SLOW = ("--rollout-max-response-len", "64", "--sglang-max-running-requests", "4")  # rounds of 10 s on two cores


class Progress:
    """The number of commits of a run, and the time of its last change."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.count, self.since = 0, time.monotonic()

    def begin(self) -> int:
        """Allow PATIENCE seconds from now on. Returns the number of commits."""
        self.since = time.monotonic()
        return self.look()

    def look(self) -> int:
        """Return the number of commits. Raises AssertionError if it has not changed for PATIENCE seconds."""
        time.sleep(0.3)
        kinds = ("rollouts", "steps", "checkpoints", "exports")
        lists = [self.pipeline.store.list(f"{self.pipeline.keys.prefix}/{kind}") for kind in kinds]
        count = sum(name.endswith((".commit.json", ".expired.json")) for names in lists for name in names)
        if count != self.count:
            self.count, self.since = count, time.monotonic()
        silent = time.monotonic() - self.since
        if silent > PATIENCE:
            os.kill(self.pipeline.pid, signal.SIGABRT)  # faulthandler prints every thread's stack
            self.pipeline.wait(30)
            raise AssertionError(f"HANG: no commit for {silent:.0f} s:\n{self.pipeline.tail(20_000)}")
        return count


def fire(pipeline: Pipeline, progress: Progress, targets: Sequence[str], patience: float) -> tuple[str, int]:
    """Kill the first of the targets that exists, after waiting for one if needed. Return it and the number of killed
    processes."""
    deadline = time.monotonic() + patience

    def present() -> str | None:
        progress.look()
        return next((target for target in targets if pipeline.victims(target)), None)

    while (target := present()) is None and time.monotonic() < deadline:
        pipeline.run_until(lambda: True)
        if pipeline.returncode() is not None and pipeline.returncode() != 0:
            pipeline.start()
    if target is None or pipeline.returncode() is not None:
        return targets[0], 0
    return target, pipeline.strike(target, patience=0)


def one_pair(pipeline: Pipeline, progress: Progress, rng: random.Random) -> dict[str, Any]:
    """Kill two targets one after the other, at a random moment. Returns a record of it."""
    order = rng.sample(TARGETS, len(TARGETS))
    moment, gap = rng.uniform(0, 10), rng.uniform(1, 10)
    let_run(pipeline, progress, moment)
    start, starts = time.monotonic(), pipeline.num_starts
    first, num_first = fire(pipeline, progress, order[:1], APPEARS)
    let_run(pipeline, progress, gap)
    second, num_second = fire(pipeline, progress, [target for target in order if target != first], 0)
    record: dict[str, Any] = {"targets": [first, second], "gap": round(gap, 1), "killed": [num_first, num_second]}
    before = progress.begin()
    pipeline.run_until(lambda: progress.look() > before, timeout=2 * PATIENCE)
    return {**record, "seconds": round(time.monotonic() - start, 1), "starts": pipeline.num_starts - starts}


def let_run(pipeline: Pipeline, progress: Progress, seconds: float) -> None:
    """Let the run continue for some seconds; restart it if it was killed."""
    due = time.monotonic() + seconds
    pipeline.run_until(lambda: progress.look() >= 0 and time.monotonic() > due)


def one_run(root: Path, seed: int, num_pairs: int, num_rounds: int) -> dict[str, Any]:
    """Run `num_rounds` rounds with at most `num_pairs` pairs of faults, then check and replay the run."""
    rng = random.Random(seed)
    with World(root) as world:
        world.environment["PYTHONFAULTHANDLER"] = "1"
        pipeline = Pipeline(world, f"pairs-{seed}", str(root / "store"), [*tiny_flags(world, num_rounds), *SLOW])
        progress = Progress(pipeline)
        start, pairs = time.monotonic(), []
        while len(pairs) < num_pairs and (not pairs or pipeline.returncode() != 0):
            pairs.append(one_pair(pipeline, progress, rng))
            print(f"  seed {seed} pair {len(pairs)}: {pairs[-1]} commits {progress.count}", flush=True)
        pipeline.run_until(lambda: progress.look() < 0, timeout=3600)
        killed_at = time.monotonic() - start
        counts = pipeline.check()
        replayed = pipeline.replay()
        assert replayed == num_rounds, f"{replayed} of {num_rounds} rounds were replayed"
        return {
            "seed": seed,
            "pairs": pairs,
            "executed": sum(all(pair["killed"]) for pair in pairs),
            "starts": pipeline.num_starts,
            "seconds": round(killed_at),
            "replayed": replayed,
            **counts,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="runs in this file are not repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(6))
    parser.add_argument("--pairs", type=int, default=10, help="in each run")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    results = read_results(options.results)
    failed = 0
    for seed in options.seeds:
        if any(result["seed"] == seed for result in results):
            continue
        root = Path(tempfile.mkdtemp(prefix="penstock-pairs-"))
        try:
            results.append(one_run(root, seed, options.pairs, options.rounds))
        except AssertionError as error:
            failed += 1
            print(f"  seed {seed} FAILED: {error}\n  everything is kept in {root}", flush=True)
            continue
        with options.results.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        shutil.rmtree(root)
    executed = sum(result["executed"] for result in results)
    replayed = sum(result["replayed"] for result in results)
    print(f"{executed} pairs in {len(results)} runs, {replayed} rounds replayed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
