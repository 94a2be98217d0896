"""Run GRPO on 1, 2, 4 and 8 GPUs of one host, and compare speeds: one command, each part of which is run once.

    python benchmarks/gpu/scaling.py DIRECTORY [--parts PART ...] [--output scaling.json] [-- OPTIONS]
    python benchmarks/gpu/scaling.py DIRECTORY --rehearse                  # tiny models, two processes on a CPU

OPTIONS are further options of `penstock train`. Parts that need more GPUs than there are are left out. After an
interruption run the same command: finished runs are not repeated, others are resumed. The report is written after every
part, and ends with a Markdown table.

dense      Qwen3-4B and 8B, 64 x 8 samples of 128 + 2,048 tokens, trainer and engines on the same GPUs
moe        Qwen3-30B-A3B whole, EP8 and TP2 x EP4, 64 x 16 samples of 128 + 4,096 tokens
llama      Llama-3.1-8B, 64 x 8 samples of 128 + 4,096 tokens
apart      the 4B model with half, or a quarter, of the GPUs for the engines, staleness 1 and 2, over NCCL
kills      one trainer rank, one engine and the driver are killed; then audit and replay, bit for bit

Efficiency: seconds x GPUs of the smallest number of GPUs on which the model fits, over seconds x GPUs. The floor of a
round is generation, grading and training alone; of asynchronous runs the longest of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock.flows.commands.demo_kill import TARGETS, command_line, num_trained
from penstock.storage.refs import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import train_arguments
from learning import read_commit
from report import make_parser, parse_options, write_report
from run import median_seconds, read_publish_seconds, round_seconds

ROUNDS, WARM_UP_ROUNDS = 5, 2  # kernels are compiled in the first rounds
COLOCATE = ["--colocate", "--rollout-num-gpus-per-engine", "1"]
TENSOR_2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
GROUPS = ("dense", "moe", "llama", "apart", "kills")


@dataclass(frozen=True)
class Part:
    """One run.

    Attributes:
        group: see the description of this program.
        model: name in `gpu_models`.
        gpus: GPUs of the run.
        length: maximum number of response tokens; all responses have it.
        samples: samples of a prompt.
        options: further options of `penstock train`.
        note: what distinguishes it from others of the group.
    """

    group: str
    model: str
    gpus: int
    length: int
    samples: int = 8
    options: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def name(self) -> str:
        """Name of the run and of its store."""
        return "-".join(filter(None, (self.group, self.model, str(self.gpus), self.note)))


def all_parts(gpus: int) -> Iterator[Part]:
    """Yield the parts of a host with this number of GPUs."""
    numbers = [number for number in (1, 2, 4, 8) if number <= gpus]
    for number in numbers:
        yield Part("dense", "4b", number, 2048, options=[*COLOCATE, *trainer(number)])
    for number in numbers[1:]:
        yield Part("dense", "8b", number, 2048, options=[*COLOCATE, *TENSOR_2, *trainer(number)])
    if gpus >= 8:
        wide = ["--colocate", "--rollout-num-gpus-per-engine", "2", *trainer(8)]
        yield Part("moe", "30b-a3b", 8, 4096, 16, [*wide, "--expert-model-parallel-size", "8"], "ep8")
        yield Part("moe", "30b-a3b", 8, 4096, 16, [*wide, *TENSOR_2, "--expert-model-parallel-size", "4"], "tp2ep4")
        yield Part("llama", "llama-8b", 8, 4096, options=[*COLOCATE, *TENSOR_2, *trainer(8)])
    for engines in sorted({gpus // 2, gpus // 4}, reverse=True) if gpus > 1 else []:
        for staleness in (1, 2) if engines else ():
            own = ["--rollout-num-gpus", str(engines), "--update-weight-transport", "nccl", *trainer(gpus - engines)]
            own += ["--async-mode", "streaming", "--max-staleness", str(staleness)]
            yield Part("apart", "4b", gpus, 2048, options=own, note=f"{gpus - engines}and{engines}-stale{staleness}")
    yield Part("kills", "4b", gpus, 512, 4, [*COLOCATE, *trainer(gpus), "--deterministic-mode"])


def trainer(gpus: int) -> list[str]:
    """Return the options of a trainer with this number of ranks."""
    return ["--actor-num-gpus-per-node", str(gpus)]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for models, prompts, stores and logs")
    parser.add_argument("--parts", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rehearse", action="store_true", help="tiny models and responses")
    options = parse_options(parser)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    results: dict[str, Any] = {}
    for part in all_parts(gpus):
        if part.group not in options.parts:
            continue
        results[part.name] = kill_and_replay(part, options) if part.group == "kills" else measure(part, options)
        write_report(options, {"parts": results, "efficiency": efficiencies(results)})
    print_table(results)
    return 0


def command(part: Part, options: Any) -> list[str]:
    """Return the command line of a part."""
    directory, length, prompts = options.directory, part.length, 64
    model = part.model
    if options.rehearse:
        model, length, prompts = "tiny", 16, 4
    words = train_arguments(directory, model, part.name)
    words += ["--num-rollout", str(ROUNDS), "--rollout-batch-size", str(prompts)]
    words += ["--n-samples-per-prompt", str(part.samples), "--rollout-max-response-len", str(length)]
    return [sys.executable, "-m", "penstock", "train", *words, *part.options, *options.train_options]


def environment(part: Part) -> dict[str, str]:
    """Return the environment of a part, in which only its GPUs are visible."""
    if not torch.cuda.is_available():
        return dict(os.environ)
    return os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(part.gpus)))}


def measure(part: Part, options: Any) -> dict[str, Any]:
    """Run a part to its end and return its seconds and speeds; if it fails, the last line of its output."""
    words, path = command(part, options), options.directory / f"{part.name}.log"
    with path.open("a", encoding="utf-8") as log:
        code = subprocess.run(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment(part), check=False
        ).returncode
    if code:
        return {"gpus": part.gpus, "model": part.model, "failed": path.read_text().strip().rpartition("\n")[2][:300]}
    store, keys = Store(str(options.directory / part.name)), RunKeys(part.name)
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    steady = range(WARM_UP_ROUNDS, ROUNDS)
    seconds = median_seconds([round_seconds(store, keys, r, published) for r in steady])
    steps = [read_commit(store, keys.step_prefix(r)) for r in range(ROUNDS)]
    samples = [sample for r in steady for sample in read_samples(store, read_commit(store, keys.rollout_prefix(r)))]
    # Rounds overlap in asynchronous runs, so the whole time is measured, not the sum of the stages.
    wall = (steps[-1].created_at - steps[WARM_UP_ROUNDS - 1].created_at) / len(steady)
    stages = [seconds.get(stage, 0.0) for stage in ("generation", "grading", "training")]
    floor = max(stages) if part.group == "apart" else sum(stages)
    trained = sum(sum(sample.loss_mask) for sample in samples) / len(steady)
    total = sum(len(sample.token_ids) for sample in samples) / len(steady)
    return {
        "gpus": part.gpus,
        "model": part.model,
        "seconds of a round": round(wall, 3),
        "floor of a round": round(floor, 3),
        "parts of a round": {name: round(value, 3) for name, value in seconds.items()},
        "tokens/s per GPU": round(total / wall / part.gpus, 1),
        "trained tokens/s per GPU": round(trained / wall / part.gpus, 1),
        "train MFU": steps[-1].summary.get("perf/actor_train_mfu"),
        "publish seconds": round(seconds["publish"], 3),
    }


def efficiencies(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return, for each run of the group "dense", the efficiency of training and of generation."""
    found: dict[str, dict[str, float]] = {}
    base: dict[str, Any] = {}
    for name, result in results.items():
        if not name.startswith("dense") or "failed" in result:
            continue
        first = base.setdefault(result["model"], result)
        found[name] = {
            stage: round(
                first["parts of a round"][stage] * first["gpus"] / (result["parts of a round"][stage] * result["gpus"]),
                3,
            )
            for stage in ("training", "generation")
        }
    return found


def kill_and_replay(part: Part, options: Any) -> dict[str, Any]:
    """Run a part, and kill one trainer rank, one engine and the driver after one round each; then check the commits and
    replay all rounds."""
    words, env = command(part, options), environment(part)
    store, keys = str(options.directory / part.name), RunKeys(part.name)
    kills = ["trainer", "engine", "driver"]
    with (options.directory / f"{part.name}.log").open("a", encoding="utf-8") as log:
        while True:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=env)
            while process.poll() is None:
                time.sleep(0.2)
                if kills and num_trained(store, keys) > len(TARGETS) - len(kills) and kill_one(process.pid, kills[0]):
                    kills.pop(0)
            if process.returncode != -9:
                break
        audit = subprocess.run([*words[:3], "verify", part.name, "--store", store], stdout=log, check=False)
        replay_words = [*words[:3], "replay", part.name, "--store", store]
        replay = subprocess.run(replay_words, stdout=log, stderr=subprocess.STDOUT, env=env, check=False)
    return {
        "gpus": part.gpus,
        "exit code": process.returncode,
        "not killed": kills,
        "nothing lost or done twice": audit.returncode == 0,
        "replay is equal bit for bit": replay.returncode == 0,
    }


def kill_one(driver: int, target: str) -> bool:
    """Kill one process of a kind with SIGKILL, and return whether there was one. A driver's children end by
    themselves."""
    try:
        children = psutil.Process(driver).children(recursive=True)
        victims = [child for child in children if TARGETS[target](command_line(child))]
        victims = [psutil.Process(driver)] if target == "driver" else victims[:1]
        for victim in victims:
            victim.kill()
        if target == "driver":
            psutil.wait_procs(children, timeout=60)
    except psutil.NoSuchProcess:
        return False
    return bool(victims)


def print_table(results: dict[str, Any]) -> None:
    """Print the speeds as a Markdown table."""
    print("| run | GPUs | seconds of a round | floor | tokens/s per GPU | trained tokens/s per GPU | train MFU |")
    print("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        if "seconds of a round" in result:
            mfu = "" if result["train MFU"] is None else f"{result['train MFU']:.1%}"
            cells = [result[key] for key in ("gpus", "seconds of a round", "floor of a round", "tokens/s per GPU")]
            print("|", " | ".join(map(str, [name, *cells, result["trained tokens/s per GPU"], mfu])), "|")


if __name__ == "__main__":
    sys.exit(main())
