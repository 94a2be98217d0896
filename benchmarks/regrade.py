"""Measure `penstock regrade` against a bare loop over the grader: seconds, and memory. Prints JSON.

    python benchmarks/regrade.py [--samples 1000000] [--reward math] [--repeats 3]

The run is synthetic: rounds of 4,096 samples in groups of 8, with responses of about 60 words that end with a boxed
number, every second of which is right. `bare` reads the same columns of the same samples, batch by batch, and grades
them with the same Grader; it compares and writes nothing. `regrade` is the command. `reading` only reads. Both are
measured alternately, in seconds of wall time and of CPU time of the process and its grading processes; the ratios are
those of the medians.
`memory` is the peak resident memory of a process that runs the command, in bytes: for the first tenth of the rounds,
and for all of them. `continued`: a process is killed with SIGKILL after half of the rounds, and the command is run
again; whether the results are those of an uninterrupted command, and the seconds of both processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from random import Random

from penstock.flows import cli
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.stages.eval.regrading import read_stored
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import RewardSettings
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store

ROUND, GROUP, WORDS = 4096, 8, 60
MEMORY = """import sys
from penstock.flows import cli
code = cli.main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1], file=sys.stderr)
sys.exit(code)"""  # getrusage would also count the memory of this process, of which it is a fork


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--reward", default="math", help="built-in reward (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        store = Store(f"{scratch}/store")
        keys = make_run(store, options.samples)
        ways: dict[str, Callable[[], object]] = {
            "reading": lambda: sum(1 for _ in all_samples(store, keys)),
            "bare": lambda: grade_all(store, keys, options.reward),
            "regrade": lambda: regrade(store, keys, options.reward),
        }
        measured = [{name: seconds(way) for name, way in ways.items()} for _ in range(options.repeats)]
        medians = {
            name: [round(statistics.median(each[name][kind] for each in measured), 2) for kind in (0, 1)]
            for name in ways
        }
        figures = {name: dict(zip(("wall", "cpu"), of_way)) for name, of_way in medians.items()}
        ratios = {kind: round(figures["regrade"][kind] / figures["bare"][kind], 3) for kind in ("wall", "cpu")}
        last = -(-options.samples // ROUND) - 1
        memory = [peak_memory(store, keys, options.reward, f"0-{end}") for end in (last // 10, last)]
        continued = kill_and_continue(store, keys, options.reward, last // 2)
    result = {"seconds": figures, "regrade_to_bare": ratios, "memory": memory, "continued": continued}
    print(json.dumps({**vars(options), **result}, indent=1))


def make_run(store: Store, num_samples: int) -> RunKeys:
    """Write a synthetic run with `num_samples` samples to the store."""
    words = ["--run", "bench", "--store", str(store.root), "--hf-checkpoint", "model", "--rm-type", "zero"]
    keys = open_run(store, resolve("train", parse_config([*words, "--prompt-data", "data.jsonl"]), store))
    random = Random(0)
    for r, start in enumerate(range(0, num_samples, ROUND)):
        prefix = keys.rollout_prefix(r)
        attempt = store.new_attempt(prefix)
        with store.writing(attempt) as out:
            write_shards(out.path, [make_sample(random, r, k) for k in range(start, min(start + ROUND, num_samples))])
        store.commit(prefix, Commit(kind="rollout", run=keys.run, index=r, attempt=attempt, files=out.files))
        step = Commit(kind="step", run=keys.run, index=r, inputs={"rollout": commit_key(prefix)})
        store.commit(keys.step_prefix(r), step)
    return keys


def make_sample(random: Random, r: int, k: int) -> Sample:
    """Return sample number `k` of the run, in round `r`."""
    group, label = f"{k // GROUP:09d}", random.randint(10, 999)
    answer = label if random.random() < 0.5 else label + 1
    text = " ".join(random.choices(("so", "we", "add", "the", "numbers", "and", "get", "more"), k=WORDS))
    return Sample(
        sample_id=f"{group}-{k % GROUP:02d}",
        group_id=group,
        trajectory_id=f"{group}-{k % GROUP:02d}",
        rollout_id=r,
        prompt=f"<|user|>{label} = <|end|><|assistant|>",
        response=f"{text} \\boxed{{{answer}}}<|end|>",
        label=str(label),
        token_ids=[7] * (8 + WORDS),
        loss_mask=[0] * 8 + [1] * WORDS,
        rollout_logprobs=[0.0] * 8 + [-0.5] * WORDS,
        reward=float(random.random() < 0.5),
        status=Status.COMPLETED,
        policy_versions=(r, r),
        metadata={"source": {"epoch": 0, "file": 0, "row": k // GROUP}},
    )


def all_samples(store: Store, keys: RunKeys) -> itertools.chain[Sample]:
    """Return the samples of all rounds, without their per-token fields."""
    rounds = (store.committed(keys.rollout_prefix(r)) for r in store.committed_indices(f"{keys.prefix}/rollouts"))
    stored = (read_stored(store, commit, with_tokens=False) for commit in rounds if commit)
    return itertools.chain.from_iterable((sample for sample, _ in of_round) for of_round in stored)


def grade_all(store: Store, keys: RunKeys, reward: str) -> None:
    """Grade all samples in a loop."""
    samples = all_samples(store, keys)
    with Grader(RewardSettings(reward)) as grader:
        while batch := list(itertools.islice(samples, 512)):
            grader.grade(batch)


def regrade(store: Store, keys: RunKeys, reward: str) -> None:
    """Run the command, without earlier results."""
    store.delete([file.key for file in store.walk(f"{keys.prefix}/regrades")])
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["regrade", keys.run, "--rm-type", reward, "--store", str(store.root)]) == 0


def seconds(way: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time of a call, and its CPU time with that of the processes that it started."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start, before = time.perf_counter(), used()
    way()
    return time.perf_counter() - start, used() - before


def peak_memory(store: Store, keys: RunKeys, reward: str, rounds: str) -> int:
    """Return the peak resident memory of a process that regrades some rounds, in bytes."""
    store.delete([file.key for file in store.walk(f"{keys.prefix}/regrades")])
    words = ["regrade", keys.run, "--rm-type", reward, "--rounds", rounds, "--store", str(store.root)]
    result = subprocess.run([sys.executable, "-c", MEMORY, *words], capture_output=True, text=True, check=True)
    return int(result.stderr.splitlines()[-1]) * 1024


def kill_and_continue(store: Store, keys: RunKeys, reward: str, num_rounds: int) -> dict[str, object]:
    """Compare the stored regrades, which are of a whole command, with those of a command that is killed after
    `num_rounds` rounds and then run again."""

    def results() -> dict[int, list[str]]:
        commits = store.walk(f"{keys.prefix}/regrades")
        records = [store.read_record(Commit, file.key) for file in commits if file.key.endswith(commit_key(""))]
        return {record.index: [file.xxh3 for file in record.files] for record in records if record}

    whole = results()
    store.delete([file.key for file in store.walk(f"{keys.prefix}/regrades")])
    words = ["regrade", keys.run, "--rm-type", reward, "--store", str(store.root)]
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL)
    while len(results()) < num_rounds:
        time.sleep(2)
    process.kill()
    process.wait()
    killed, num_graded = time.perf_counter(), len(results())
    subprocess.run([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL, check=True)
    seconds = [round(killed - start, 1), round(time.perf_counter() - killed, 1)]
    return {"rounds_before": num_graded, "rounds": len(whole), "equal": results() == whole, "seconds": seconds}


if __name__ == "__main__":
    main()
