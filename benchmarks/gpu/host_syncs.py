"""Count the places at which the host waits for the GPU during one round of training.

    python benchmarks/gpu/host_syncs.py [--model 0.6b] [--layers 4] [--packs 4]

Trains GRPO rounds as benchmarks/gpu/step.py does, the last one under torch.cuda.set_sync_debug_mode("warn"). Prints
JSON: innermost line of Penstock or Megatron-core -> number of waits. Waits of Penstock's own phase timers, which call
torch.cuda.synchronize, are not counted by torch.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from report import make_parser, parse_options, write_report
from step import SIZES, sized_shape
from train import OPTIMIZER, make_batch

WAIT = "called a synchronizing CUDA operation"  # torch's warning


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SIZES, default="0.6b")
    parser.add_argument("--layers", type=int, help="cut the model to this depth")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--pack", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--packs", type=int, default=4, help="micro-batches of the optimizer step")
    options = parse_options(parser)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, but this benchmark counts waits for a GPU: run it on a GPU machine")
    with tempfile.TemporaryDirectory() as directory:
        init_parallel(0, 1, f"file://{directory}/rendezvous", ParallelLayout())
        waits = count_waits(options)
        shutdown_parallel()
    write_report(options, {"waits of a round": sum(waits.values()), "places": dict(waits.most_common())})
    return 0


def count_waits(options: Any) -> Counter[str]:
    """Train three rounds, and return the number of waits of the last one: place -> number."""
    from penstock.engines.megatron.engine import MegatronEngine
    from penstock.engines.training import EngineBuild
    from penstock.stages.train.config import TrainConfig
    from penstock.stages.train.step import Models, train_rollout

    config = TrainConfig(params_dtype="bf16", max_tokens_per_gpu=options.pack, **OPTIMIZER)
    shape = sized_shape(options.model, options.layers)
    models = Models(policy=MegatronEngine(EngineBuild(shape, "bf16", config.optimizer_options)))
    work = replace(SIZES[options.model], length=options.length, num_sequences=options.pack // options.length)
    batch, waits = make_batch(work, options.packs), Counter[str]()
    for _ in range(2):
        train_rollout(models, batch, config)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: waits.update([innermost_place()] * (WAIT in str(message)))
        torch.cuda.set_sync_debug_mode("warn")
        train_rollout(models, batch, config)
        torch.cuda.set_sync_debug_mode("default")
    return waits


def innermost_place() -> str:
    """Return file and line of the innermost frame of Penstock or Megatron-core, without the frames of this file."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if path != __file__ and ("penstock/" in path or "megatron/" in path):
            return f"{'/'.join(Path(path).parts[-3:])}:{frame.lineno} {frame.line}"
    return "the backward pass"


if __name__ == "__main__":
    sys.exit(main())
