"""Run GRPO on 1, 2, 4 and 8 GPUs of one host, and compare speeds. Parts that need fewer GPUs than the host has run side
by side, each on GPUs of its own.

    python benchmarks/gpu/scaling.py DIRECTORY [--parts PART ...] [--minutes N] [--output FILE] [-- OPTIONS]
    python benchmarks/gpu/scaling.py DIRECTORY --rehearse         # tiny models, three processes on a CPU as "GPUs"

OPTIONS are further options of `penstock train`. The report (default DIRECTORY/scaling.json) is written after every part
and continued by the next start: finished parts are not repeated, and parts that failed, did not fit or were interrupted
run again from their beginning. So the rounds of a figure are always those of one start.

dense      Qwen3-1.7B, 4B and 8B, 64 x 8 samples of 128 + 2,048 tokens, trainer and engines on the same GPUs
weak       Qwen3-1.7B as above with 64 x 8 samples per GPU
moe        Qwen3-30B-A3B whole, optimizer in host memory: EP8 and TP2 x EP4, 64 x 8 samples of 128 + 4,096 tokens, on
           eight GPUs; EP4, 128 + 2,048 tokens, on four GPUs of 139 GiB
llama      Llama-3.1-8B, 64 x 8 samples of 128 + 4,096 tokens
images     Qwen2.5-VL-3B on one GPU, and data and tensor parallel on two; Qwen3-VL-4B on two; 32 x 8 samples with a
           picture of 448 x 448 pixels in each prompt and 512 tokens in each response
apart      4B (1.7B with one GPU for the trainer), half or a quarter of the GPUs for engines, staleness 1 and 2, NCCL
tail       1.7B, lengths with a median of 512 and a 99th percentile of 8,192 tokens: synchronous on all GPUs, and half
           or a quarter of the GPUs for engines with staleness 1
kills      1.7B, and Qwen2.5-VL-3B (with one GPU a tiny model) with pictures: one trainer rank, one engine and the
           driver are killed; then audit and replay, bit for bit

Efficiency: seconds x GPUs of the smallest number of GPUs on which the model fits, over seconds x GPUs. The floor
(lowest possible time) of a round is generation, grading and training alone; of asynchronous runs the longest of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch
from scaling_parts import GROUPS, Part, all_parts
from scaling_runs import CHECKS, DoesNotFit, Interrupted, PartRun, RunFailed, kill_and_replay, make_arguments, measure

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import describe_setup, make_parser, parse_options

REHEARSAL_GPUS = 3  # two parts side by side; apart: two for the trainer, one for the engine


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for models, prompts, stores and logs")
    parser.add_argument("--parts", nargs="+", default=list(GROUPS), help="groups, or names of parts in their order")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command continues")
    parser.add_argument("--rehearse", action="store_true", help="tiny models and responses on a CPU")
    options = parse_options(parser)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    names = [] if options.rehearse else visible_gpus()
    if not names and not options.rehearse:
        parser.error("this machine has no GPU: use --rehearse")
    options.directory.mkdir(parents=True, exist_ok=True)
    report, stop = Report(options), Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    gpus = len(names) or REHEARSAL_GPUS
    parts = [part for name in options.parts for part in all_parts(gpus) if name in (part.group, part.name)]
    if not parts:
        parser.error(f"no part has one of these names: choose {', '.join(part.name for part in all_parts(gpus))}")
    pending = [part for part in parts if not report.is_finished(part)]
    arguments = prepare(pending, options, report, stop)

    def work(part: Part, taken: list[int]) -> None:
        visible = [names[index] for index in taken] if names else []
        run_part(PartRun(part, options.directory, arguments[part.name], visible, stop), report)

    run_side_by_side([part for part in pending if part.name in arguments], gpus, work, stop, deadline)
    print_table(report.parts)
    bad = [part.name for part in parts if not report.is_good(part)]
    if bad:
        print(f"\nfailed, interrupted, or with a failed check: {', '.join(bad)}")
    return 1 if bad else 0


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs for CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(index) for index in range(count)]


def prepare(parts: Iterable[Part], options: Namespace, report: Report, stop: Event) -> dict[str, list[str]]:
    """Make the models and prompts of all parts, before any part uses a GPU. Return the arguments of `penstock train`
    of each part; a part whose model cannot be made has none."""
    arguments: dict[str, list[str]] = {}
    for part in parts:
        if stop.is_set():
            break
        try:
            arguments[part.name] = make_arguments(part, options.directory, options.rehearse, options.train_options)
        except (RuntimeError, OSError) as error:
            report.add(part, {"failed": str(error)})
    return arguments


def run_side_by_side(
    parts: Iterable[Part], gpus: int, work: Callable[[Part, list[int]], None], stop: Event, deadline: float
) -> None:
    """Run every part in a thread as soon as enough GPUs are free.

    Args:
        parts: the parts, in order; a later one starts first if an earlier one needs more GPUs than are free.
        gpus: number of GPUs.
        work: runs a part on the GPUs with these indices.
        stop: no part is started after it is set.
        deadline: time (monotonic) at which `stop` is set.
    """
    pending, free = list(parts), list(range(gpus))
    running: dict[Future[None], list[int]] = {}
    with ThreadPoolExecutor(gpus) as pool:
        while running or (pending and not stop.is_set()):
            for part in list(pending):
                if part.gpus <= len(free) and not stop.is_set():
                    taken, free = free[: part.gpus], free[part.gpus :]
                    pending.remove(part)
                    running[pool.submit(work, part, taken)] = taken
            done = wait(running, timeout=1, return_when=FIRST_COMPLETED)[0]
            for future in done:
                free = sorted(free + running.pop(future))
                future.result()
            if time.monotonic() > deadline:
                stop.set()


def run_part(run: PartRun, report: Report) -> None:
    """Run a part, and add its result, or why it has none, to the report."""
    part = run.part
    say(part, f"starting on GPUs {','.join(run.gpus) or '(none)'}; log: {run.log}")
    try:
        if part.group == "kills":
            earlier = report.parts.get(part.name, {})
            kill_and_replay(run, {check: earlier[check] for check in CHECKS if check in earlier}, report.adder(part))
        else:
            report.add(part, measure(run))
    except Interrupted:
        say(part, "interrupted; the same command continues")
    except DoesNotFit as reason:
        report.add(part, {"does not fit": str(reason)})
    except RunFailed as error:
        report.add(part, {"failed": str(error)})
    except Exception as error:  # its figures cannot be read: the other parts still run
        report.add(part, {"failed": f"{type(error).__name__}: {error}"})


def say(part: Part, text: str) -> None:
    """Print a line about a part. One write, because parts run in threads."""
    print(f"{part.name}: {text}\n", end="", flush=True)


class Report:
    """The results of all parts, each with the hardware and the commit that it was measured with, in a file."""

    def __init__(self, options: Namespace) -> None:
        self.path = options.output or options.directory / "scaling.json"
        setup = describe_setup(options)
        self._setup = {name: setup[name] for name in ("hardware", "software", "commit")}
        self._setup |= {"date": date.today().isoformat(), "options": options.train_options}
        if options.rehearse:
            self._setup["rehearsal"] = True
        self._lock = Lock()
        self.parts: dict[str, Any] = json.loads(self.path.read_text())["parts"] if self.path.exists() else {}

    def add(self, part: Part, result: dict[str, Any]) -> None:
        """Add or replace the result of a part, and write the report."""
        with self._lock:
            self.parts[part.name] = {"model": part.model, "gpus": part.gpus} | result | self._setup
            content = {"benchmark": "scaling.py", "parts": self.parts, "efficiency": efficiencies(self.parts)}
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(content, indent=1) + "\n")
            unfinished.replace(self.path)
        say(part, json.dumps(result))

    def adder(self, part: Part) -> Callable[[dict[str, Any]], None]:
        """Return `add` for a part."""
        return lambda result: self.add(part, result)

    def is_finished(self, part: Part) -> bool:
        """Return whether a part is not to be run again: it is measured, or all checks were made."""
        result = self.parts.get(part.name, {})
        return "seconds of a round" in result or all(check in result for check in CHECKS)

    def is_good(self, part: Part) -> bool:
        """Return whether a part is measured, does not fit, or has passed all checks."""
        result = self.parts.get(part.name, {})
        measured = "seconds of a round" in result or "does not fit" in result
        return measured or all(result.get(check) is True for check in CHECKS)


def efficiencies(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return, for each run of the groups "dense" and "weak", the efficiency of training and of generation against the
    run of the same model on the fewest GPUs of the same kind."""
    dense = [
        (name, result)
        for name, result in results.items()
        if name.startswith(("dense", "weak")) and "floor of a round" in result
    ]
    base: dict[tuple[str, str], Any] = {}
    table: dict[str, dict[str, float]] = {}
    for name, result in sorted(dense, key=lambda item: item[1]["gpus"]):
        first = base.setdefault((result["model"], gpu_name(result)), result)
        table[name] = {
            stage: round(work(name, result) * gpu_seconds(first, stage) / gpu_seconds(result, stage), 3)
            for stage in ("training", "generation")
        }
    return table


def work(name: str, result: dict[str, Any]) -> int:
    """Return how many times 64 x 8 samples a round has."""
    return int(result["gpus"]) if name.startswith("weak") else 1


def gpu_name(result: dict[str, Any]) -> str:
    """Return the kind of the GPUs of a result, from the names of all GPUs of its host."""
    return str(result["hardware"]).partition(";")[0].partition(",")[0]


def gpu_seconds(result: dict[str, Any], stage: str) -> float:
    """Return the seconds of a stage of a round times the number of GPUs."""
    return float(result["parts of a round"][stage] * result["gpus"])


def print_table(results: dict[str, Any]) -> None:
    """Print the speeds as a Markdown table."""
    columns = ("gpus", "seconds of a round", "floor of a round", "tokens/s per GPU", "trained tokens/s per GPU")
    print("\n| run | GPUs |", " | ".join(columns[1:]), "| train MFU |")
    print("|---" * (len(columns) + 2) + "|")
    for name, result in results.items():
        if "seconds of a round" in result:
            mfu = "" if result["train MFU"] is None else f"{result['train MFU']:.1%}"
            print("|", " | ".join(map(str, [name, *(result[column] for column in columns), mfu])), "|")


if __name__ == "__main__":
    sys.exit(main())
