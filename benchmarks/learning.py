"""Check that every advantage estimator learns the demo's task: for each seed, run `penstock sft`, and then `penstock
train` from the SFT model with each estimator.

    python benchmarks/learning.py DIRECTORY [--estimators grpo gspo ppo reinforce_plus_plus] [--seeds 0 1 2]
        [-- further train options]

The recipe is configs/recipes/demo-grpo.toml, with the options of demo-<estimator>.toml, if it exists, taking
precedence. Prints a Markdown table of rewards from the commits. After an interruption, run the same command to resume;
finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import get_args

from penstock.flows.commands.demo import make_model_and_data
from penstock.flows.config import RECIPES
from penstock.stages.train.config import TrainConfig
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from report import parse_options

ESTIMATORS = get_args(TrainConfig.model_fields["advantage_estimator"].annotation)
NUM_LAST_ROUNDS = 5  # number of rounds at the end whose rewards are averaged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory for models, data, store and logs")
    parser.add_argument(
        "--estimators", nargs="+", choices=ESTIMATORS, default=["grpo", "gspo", "ppo", "reinforce_plus_plus"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parse_options(parser)
    print(
        "| estimator | seed | mean reward of round 0 | of the last 5 rounds | greedy held-out reward before | after |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    for seed in options.seeds:
        model, data = make_model_and_data(options.directory / "inputs", seed)
        recipe = ["--config", recipe_path("sft")]
        sft = train("sft", f"sft-seed{seed}", options.directory, model, data / "sft.jsonl", seed, recipe)
        for estimator in options.estimators:
            evaluation = ["--eval-prompt-data", "heldout", data / "heldout.jsonl"]
            arguments = [*estimator_options(estimator), *evaluation, *options.train_options]
            start = export_directory(options.directory, sft)
            run = train(
                "train", f"{estimator}-seed{seed}", options.directory, start, data / "train.jsonl", seed, arguments
            )
            print(table_row(estimator, seed, Store(str(options.directory / "store")), RunKeys(run)), flush=True)
    return 0


def recipe_path(name: str) -> Path:
    return RECIPES / f"demo-{name.replace('_', '-')}.toml"


def estimator_options(estimator: str) -> list[str | Path]:
    """Return the options of `penstock train` for an estimator: the demo's recipe, and its own recipe if it has one."""
    recipes = dict.fromkeys([recipe_path("grpo"), recipe_path(estimator)])
    options = [word for recipe in recipes if recipe.exists() for word in ("--config", recipe)]
    return [*options, "--advantage-estimator", estimator]


def train(
    command: str, run: str, directory: Path, model: Path, prompts: Path, seed: int, arguments: list[str | Path]
) -> str:
    """Run `penstock <command>` until it exits, with its output in DIRECTORY/<run>.log. Return the run's name."""
    seeds = ("--seed", seed, "--rollout-seed", seed)
    options = ("--run", run, "--store", directory / "store", "--hf-checkpoint", model, "--prompt-data", prompts, *seeds)
    log = directory / f"{run}.log"
    with log.open("a", encoding="utf-8") as out:
        line = [sys.executable, "-m", "penstock", command, *map(str, (*arguments, *options))]
        code = subprocess.run(line, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"`penstock {command}` of run {run} failed with exit code {code}: see {log}")
    return run


def export_directory(directory: Path, run: str) -> Path:
    """Return the Hugging Face directory of a run's last export."""
    store, keys = Store(str(directory / "store")), RunKeys(run)
    commit = read_commit(store, keys.export_prefix(max(store.committed_indices(f"{keys.prefix}/exports"))))
    assert commit.attempt is not None
    return Path(store.path(commit.attempt))


def table_row(estimator: str, seed: int, store: Store, keys: RunKeys) -> str:
    """Return the rewards of a run as a row of the Markdown table that `main` prints."""
    rounds = store.committed_indices(f"{keys.prefix}/rollouts")
    rewards = [read_commit(store, keys.rollout_prefix(r)).summary["rollout/raw_reward"] for r in rounds]
    heldout = [
        read_commit(store, keys.eval_prefix(version, "heldout")).summary["eval/heldout"] for version in (0, len(rounds))
    ]
    numbers = (rewards[0], statistics.fmean(rewards[-NUM_LAST_ROUNDS:]), *heldout)
    return f"| {estimator} | {seed} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |"


def read_commit(store: Store, prefix: str) -> Commit:
    commit = store.committed(prefix)
    assert commit is not None, f"{prefix} has no commit in the store"
    return commit


if __name__ == "__main__":
    sys.exit(main())
