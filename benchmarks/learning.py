"""Check that advantage estimators and other algorithms learn the demo's task: for each seed, run `penstock sft`, and
then `penstock train` from the SFT model with each of them.

    python benchmarks/learning.py DIRECTORY [--estimators grpo gspo ppo reinforce_plus_plus] [--seeds 0 1 2]
        [--output FILE.json] [-- further train options]

The recipe is configs/recipes/demo-grpo.toml, with the options of demo-<estimator>.toml, if it exists, or of a row of
ALGORITHMS taking precedence. Prints a Markdown table of rewards from the commits. After an interruption, run the same
command to resume; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

from penstock.flows.commands.demo import make_model_and_data
from penstock.flows.config import RECIPES
from penstock.stages.rewards.builtin import exact_number
from penstock.stages.train.config import TrainConfig
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.samples.sample import Sample
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from report import parse_options

ESTIMATORS = get_args(TrainConfig.model_fields["advantage_estimator"].annotation)
TWO_STEPS = "--global-batch-size 128 --lr 2e-4"  # per round, so that ratios differ from 1, as in demo-gspo.toml
ALGORITHMS = {  # name -> options beside those of demo-grpo.toml
    "sapo": f"--policy-loss sapo {TWO_STEPS}",
    "gmpo": f"--policy-loss gmpo --eps-clip 0.4 --eps-clip-high 0.4 {TWO_STEPS}",
    "dppo_tv": f"--policy-loss dppo_tv --use-rollout-logprobs {TWO_STEPS}",
    "dppo_kl": f"--policy-loss dppo_kl --eps-clip 0.05 --eps-clip-high 0.05 --use-rollout-logprobs {TWO_STEPS}",
    "overlong": "--overlong-buffer-len 4",
    "dr_grpo": "--disable-grpo-std-normalization --loss-denominator 8",
    "gdpo": "--advantage-estimator gdpo --gdpo-reward-weights right=1 short=0.25 --reward-key right "
    f"--custom-rm-path {Path(__file__).resolve()}:right_and_short",
    "scalerl": "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 3 --use-rollout-logprobs "
    "--disable-grpo-std-normalization --normalize-advantages --calculate-per-prompt-loss "
    f"--async-mode streaming --max-staleness 8 --pause-generation-mode in_place {TWO_STEPS}",
    "replay": "--replay-share 0.25 --replay-max-staleness 4",
}
NUM_LAST_ROUNDS = 5  # number of rounds at the end whose rewards are averaged
OMITTED = {"sapo": "--eps-clip-high", "gdpo": "--rm-type"}  # options of demo-grpo.toml that the algorithm refuses
COLUMNS = ("first round", "last rounds", "held-out before", "held-out after")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory for models, data, store and logs")
    parser.add_argument(
        "--estimators",
        nargs="+",
        choices=[*ESTIMATORS, *ALGORITHMS],
        default=["grpo", "gspo", "ppo", "reinforce_plus_plus"],
        help="estimators, or names of ALGORITHMS",
    )
    parser.add_argument("--output", type=Path, help="file for the rows of the table as JSON")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parse_options(parser)
    print(
        "| estimator | seed | mean reward of round 0 | of the last 5 rounds | greedy held-out reward before | after |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for seed in options.seeds:
        model, data = make_model_and_data(options.directory / "inputs", seed)
        recipe: list[str | Path] = ["--config", recipe_path("sft")]
        sft = train("sft", f"sft-seed{seed}", options.directory, model, data / "sft.jsonl", seed, recipe)
        for estimator in options.estimators:
            evaluation = ["--eval-prompt-data", "heldout", data / "heldout.jsonl"]
            arguments = [*estimator_options(estimator), *evaluation, *options.train_options]
            start = export_directory(options.directory, sft)
            run = train(
                "train", f"{estimator}-seed{seed}", options.directory, start, data / "train.jsonl", seed, arguments
            )
            numbers = rewards_of(Store(str(options.directory / "store")), RunKeys(run))
            print(f"| {estimator} | {seed} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |", flush=True)
            rows.append({"estimator": estimator, "seed": seed, **dict(zip(COLUMNS, numbers, strict=True))})
            if options.output:
                options.output.write_text(json.dumps({"options": options.train_options, "rows": rows}, indent=1) + "\n")
    return 0


def right_and_short(args: object, sample: Sample) -> dict[str, float]:
    """Return the reward of the demo, and as a second one whether the response has at most 6 characters."""
    return {"right": exact_number(sample), "short": float(len(sample.response) <= 6)}


def recipe_path(name: str) -> Path:
    return RECIPES / f"demo-{name.replace('_', '-')}.toml"


def estimator_options(estimator: str) -> list[str | Path]:
    """Return the options of `penstock train` for an estimator: the demo's recipe, and its own recipe if it has one; or
    those of a row of ALGORITHMS."""
    if estimator in ALGORITHMS:
        sections = tomllib.loads(recipe_path("grpo").read_text()).values()
        given = {f"--{name.replace('_', '-')}": str(value) for section in sections for name, value in section.items()}
        omitted = OMITTED.get(estimator, "")
        words = [word for flag in given if flag != omitted for word in (flag, given[flag].lower())]
        return [*words, *ALGORITHMS[estimator].split()]
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


def rewards_of(store: Store, keys: RunKeys) -> tuple[float, ...]:
    """Return the rewards of a run (COLUMNS)."""
    rounds = store.committed_indices(f"{keys.prefix}/rollouts")
    rewards = [read_commit(store, keys.rollout_prefix(r)).summary["rollout/raw_reward"] for r in rounds]
    heldout = [
        read_commit(store, keys.eval_prefix(version, "heldout")).summary["eval/heldout"] for version in (0, len(rounds))
    ]
    return rewards[0], statistics.fmean(rewards[-NUM_LAST_ROUNDS:]), *heldout


def read_commit(store: Store, prefix: str) -> Commit:
    commit = store.committed(prefix)
    assert commit is not None, f"{prefix} has no commit in the store"
    return commit


if __name__ == "__main__":
    sys.exit(main())
