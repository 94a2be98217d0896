"""Run the whole loop on one GPU, with trainer and engine on the same GPU and weights sent over CUDA IPC, and print the
seconds of each part of a round.

    python benchmarks/gpu/round.py DIRECTORY [--model 0.6b] [--rounds 6] [-- OPTIONS]
    python benchmarks/gpu/round.py DIRECTORY --model tiny -- --rollout-max-response-len 64       # rehearsal on a CPU

OPTIONS are further options of `penstock train`; the default is 32 prompts x 8 samples of 128 + 512 tokens. The parts
are medians over the rounds after the second, in which kernels are compiled. The floor (lowest possible time) of a round
is generation, grading and training alone. The checkpoint and the export after the last round are reported apart.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import MODELS, train_arguments
from report import make_parser, parse_options, write_report
from run import median_seconds, print_seconds, read_publish_seconds, round_seconds

WARM_UP_ROUNDS = 2
RUN = "round"
GOAL = 0.04  # share of a round outside generation, grading and training


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for model, prompts and the store `round`")
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--rounds", type=int, default=6)
    options = parse_options(parser)
    environment.set_default_variables()
    shutil.rmtree(options.directory / RUN, ignore_errors=True)  # the store of an earlier measurement
    arguments = train_arguments(options.directory, options.model, RUN)
    config = parse_config([*arguments, "--num-rollout", str(options.rounds), *options.train_options])
    if code := run_flow("train", config):
        return code
    store, keys = open_store(config.run), RunKeys(RUN)
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    rounds = range(min(WARM_UP_ROUNDS, options.rounds - 1), options.rounds)
    seconds = median_seconds([round_seconds(store, keys, r, published) for r in rounds if r > 0])
    print_seconds(seconds)
    floor = seconds["round"] - seconds["overhead"]
    figures = {
        "seconds of a round": {name: round(value, 4) for name, value in seconds.items()},
        "floor: generation, grading and training": round(floor, 4),
        "share outside the floor": round(seconds["overhead"] / seconds["round"], 4),
        "goal": f"at most {GOAL}",
        "after the last round": last_stages(store, keys, options.rounds),
        "metrics of the rounds": [round_metrics(store, keys, r) for r in range(options.rounds)],
    }
    write_report(options, figures)
    return 0


def last_stages(store: Store, keys: RunKeys, version: int) -> dict[str, float]:
    """Return the seconds of saving and exporting policy `version`."""
    commits = [store.committed(prefix) for prefix in (keys.checkpoint_prefix(version), keys.export_prefix(version))]
    return {name: round(value, 2) for commit in commits if commit for name, value in commit.seconds.items()}


def round_metrics(store: Store, keys: RunKeys, r: int) -> dict[str, Any]:
    """Return the seconds of the parts and the metrics in the two commits of round `r`."""
    commits = [store.committed(prefix) for prefix in (keys.rollout_prefix(r), keys.step_prefix(r))]
    values = [commit.seconds | commit.summary for commit in commits if commit]
    return {name: round(value, 6) for entries in values for name, value in entries.items()}


if __name__ == "__main__":
    sys.exit(main())
