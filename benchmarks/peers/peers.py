"""What all peers share: settings, rows, reward, and the report. Imports nothing of Penstock or of a peer.

The settings of a run are those of a recipe of Penstock and the options below. Every script writes one JSON report:

    seconds of a round   medians of generation, training, weight update, rest (their sum: round), after WARM_UP_ROUNDS
    tokens/s             generated tokens per second of generation, and per second of a round
    rounds               reward, mean response tokens and seconds of each round
    held out             greedy accuracy and mean reward by task and number of trained rounds
    peak GPU memory      the most that `nvidia-smi` showed at any time, on each GPU
    configuration        the settings that the user writes, and their number
    differences          settings that are not those of Penstock's run
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import make_parser, write_report

TASKS = ("sums", "sorting")
WARM_UP_ROUNDS = 2
PARTS = ("generation", "training", "weight update")
EXAMPLE = Path("examples/smollm2")


@dataclass(frozen=True)
class Settings:
    """The settings that are equal for all peers. A round is one optimizer step over prompts x samples responses.

    Attributes:
        prompts: of a round.
        samples: of a prompt.
        response_tokens: maximum number of tokens of a response; the exact number with `fixed_length`.
        fixed_length: whether the end token is ignored.
        micro_batch_tokens: of a micro-batch of the trainer.
    """

    prompts: int
    samples: int
    response_tokens: int
    fixed_length: bool
    temperature: float
    lr: float
    adam_beta2: float
    weight_decay: float
    eps_clip: float
    eps_clip_high: float
    micro_batch_tokens: int


def make_peer_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every peer. Run the scripts in the root of the repository."""
    parser = make_parser(description)
    parser.add_argument("directory", type=Path, help="directory for all files and logs")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory of train.jsonl and heldout-TASK.jsonl")
    parser.add_argument("--name", default=name, help="name of the run, followed by its seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--recipe", type=Path, default=EXAMPLE / "run.toml")
    parser.add_argument("--reward", type=Path, default=EXAMPLE / "reward.py", help="file with reward_func")
    parser.add_argument("--prompts", type=int, help="prompts of a round; default: those of the recipe")
    parser.add_argument("--samples", type=int, help="samples of a prompt; default: those of the recipe")
    parser.add_argument("--response-tokens", type=int, help="default: that of the recipe")
    parser.add_argument("--fixed-length", action="store_true", help="ignore the end token")
    parser.add_argument("--lr", type=float, help="default: that of the recipe")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: max_tokens_per_gpu of the recipe")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU's memory for the engine")
    parser.add_argument("--no-held-out", action="store_true", help="do not evaluate")
    return parser


def read_settings(options: argparse.Namespace) -> Settings:
    """Return the settings of the recipe, replaced by those of the command line."""
    recipe = tomllib.loads(options.recipe.read_text())
    rollout, train = recipe["rollout"], recipe["train"]
    return Settings(
        prompts=options.prompts or rollout["rollout_batch_size"],
        samples=options.samples or rollout["n_samples_per_prompt"],
        response_tokens=options.response_tokens or rollout["rollout_max_response_len"],
        fixed_length=options.fixed_length,
        temperature=rollout["rollout_temperature"],
        lr=options.lr or train["lr"],
        adam_beta2=train["adam_beta2"],
        weight_decay=train["weight_decay"],
        eps_clip=train["eps_clip"],
        eps_clip_high=train["eps_clip_high"],
        micro_batch_tokens=options.micro_batch_tokens or train["max_tokens_per_gpu"],
    )


def held_out_tasks(options: argparse.Namespace) -> tuple[str, ...]:
    return () if options.no_held_out else TASKS


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the prompts (messages) and labels of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["prompt"], "label": row["label"]} for row in rows]


def load_reward(path: Path) -> Callable[[str, str], dict[str, float]]:
    """Return the function that grades a response, given its text and its label, with `reward_func` of a file."""
    spec = importlib.util.spec_from_file_location("peers_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda text, label: module.reward_func(None, SimpleNamespace(response=text, label=label))


class GpuMemory:
    """Samples the used memory of each GPU with `nvidia-smi`, four times a second, while the context is open."""

    def __enter__(self) -> GpuMemory:
        self.peak_mib: dict[int, int] = {}
        command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "250"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            self._process = None
        else:
            self._reader = Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def _read(self) -> None:
        for line in self._process.stdout if self._process is not None and self._process.stdout else ():
            gpu, used = map(int, line.split(","))
            self.peak_mib[gpu] = max(used, self.peak_mib.get(gpu, 0))

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()


@dataclass
class Round:
    """One round.

    Attributes:
        seconds: of each of PARTS; what is missing of `total` is the rest.
        total: seconds from the end of the round before to the end of this one, without evaluations.
        response_tokens: mean of the responses.
    """

    seconds: dict[str, float]
    total: float
    reward: float
    response_tokens: float


def report(
    options: argparse.Namespace,
    rounds: list[Round],
    memory: GpuMemory,
    *,
    held_out: dict[str, dict[int, dict[str, float]]],
    start: dict[str, float],
    configuration: list[str],
    differences: list[str],
) -> None:
    """Write the report of a peer.

    Args:
        held_out: task -> number of trained rounds -> accuracy and reward.
        start: label -> seconds from the start of the command.
    """
    settings, measured = read_settings(options), rounds[WARM_UP_ROUNDS:] or rounds
    medians = {part: statistics.median(each.seconds[part] for each in measured) for part in PARTS}
    medians["rest"] = statistics.median(each.total - sum(each.seconds.values()) for each in measured)
    medians["round"] = statistics.median(each.total for each in measured)
    tokens = [each.response_tokens * settings.prompts * settings.samples for each in measured]
    figures = {
        "settings of all peers": asdict(settings),
        "seconds of a round": {name: round(value, 4) for name, value in medians.items()},
        "tokens/s": {
            "of generation": _median_speed(tokens, [each.seconds["generation"] for each in measured]),
            "of a round": _median_speed(tokens, [each.total for each in measured]),
        },
        "rounds": {
            "reward": [round(each.reward, 5) for each in rounds],
            "response tokens": [round(each.response_tokens, 2) for each in rounds],
            "seconds": [round(each.total, 3) for each in rounds],
        },
        "held out": held_out,
        "seconds from the start": {label: round(seconds, 2) for label, seconds in start.items()},
        "peak GPU memory, MiB": list(memory.peak_mib.values()),
        "configuration": {"settings": len(configuration), "each": configuration},
        "differences": differences,
    }
    options.model = options.data = None  # do not report paths of this machine
    options.recipe, options.reward = str(options.recipe), str(options.reward)
    write_report(options, figures)


def _median_speed(tokens: list[float], seconds: list[float]) -> int:
    return round(statistics.median(count / time for count, time in zip(tokens, seconds, strict=True)))
