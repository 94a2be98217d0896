"""The kill matrix: every target killed at every boundary, on a local disk and on a real S3 API. A program; tests
kill several targets in turn at the boundaries of one run.

    python tests/durability/matrix.py --results matrix.jsonl                everything (hours on 2 cores), resumable
    python tests/durability/matrix.py --results matrix.jsonl --table        the table of what was done so far
    python tests/durability/matrix.py --results streaming.jsonl --mode streaming     the same of an asynchronous run

One run per target and store is killed at all boundaries, one after the other, and has to end by itself in between.
Finished runs are in the results file and are not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from harness import MODES, TARGETS, Pipeline, World, points_of, tiny_flags

STORES = ("local", "s3")
ROUNDS = {"synchronous": 6, "ahead": 12, "streaming": 14}  # enough for every point after the previous one


def kill_at(pipeline: Pipeline, schedule: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Kill `target` at `point` for every pair, in this order, let the run end, and check it. Returns a record for every
    kill.

    Raises:
        AssertionError: something was lost, done twice, left running, or the run did not continue.
    """
    kills = []
    standing: dict[str, bytes] = {}
    pipeline.arm(schedule[0][0])
    for number, (point, target) in enumerate(schedule):
        start, starts = time.monotonic(), pipeline.num_starts
        assert pipeline.run_until(partial(pipeline.is_at, point)), f"the run ended before {point}:\n{pipeline.tail()}"
        before = pipeline.commits()
        changed = [key for key, data in standing.items() if key in before and before[key] != data]
        assert not changed, f"commit records changed: {changed}"
        standing = before
        num_killed = pipeline.strike(target)
        if number + 1 < len(schedule):
            # Only now: a rank that dies with its driver could reach the point earlier.
            pipeline.arm(schedule[number + 1][0])
        pipeline.release(point)
        kill = {"point": point, "target": target, "num_killed": num_killed, "starts": starts}
        kills.append({**kill, "seconds": time.monotonic() - start})
        print(f"  {point:<26} {target:<22} {num_killed} killed", flush=True)
    pipeline.run_until(lambda: False)
    changed = [key for key, data in standing.items() if pipeline.commits().get(key, data) != data]
    assert not changed, f"commit records changed: {changed}"
    return kills


def verdict(pipeline: Pipeline, mode: str = "synchronous") -> dict[str, Any]:
    """Check a killed run after its end; return the results."""
    counts = pipeline.check()
    pipeline.check_consumption(MODES[mode][1])
    return {"starts": pipeline.num_starts, "replayed_rounds": pipeline.replay(), **counts}


def one_run(
    world: World, store: str, targets: Sequence[str], points: Sequence[str], mode: str = "synchronous"
) -> dict[str, Any]:
    """Kill a target at each boundary of one run: the first of `targets` at the first one, and so on, in turn."""
    if "prefect" not in targets:  # else every run starts its own, which is the one to kill
        world.start_prefect()
    world.start_mlflow()
    options = world.start_s3() if store == "s3" else None
    address = world.start_ray() if "driver, standing Ray" in targets else None
    uri = "s3://bucket/store" if store == "s3" else str(world.root / "store")
    pipeline = Pipeline(world, "matrix", uri, tiny_flags(world, ROUNDS[mode], mode), options, address)
    start = time.monotonic()
    kills = kill_at(pipeline, list(zip(points, cycle(targets))))
    return {
        "store": store,
        "target": " and ".join(targets),
        "kills": kills,
        "verdict": verdict(pipeline, mode),
        "seconds": time.monotonic() - start,
    }


def table(results: Sequence[dict[str, Any]], points: Sequence[str]) -> str:
    """Print targets x boundaries: survived kills, local / S3; `-` where nothing could be killed."""
    lines = ["| boundary | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for point in points:
        cells = []
        for target in TARGETS:
            found = {
                result["store"]: sum(kill["num_killed"] > 0 for kill in result["kills"] if kill["point"] == point)
                for result in results
                if result["target"] == target
            }
            cells.append(" / ".join(str(found.get(store, "")) or " " for store in STORES))
        lines.append(f"| {point} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the results of finished runs, which are not repeated; one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--mode", default="synchronous", choices=MODES)
    parser.add_argument("--points", nargs="+", help="by default all of the mode")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    points = options.points or points_of(options.mode)
    results = read_results(options.results)
    failed = 0
    for store in options.stores if not options.table else ():
        for target in options.targets:
            if any(result["store"] == store and result["target"] == target for result in results):
                continue
            print(f"{target} on {store}", flush=True)
            root = Path(tempfile.mkdtemp(prefix="penstock-matrix-"))
            try:
                with World(root) as world:
                    result = one_run(world, store, [target], points, options.mode)
            except AssertionError as error:
                failed += 1
                print(f"  FAILED: {error}\n  everything is kept in {root}", flush=True)
                continue
            results.append(result)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"  ok in {result['seconds']:.0f} s: {result['verdict']}", flush=True)
            shutil.rmtree(root)
    print(table(results, points))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
