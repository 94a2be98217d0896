"""Measure memory and time of `--streaming-data` for a prompt file that is larger than memory.

    python benchmarks/streaming.py DIRECTORY [--gigabytes 10] [--workers 2]

DIRECTORY needs disk space of twice the size of the prompt file: for the file and for the cache of its rows. Both are
deleted at the end. The file is opened by two processes in turn: the first builds the cache, the second uses it. Memory
is the peak resident memory of a process, and of its largest worker.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.source import PromptSource

ROW_BYTES = 1000
ROUNDS, PROMPTS = 100, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory for the temporary prompt file")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the prompt file")
    parser.add_argument("--workers", type=int, default=2, help="--num-data-workers")
    parser.add_argument("--start", choices=("first", "next"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        measure_start(options.directory, options.workers)
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="penstock-bench-") as scratch:
        num_rows = write_prompts(Path(scratch) / "prompts.jsonl", round(options.gigabytes * 1e9))
        print(f"{num_rows:,} rows of {ROW_BYTES} bytes, {options.workers} workers")
        for start in ("first", "next"):
            subprocess.run(
                [sys.executable, __file__, scratch, "--workers", str(options.workers), "--start", start], check=True
            )


def write_prompts(path: Path, num_bytes: int) -> int:
    """Write distinct rows of ROW_BYTES bytes to a file until it has `num_bytes`, and return the number of rows."""
    rng, num_rows = random.Random(0), num_bytes // ROW_BYTES
    words = " ".join(rng.choice(["prime", "sum", "proof", "triangle", "number"]) for _ in range(ROW_BYTES))
    with path.open("w") as file:
        for number in range(num_rows):
            row = json.dumps({"input": "", "label": number, "metadata": {"level": number % 7}})
            start = rng.randrange(ROW_BYTES)
            file.write(row.replace('""', f'"{words[start : start + ROW_BYTES - len(row) - 1]}"', 1) + "\n")
    return num_rows


def measure_start(directory: Path, workers: int) -> None:
    """Open the prompt file as a run does, draw shuffled prompts, and print time and peak memory."""
    config = RolloutConfig(
        prompt_data=[str(directory / "prompts.jsonl")],
        label_key="label",
        rollout_shuffle=True,
        streaming_data=True,
        data_cache=str(directory / "cache"),
        num_data_workers=workers,
    )
    begin = time.perf_counter()
    source = PromptSource.open(config)
    opened = time.perf_counter()
    state = source.restore(None)
    restored = time.perf_counter()
    for _ in range(ROUNDS):
        state = source.take(state, PROMPTS)[1]
    drawn = (time.perf_counter() - restored) / (ROUNDS * PROMPTS)
    own, worker = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"opened in {opened - begin:.1f} s, hashed in {restored - opened:.1f} s, {drawn * 1e6:.0f} us per prompt; "
        f"peak memory {own:.0f} MiB, of a worker {worker:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
