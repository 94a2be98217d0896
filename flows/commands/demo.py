"""`penstock demo`: train a model of 402,176 parameters on arithmetic, on this machine, with the real engines and flows.

The demo creates its own model and data (flows/commands/demo_model.py), runs the `sft` flow, then the `post_train` flow
on the model that SFT exported. Both are ordinary runs of recipes (configs/recipes/demo-*.toml), so the same command
resumes a demo that was stopped at any point.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import NoReturn

import penstock
from penstock.flows.config import PostTrainConfig, read_toml, validate_config
from penstock.flows.options.argv import activate_command, penstock_command
from penstock.storage.errors import OptionError, RunError
from penstock.storage.maintenance.leases import describe_live_drivers
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store

DIRECTORY = "penstock-demo"
NUM_ROUNDS = 60  # GRPO rounds, as in demo-grpo.toml
MARKER = ".penstock-demo"  # name of a file that marks a directory created by the demo
MARKER_TEXT = b"made by penstock demo; `penstock demo --fresh` may remove it\n"
SUBDIRECTORIES = ("inputs", "store")  # subdirectories created by the demo
RECIPES = Path(penstock.__file__).parent / "recipes"
SKILL_STEPS, HABIT_STEPS, SFT_BATCH = 340, 60, 128  # SFT steps on correct and on partly wrong answers; batch size

MEANING = """What the reward curve means: SFT first taught this model exact arithmetic, then 60 steps of lazy
demonstrations planted a habit (drop the units: 37+8= -> 40). GRPO removes that habit with a
right-or-wrong reward. It does not teach arithmetic from scratch, and a 400-thousand-parameter
model says nothing about a large one: the demo shows that every stage works and that learning
happens."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors like every other command: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"penstock demo: {message}")


def main(argv: list[str]) -> int:
    """Parse the demo's options and run it. Return the exit code."""
    parser = _Parser(prog="penstock demo", description="Make a tiny model and watch it learn.", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data order and prompt sampling (default 0)")
    parser.add_argument("--directory", type=Path, help=f"output directory (default {DIRECTORY}; with --kill its own)")
    parser.add_argument(
        "--num-rollout", type=int, help=f"GRPO rounds (default {NUM_ROUNDS}; the reward rises within 20)"
    )
    parser.add_argument("--fresh", action="store_true", help="remove an earlier demo from the directory and restart")
    parser.add_argument(
        "--kill", action="store_true", help="kill engine, trainer and driver meanwhile, then replay every round"
    )
    if {"--help", "-h", "--help-all"} & {*argv}:
        parser.print_help()
        return 0
    options = parser.parse_args(argv)
    for name, value in (("--seed", options.seed), ("--num-rollout", options.num_rollout)):
        if value is not None and not 0 <= value < 2**32:
            raise OptionError(f"{name} takes an integer from 0 to {2**32 - 1}; found {value}")
    directory = options.directory or Path(f"{DIRECTORY}-kill" if options.kill else DIRECTORY)
    if options.kill and options.num_rollout is not None and options.num_rollout < 4:
        raise OptionError(f"--kill needs at least 4 rounds; found --num-rollout {options.num_rollout}")
    if options.fresh:
        remove_demo(directory)
    if options.kill:
        from penstock.flows.commands.demo_kill import run_demo_with_kills

        run, rounds = demo_run_name("grpo", options.seed), options.num_rollout or NUM_ROUNDS
        return run_demo_with_kills(directory, run, seed=options.seed, num_rollout=rounds)
    return run_demo(directory, seed=options.seed, num_rollout=options.num_rollout)


def run_demo(directory: Path, *, seed: int = 0, num_rollout: int | None = None) -> int:
    """Create the model and the data, run the SFT flow and then the GRPO flow. Return the exit code."""
    from penstock.flows.runtime.runner import run_flow
    from penstock.flows.terminal.panel import end_wait, show_wait

    start_time = time.monotonic()
    create_marked_demo_directory(directory)
    print(
        f"Penstock demo: a tiny Qwen3 (402,176 parameters), two-digit +- one-digit arithmetic, seed {seed}\n"
        f"{MEANING}\n",
        flush=True,
    )
    show_wait("making the model and its data")
    try:
        model, data = make_model_and_data(directory / "inputs", seed)
    finally:
        end_wait()
    sft = sft_config(directory, model, data, seed)
    if code := run_flow("sft", sft):
        return code
    grpo = grpo_config(directory, export_directory(sft), data, seed, num_rollout)
    if code := run_flow("post_train", grpo):
        return code
    print(
        f"\nThe demo took {time.monotonic() - start_time:.0f} s. The same command resumes it; "
        f"`{penstock_command()} demo --fresh` restarts it.\n"
        f"In a new terminal: {activate_command()} puts penstock on the PATH."
    )
    return 0


def remove_demo(directory: Path) -> None:
    """Remove the files of an earlier demo from its directory; other files are kept. Links are removed, not followed."""
    if not directory.exists() and not directory.is_symlink():
        return
    check_removable_demo(directory)
    for name in SUBDIRECTORIES:
        subdirectory = directory / name
        if subdirectory.is_symlink():
            subdirectory.unlink()
        elif subdirectory.exists():
            shutil.rmtree(subdirectory)
    (directory / MARKER).unlink()
    if not any(directory.iterdir()):
        directory.rmdir()


def check_removable_demo(directory: Path) -> None:
    """Check that a directory was created by a demo that is not running. Raises the same errors as `remove_demo`."""
    resolved = directory.resolve()
    if directory.is_symlink() or any(other.resolve().is_relative_to(resolved) for other in (Path.home(), Path.cwd())):
        raise OptionError(
            f"--fresh does not remove {directory}: it is a link, or contains the home or the current directory; "
            "give another --directory"
        )
    marker = directory / MARKER
    if marker.is_symlink() or not marker.is_file() or marker.read_bytes() != MARKER_TEXT:
        raise OptionError(
            f"--fresh does not remove {directory}: it was not created by a demo ({MARKER} is missing); "
            "give another --directory"
        )
    if (directory / "store" / "runs").is_dir():
        store = Store(str(directory / "store"), probe=False)
        for run in store.list("runs"):
            if drivers := describe_live_drivers(store, RunKeys(run)):
                raise RunError(
                    f"run {run!r} in {directory / 'store'} has a running driver, {drivers[0]}: stop the driver, then "
                    "repeat --fresh"
                )


def create_marked_demo_directory(directory: Path) -> None:
    """Create the demo's directory and, if it is empty, the marker file that allows --fresh to remove it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.iterdir()):
            (directory / MARKER).write_bytes(MARKER_TEXT)
    except OSError as error:
        raise OptionError(
            f"--directory {directory} cannot be written ({error.strerror}): give another --directory"
        ) from error


def make_model_and_data(directory: Path, seed: int) -> tuple[Path, Path]:
    """Create the tiny model and the data of this seed, unless they exist. Return their directories.

    Each directory is written under a temporary name and then renamed, so that a killed demo leaves no partial one.
    """
    from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model

    model, data = directory / f"model-seed{seed}", directory / f"data-seed{seed}"
    for target, make in ((data, make_tiny_data), (model, lambda path: make_tiny_model(path, seed=seed))):
        if not target.exists():
            scratch = target.with_name(target.name + ".partial")
            shutil.rmtree(scratch, ignore_errors=True)
            make(scratch)
            if target is data:
                write_curriculum(scratch, seed)
            scratch.rename(target)
    return model, data


def write_curriculum(data: Path, seed: int) -> None:
    """Write `sft.jsonl`, the SFT rows in training order: first correct answers (`sft_skill.jsonl`), then
    answers of which some are rounded down to tens, a habit that RL has to remove (`sft_habit.jsonl`). No row occurs
    twice in a batch.
    """
    rng = random.Random(seed)
    with (data / "sft.jsonl").open("w", encoding="utf-8") as out:
        for name, steps in (("sft_skill", SKILL_STEPS), ("sft_habit", HABIT_STEPS)):
            rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
            for _ in range(steps):
                out.writelines(json.dumps(row) + "\n" for row in rng.sample(rows, SFT_BATCH))


def demo_run_name(part: str, seed: int) -> str:
    """Return the name of the demo's run `part`, sft or grpo."""
    return f"demo-{part}-seed{seed}"


def sft_config(directory: Path, model: Path, data: Path, seed: int) -> PostTrainConfig:
    """Return the config of the SFT run."""
    values = read_toml(RECIPES / "demo-sft.toml")
    values["run"] |= {"run": demo_run_name("sft", seed), "store": str(directory / "store")}
    values["convert"] = {"hf_checkpoint": str(model)}
    values["rollout"] |= {"prompt_data": [str(data / "sft.jsonl")], "rollout_seed": seed}
    values["train"] |= {"seed": seed}
    return validate_config(values)


def grpo_config(directory: Path, model: Path, data: Path, seed: int, num_rollout: int | None) -> PostTrainConfig:
    """Return the config of the GRPO run, which starts from the exported SFT model."""
    values = read_toml(RECIPES / "demo-grpo.toml")
    values["run"] |= {"run": demo_run_name("grpo", seed), "store": str(directory / "store")}
    if num_rollout is not None:
        values["run"]["num_rollout"] = num_rollout
    values["convert"] = {"hf_checkpoint": str(model)}
    values["rollout"] |= {"prompt_data": [str(data / "train.jsonl")], "rollout_seed": seed}
    values["train"] |= {"seed": seed}
    values["eval"] |= {"eval_prompt_data": [["heldout", str(data / "heldout.jsonl")]]}
    return validate_config(values)


def export_directory(config: PostTrainConfig) -> Path:
    """Return the directory of a finished run's exported model."""
    from penstock.flows.runtime.runs import open_store

    store = open_store(config.run)
    commit = store.committed(RunKeys(config.run.run).export_prefix(config.run.num_rollout))
    assert commit is not None and commit.attempt is not None, "the sft flow ended without an export"
    return Path(store.path(commit.attempt))
