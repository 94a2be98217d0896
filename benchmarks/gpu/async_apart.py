"""Compare the trained tokens/s of the asynchronous modes with those of the synchronous loop, on two GPUs.

    python benchmarks/gpu/async_apart.py DIRECTORY [--model 0.6b] [--prompt-tokens 384] [--modes MODE ...] [-- OPTIONS]
    python benchmarks/gpu/async_apart.py DIRECTORY --model tiny --rounds 4 -- --rollout-max-response-len 16   # on a CPU

OPTIONS are further options of `penstock train`. In all modes but "colocated" one GPU trains and the other one generates
(on a CPU, as a rehearsal, both share the cores). All responses have the maximum length; choose the length of the
prompts, which mainly costs training time, so that generation and training take equally long in the synchronous loop.
Trained tokens/s: tokens with a loss mask, over the time from the commit of the second step, since kernels are compiled
in the first two, to that of the last step. The floor (lowest possible time) of a round is the longer of generation and
training. A run that has finished is not repeated. Prints JSON.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import QWEN3, train_arguments
from learning import read_commit
from report import make_parser, parse_options, write_report

APART = ["--rollout-num-gpus", "1", "--update-weight-transport", "nccl"]
MODES = {  # name -> (placement on two GPUs, options)
    "synchronous": (APART, []),
    "ahead": (APART, ["--async-buffer-size", "1"]),
    "streaming": (APART, ["--async-mode", "streaming", "--max-staleness", "2"]),
    "colocated": (["--actor-num-gpus-per-node", "2"], []),
}
WARM_UP_ROUNDS = 2
GOAL = 1.6  # factor over the trained tokens/s of the synchronous loop on the same two GPUs


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for model, prompts, stores and logs")
    parser.add_argument("--model", choices=QWEN3, default="0.6b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parse_options(parser)
    measured = {mode: measure(mode, options) for mode in options.modes}
    figures: dict[str, Any] = {"goal": f"at least {GOAL} x synchronous", "modes": measured}
    if "synchronous" in measured:
        floor = measured["synchronous"]["trained tokens/s"]
        figures["ratio"] = {mode: round(run["trained tokens/s"] / floor, 3) for mode, run in measured.items()}
    write_report(options, figures)
    return 0


def measure(mode: str, options: Any) -> dict[str, Any]:
    """Run one mode to its end, and return its speed and the medians of the parts of its rounds."""
    name = f"{mode}-{options.prompt_tokens}"
    placement, own = MODES[mode]
    words = train_arguments(options.directory, options.model, name, options.prompt_tokens)
    words += [*(placement if torch.cuda.is_available() else []), *own, "--num-rollout", str(options.rounds)]
    with (options.directory / f"{name}.log").open("a", encoding="utf-8") as log:
        command = [sys.executable, "-m", "penstock", "train", *words, *options.train_options]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    store, keys = Store(str(options.directory / name)), RunKeys(name)
    rollouts = [read_commit(store, keys.rollout_prefix(r)) for r in range(options.rounds)]
    steps = [read_commit(store, keys.step_prefix(r)) for r in range(options.rounds)]
    tokens = [sum(sum(sample.loss_mask) for sample in read_samples(store, rollout)) for rollout in rollouts]
    seconds = steps[-1].created_at - steps[WARM_UP_ROUNDS - 1].created_at
    steady = slice(WARM_UP_ROUNDS, None)
    speed = sum(tokens[steady]) / seconds
    result = {
        "trained tokens/s": round(speed),
        "seconds of a round": round(seconds / (options.rounds - WARM_UP_ROUNDS), 3),
        "generation": median(rollout.seconds["generate"] for rollout in rollouts[steady]),
        "training": median(sum(step.seconds.values()) for step in steps[steady]),
        "trained tokens of a round": statistics.median(tokens[steady]),
        "staleness": median(rollout.summary["rollout/staleness/mean"] for rollout in rollouts[steady]),
        "gap": median(step.summary["train/train_rollout_logprob_abs_diff"] for step in steps[steady]),
    }
    print(mode, result, file=sys.stderr, flush=True)
    return result


def median(values: Any) -> float:
    return round(statistics.median(values), 5)


if __name__ == "__main__":
    sys.exit(main())
