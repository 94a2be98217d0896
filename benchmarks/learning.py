"""Does every estimator learn? The demo's task through the real flows: `penstock sft` once a seed, then `penstock train`
from its export.

    python benchmarks/learning.py DIRECTORY [--estimators grpo gspo ppo reinforce_plus_plus] [--seeds 0 1 2]
        [-- further train options]

Recipes are the demo's, with configs/recipes/demo-<estimator>.toml on top where there is one. Prints a Markdown table
from the commits. After an interruption the same command resumes; a finished run is only read.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import get_args

from penstock.flows.commands.demo import RECIPES, make_inputs
from penstock.stages.train.config import TrainConfig
from penstock.storage.refs import Commit, RunKeys
from penstock.storage.store import Store

ESTIMATORS = get_args(TrainConfig.model_fields["advantage_estimator"].annotation)
SHOWN = 5  # rounds at the end whose rewards are averaged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where everything goes")
    parser.add_argument(
        "--estimators", nargs="+", choices=ESTIMATORS, default=["grpo", "gspo", "ppo", "reinforce_plus_plus"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    own, further = split(sys.argv[1:])
    options = parser.parse_args(own)
    print(
        "| estimator | seed | mean reward, first round | mean of the last five | greedy held-out before | after |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    for seed in options.seeds:
        model, data = make_inputs(options.directory / "inputs", seed)
        sft = train(
            "sft", f"sft-seed{seed}", options.directory, model, data / "sft.jsonl", seed, ["--config", recipe("sft")]
        )
        for estimator in options.estimators:
            words = [*recipes(estimator), "--eval-prompt-data", "heldout", data / "heldout.jsonl", *further]
            start = exported(options.directory, sft)
            run = train("train", f"{estimator}-seed{seed}", options.directory, start, data / "train.jsonl", seed, words)
            print(row(estimator, seed, Store(str(options.directory / "store")), RunKeys(run)), flush=True)
    return 0


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def recipe(name: str) -> Path:
    return RECIPES / f"demo-{name.replace('_', '-')}.toml"


def recipes(estimator: str) -> list[str | Path]:
    """Options that choose an estimator, with its recipe on top of the demo's if it has one."""
    more: list[str | Path] = (
        ["--config", recipe(estimator)] if recipe(estimator).exists() and estimator != "grpo" else []
    )
    return ["--config", recipe("grpo"), *more, "--advantage-estimator", estimator]


def train(
    command: str, run: str, directory: Path, model: Path, prompts: Path, seed: int, words: list[str | Path]
) -> str:
    """Run `penstock <command>` to its end, with its lines in a file. Returns the run's name."""
    seeds = ("--seed", seed, "--rollout-seed", seed)
    given = ("--run", run, "--store", directory / "store", "--hf-checkpoint", model, "--prompt-data", prompts, *seeds)
    log = directory / f"{run}.log"
    with log.open("a", encoding="utf-8") as out:
        line = [sys.executable, "-m", "penstock", command, *map(str, (*words, *given))]
        code = subprocess.run(line, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"`penstock {command}` of run {run} ended with {code}: see {log}")
    return run


def exported(directory: Path, run: str) -> Path:
    """The Hugging Face directory at the end of a run."""
    store, keys = Store(str(directory / "store")), RunKeys(run)
    commit = committed(store, keys.export(max(store.committed_indices(f"{keys.prefix}/exports"))))
    assert commit.attempt is not None
    return Path(store.path(commit.attempt))


def row(estimator: str, seed: int, store: Store, keys: RunKeys) -> str:
    rounds = store.committed_indices(f"{keys.prefix}/rollouts")
    rewards = [committed(store, keys.rollout(r)).summary["rollout/raw_reward"] for r in rounds]
    heldout = [committed(store, keys.eval(version, "heldout")).summary["eval/heldout"] for version in (0, len(rounds))]
    numbers = (rewards[0], statistics.fmean(rewards[-SHOWN:]), *heldout)
    return f"| {estimator} | {seed} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |"


def committed(store: Store, prefix: str) -> Commit:
    commit = store.committed(prefix)
    assert commit is not None, f"no commit of {prefix}"
    return commit


if __name__ == "__main__":
    sys.exit(main())
