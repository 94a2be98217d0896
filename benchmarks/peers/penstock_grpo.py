"""Train with Penstock by GRPO, and report the figures of peers.py.

    python benchmarks/peers/penstock_grpo.py DIRECTORY --model model --data data [--rounds 40] [-- OPTIONS]

OPTIONS are further options of `penstock train`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from pathlib import Path

from peers import TASKS, GpuMemory, Round, Settings, held_out_tasks, make_peer_parser, read_settings, report

sys.path.insert(0, str(Path(__file__).parent.parent))

from learning import read_commit
from report import parse_options
from run import read_publish_seconds, round_seconds

from penstock.storage.commit import RunKeys
from penstock.storage.store import Store


def main() -> int:
    options = parse_options(make_peer_parser(__doc__, "penstock"))
    settings, run = read_settings(options), f"{options.name}-seed{options.seed}"
    directory = options.directory / run
    options.directory.mkdir(parents=True, exist_ok=True)
    given, start = arguments(options, settings), time.time()
    where = ["--config", str(options.recipe), "--run", run, "--store", str(directory)]
    with GpuMemory() as memory, (options.directory / f"{run}.log").open("w") as log:
        command = [sys.executable, "-m", "penstock", "train", *where, *given]
        process = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
        raise SystemExit(f"penstock failed with exit code {process.returncode}: see {options.directory / run}.log")
    store, keys = Store(str(directory)), RunKeys(run)
    recipe = tomllib.loads(options.recipe.read_text())
    report(
        options,
        describe_rounds(store, keys, options.rounds),
        memory,
        held_out={task: held_out(store, keys, task, options.rounds) for task in held_out_tasks(options)},
        start={"update committed": read_commit(store, keys.step_prefix(0)).created_at - start},
        configuration=recipe_settings(recipe) + option_settings(given),
        differences=[],
    )
    return 0


def arguments(options: Namespace, settings: Settings) -> list[str]:
    """Return the options of `penstock train` besides the recipe and the names of the run."""
    words = ["--hf-checkpoint", options.model, "--num-rollout", options.rounds]
    words += ["--prompt-data", options.data / "train.jsonl", "--custom-rm-path", options.reward]
    for task in held_out_tasks(options):
        words += ["--eval-prompt-data", task, options.data / f"heldout-{task}.jsonl"]
    words += ["--eval-interval", max(1, options.rounds // 2)]
    words += ["--save-interval", options.rounds, "--seed", options.seed, "--rollout-seed", options.seed]
    words += ["--rollout-batch-size", settings.prompts, "--n-samples-per-prompt", settings.samples]
    words += ["--rollout-max-response-len", settings.response_tokens, "--lr", settings.lr]
    words += ["--max-tokens-per-gpu", settings.micro_batch_tokens]
    words += ["--sglang-mem-fraction-static", options.engine_memory]
    words += ["--rollout-sampling", "ignore_eos=true"] if settings.fixed_length else []
    return [*map(str, words), *options.train_options]


def recipe_settings(recipe: dict) -> list[str]:
    """Return the settings of a recipe as key=value; those of a section within a section by their own names."""
    return [
        setting
        for key, value in recipe.items()
        for setting in (recipe_settings(value) if isinstance(value, dict) else [f"{key}={value}"])
    ]


def option_settings(words: list[str]) -> list[str]:
    """Return options with their values, one text for each option. A negative number is a value."""
    settings: list[str] = []
    for word in words:
        if word.startswith("--"):
            settings.append(word)
        else:
            settings[-1] += f" {word}"
    return settings


def describe_rounds(store: Store, keys: RunKeys, number: int) -> list[Round]:
    """Return the rounds. The first one has no update before it: its total is the time of its rollout and update."""
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    rounds = []
    for r in range(number):
        rollout, step = read_commit(store, keys.rollout_prefix(r)), read_commit(store, keys.step_prefix(r))
        if r:
            parts = round_seconds(store, keys, r, published)
            total = parts["round"] - evaluation_seconds(store, keys, r)
        else:
            parts = {"generation": rollout.seconds["generate"], "training": step.seconds["update"], "publish": 0.0}
            total = sum(rollout.seconds.values()) + sum(step.seconds.values())
        seconds = {name: parts[name] for name in ("generation", "training")} | {"weight update": parts["publish"]}
        summary = rollout.summary
        rounds.append(Round(seconds, total, summary["rollout/raw_reward"], summary["rollout/response_len/mean"]))
    return rounds


def evaluation_seconds(store: Store, keys: RunKeys, version: int) -> float:
    """Return the seconds from the start of a policy version's first evaluation to the end of its last one."""
    commits = [store.committed(keys.eval_prefix(version, task)) for task in TASKS]
    spans = [(commit.created_at - sum(commit.seconds.values()), commit.created_at) for commit in commits if commit]
    return max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0


def held_out(store: Store, keys: RunKeys, task: str, rounds: int) -> dict[int, dict[str, float]]:
    """Return number of trained rounds -> accuracy and mean reward of a task."""
    results = {}
    for version in range(rounds + 1):
        if (commit := store.committed(keys.eval_prefix(version, task))) is not None:
            figures = {"accuracy": commit.summary[f"eval/{task}-pass@1"], "reward": commit.summary[f"eval/{task}"]}
            results[version] = {name: round(value, 4) for name, value in figures.items()}
    return results


if __name__ == "__main__":
    sys.exit(main())
