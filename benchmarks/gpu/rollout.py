"""Compare the speed of the rollout stage with the same requests, sent directly to the same SGLang server.

    python benchmarks/gpu/rollout.py DIRECTORY [--model 4b] [--prompts 64] [--samples 8] [--response-len 1024]
        [-- OPTIONS]
    python benchmarks/gpu/rollout.py DIRECTORY --model tiny --response-len 64      # rehearsal on a CPU; also: tiny-vl

OPTIONS are further options of `penstock train`. The stage includes prompts, rewards, shards and commit. The reference,
called floor in the report, is the speed of the direct requests: same prompts, groups, sampling parameters and lengths.
Order: requests, stage, stage, requests, with an empty prefix cache before each.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import MODELS, train_arguments
from report import make_parser, parse_options, write_report
from run import measure_rollout_stage

GOAL = 0.97


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for models and prompts")
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--response-len", type=int, default=1024, help="tokens of each sample")
    parser.add_argument("--repeats", type=int, default=1, help="repetitions of the four measurements")
    options = parse_options(parser)
    environment.set_default_variables()
    sizes = ["--rollout-batch-size", options.prompts, "--n-samples-per-prompt", options.samples]
    sizes += ["--rollout-max-response-len", options.response_len, "--sglang-mem-fraction-static", 0.8]  # no trainer
    arguments = [*train_arguments(options.directory, options.model, "bench"), *map(str, sizes), *options.train_options]
    with tempfile.TemporaryDirectory(dir=options.directory) as store:
        speeds, seconds = measure_rollout_stage(parse_config(arguments), Store(store), options.repeats)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    figures = {
        "tokens/s of the stage": round(medians["stage"]),
        "tokens/s of the direct requests (floor)": round(medians["requests"]),
        "ratio": round(medians["stage"] / medians["requests"], 4),
        "goal": f"at least {GOAL}",
        "all tokens/s": {name: [round(value) for value in values] for name, values in speeds.items()},
        "seconds of a stage": [round(value, 2) for value in seconds],
    }
    write_report(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
