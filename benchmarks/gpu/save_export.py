"""Compare the time of saving and exporting a policy with writing the same number of bytes to the same disk.

    python benchmarks/gpu/save_export.py DIRECTORY --model 0.6b --output OUT.json
    python benchmarks/gpu/save_export.py DIRECTORY --model small              # rehearsal on a CPU

One trainer rank with random weights and optimizer state saves checkpoints into a store in DIRECTORY, and exports its
weights from memory and from the checkpoint.
In the same run, threads write as many random bytes with `os.write`, one file per thread, followed by fsync. The disk is
idle (`sync`) before each measurement. The medians, their ratio, and the seconds to hash the weights as in every round,
are written as JSON. DIRECTORY needs three times the size of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.engines.families import read_shape
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.train.actor import TrainActor
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.spec import Build, SaveResult, TrainerSpec
from penstock.storage import disk
from penstock.storage.commit import Commit
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import MODELS, make_model

BUFFER = 32 << 20  # bytes of a plain write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="scratch directory on the disk to measure")
    parser.add_argument("--model", choices=MODELS, default="0.6b" if torch.cuda.is_available() else "small")
    parser.add_argument("--turns", type=int, default=3, help="number of measurements, after one that is discarded")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="threads of the plain writes")
    parser.add_argument("--output", type=Path, default=Path("save_export.json"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.directory) as scratch:
        report = measure_model(make_model(options.model, Path(scratch)), Path(scratch), options)
    options.output.write_text(json.dumps(report, indent=1))
    print(options.output.read_text())
    return 0


def measure_model(model: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return hardware, versions, settings and measurements of a model's saves and exports."""
    store = Store(str(scratch / "store"))
    actor = start_trainer(model, scratch, store)
    seconds: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[..., Any], *args: Any) -> Any:
        os.sync()
        start = time.perf_counter()
        result = work(*args)
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        shutil.rmtree(scratch / "plain", ignore_errors=True)
        return result

    sizes: dict[str, int] = {}
    for turn in range(1 + options.turns):
        attempt = store.new_attempt("checkpoints/1")
        saved: SaveResult = measure("save", actor.save, attempt)
        commit = Commit(kind="checkpoint", run="bench", index=1, policy_version=1, attempt=attempt, files=saved.files)
        measure("export of a checkpoint", export_hf, store, commit, Origin(model), f"exports/checkpoint-{turn}")
        write = partial(export_hf, store, commit, Origin(model), f"exports/memory-{turn}")
        export: Commit = measure("export", actor.export, write)
        for name, files in (("save", saved.files), ("export", export.files)):
            sizes[name] = sum(file.bytes for file in files)
            measure(f"plain {name}", write_plain, scratch / "plain", sizes[name], options.threads)
        measure("weight digest", actor.digest)
        shutil.rmtree(scratch / "store" / "checkpoints")
        shutil.rmtree(scratch / "store" / "exports")
    medians = {name: round(statistics.median(values[1:]), 3) for name, values in seconds.items()}
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "model": options.model,
        "threads": options.threads,
        "turns": options.turns,
        "gb": {name: round(size / 1e9, 3) for name, size in sizes.items()},
        "seconds": medians,
        "all_seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "ratio": {name: round(medians[name] / medians[f"plain {name}"], 2) for name in sizes},
        "fingerprint": actor.fingerprint(),
    }


def start_trainer(model: Path, scratch: Path, store: Store) -> TrainActor:
    """Return a trainer rank in this process, without Ray, that holds random weights and optimizer state as policy 1."""
    spec = TrainerSpec(run="bench", shape=read_shape(model), config=TrainConfig(), store=store.uri)
    build = Build(spec=spec, num_ranks=1, threads=os.cpu_count() or 1)
    actor = TrainActor(build, rank=0, incarnation="bench", owner="bench")
    actor.connect_and_build(f"file://{scratch}/rendezvous")
    from penstock.engines.megatron.optimizer import inner_optimizers

    with actor._changing_weights_to(1):
        for inner in inner_optimizers(actor.models.policy.optimizer):
            for state in inner.state.values():
                state["exp_avg"].normal_()
                state["exp_avg_sq"].uniform_()
    return actor


def write_plain(directory: Path, num_bytes: int, num_threads: int) -> None:
    """Write random bytes to one file per thread with large writes, and make them durable."""
    directory.mkdir()
    buffer = memoryview(os.urandom(BUFFER))

    def write(thread: int) -> None:
        descriptor = os.open(directory / str(thread), os.O_WRONLY | os.O_CREAT, 0o644)
        left = num_bytes // num_threads
        while left:
            left -= os.write(descriptor, buffer[: min(left, BUFFER)])
        os.fsync(descriptor)
        os.close(descriptor)

    disk.map_in_threads(write, range(num_threads), num_threads)
    disk.fsync(directory)


if __name__ == "__main__":
    sys.exit(main())
