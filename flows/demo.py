"""`penstock demo`: a model of 402,176 parameters learns arithmetic on this machine, through the real engines and the real flows.

The demo makes its own model and data (flows/demo_model.py), runs the `sft` flow, then the `post_train` flow on what SFT exported. Each is an
ordinary run with an ordinary recipe (configs/recipes/demo-*.toml), so whatever holds for them holds for any run: stop it anywhere, call it again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import NoReturn

from flows.config import PostTrainConfig, read_toml, validated
from flows.words import command
from storage.errors import OptionError, RunError
from storage.leases import live_drivers
from storage.refs import RunKeys
from storage.store import Store

MARKER, MARKED = ".penstock-demo", b"made by penstock demo; `penstock demo --fresh` may remove it\n"
MADE = ("inputs", "store")  # in the directory, beside the marker
RECIPES = Path(__file__).parent.parent / "configs" / "recipes"
SKILL_STEPS, HABIT_STEPS, SFT_BATCH = 340, 60, 128

MEANING = """What the curve means: SFT first taught this model exact arithmetic, then 60 steps of a lazy demonstrator planted a habit (drop the units:
37+8= -> 40). GRPO removes that habit with nothing but a right-or-wrong reward. It does not teach arithmetic from nothing, and a
400-thousand-parameter model says nothing about a large one: the demo shows that every stage works and that learning happens."""


class _Parser(argparse.ArgumentParser):
    """Refuses like every other command: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"penstock demo: {message}")


def main(words: list[str]) -> int:
    """Parse the demo's few options and run it."""
    parser = _Parser(prog="penstock demo", description="Make a tiny model and watch it learn.", allow_abbrev=False)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model, the data order and the sampling of prompts (default 0)"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("penstock-demo"), help="where everything goes (default penstock-demo)"
    )
    parser.add_argument("--num-rollout", type=int, help="GRPO rounds (default 60; 20 already show it)")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier demo left in the directory and begin anew")
    if "--help" in words or "-h" in words:
        parser.print_help()
        return 0
    options = parser.parse_args(words)
    for name, value in (("--seed", options.seed), ("--num-rollout", options.num_rollout)):
        if value is not None and not 0 <= value < 2**32:
            raise OptionError(f"{name} takes a whole number from 0 to {2**32 - 1}; found {value}")
    if options.fresh:
        remove_demo(options.directory)
    return demo(options.directory, seed=options.seed, num_rollout=options.num_rollout)


def demo(directory: Path, *, seed: int = 0, num_rollout: int | None = None) -> int:
    """The whole demo. Returns the exit code."""
    from flows.registry import start

    began = time.monotonic()
    mark(directory)
    model, data = make_inputs(directory / "inputs", seed)
    print(
        f"Penstock demo: a tiny Qwen3 (402,176 parameters), two-digit +- one-digit arithmetic, seed {seed}\n{MEANING}\n",
        flush=True,
    )
    sft = sft_config(directory, model, data, seed)
    if code := start("sft", sft):
        return code
    grpo = grpo_config(directory, exported(sft), data, seed, num_rollout)
    if code := start("post_train", grpo):
        return code
    print(
        f"\nThe demo took {time.monotonic() - began:.0f} s. The same command resumes it; `{command()} demo --fresh` starts again.\n"
        "In a new terminal: source .venv/bin/activate, then penstock is found by its name."
    )
    return 0


def remove_demo(directory: Path) -> None:
    """Remove what an earlier demo has made in a directory, and nothing else; links are removed, not followed.

    Raises:
        OptionError: the demo's marker file is missing, or it is the home, the current or the root directory.
        RunError: a demo runs in it.
    """
    if not directory.exists() and not directory.is_symlink():
        return
    place = directory.resolve()
    if directory.is_symlink() or any(other.resolve().is_relative_to(place) for other in (Path.home(), Path.cwd())):
        raise OptionError(
            f"--fresh does not remove {directory}: it is a link, or holds the home or the current directory; give --directory"
        )
    marker = directory / MARKER
    if marker.is_symlink() or not marker.is_file() or marker.read_bytes() != MARKED:
        raise OptionError(
            f"--fresh does not remove {directory}: no demo has made it ({MARKER} is missing); give another --directory"
        )
    if (directory / "store" / "runs").is_dir():
        _refuse_if_driven(directory / "store")
    for name in MADE:
        made = directory / name
        if made.is_symlink():
            made.unlink()
        elif made.exists():
            shutil.rmtree(made)
    marker.unlink()
    if not any(directory.iterdir()):
        directory.rmdir()


def _refuse_if_driven(place: Path) -> None:
    store = Store(str(place), probe=False)
    for run in store.list("runs"):
        if drivers := live_drivers(store, RunKeys(run)):
            raise RunError(f"run {run!r} in {place} is driven by {drivers[0]}: stop it before --fresh removes it")


def mark(directory: Path) -> None:
    """Write down that a demo makes the directory, if there is nothing in it yet.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.iterdir()):
            (directory / MARKER).write_bytes(MARKED)
    except OSError as error:
        raise OptionError(f"--directory {directory} cannot be used ({error.strerror}): give one that can be written") from error


def make_inputs(directory: Path, seed: int) -> tuple[Path, Path]:
    """The tiny model for this seed and the data; made once. Written aside and renamed, so a killed demo leaves no half of it."""
    from flows.demo_model import make_tiny_data, make_tiny_model

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
    """`sft.jsonl`: the rows in the order they are trained, each batch drawn without replacement: first the skill, then the habit."""
    rng = random.Random(seed)
    with (data / "sft.jsonl").open("w", encoding="utf-8") as out:
        for name, steps in (("sft_skill", SKILL_STEPS), ("sft_habit", HABIT_STEPS)):
            rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
            for _ in range(steps):
                out.writelines(json.dumps(row) + "\n" for row in rng.sample(rows, SFT_BATCH))


def sft_config(directory: Path, model: Path, data: Path, seed: int) -> PostTrainConfig:
    """The SFT half."""
    values = read_toml(RECIPES / "demo-sft.toml")
    values["run"] |= {"run": f"demo-sft-seed{seed}", "store": str(directory / "store")}
    values["convert"] = {"hf_checkpoint": str(model)}
    values["rollout"] |= {"prompt_data": [str(data / "sft.jsonl")], "rollout_seed": seed}
    values["train"] |= {"seed": seed}
    return validated(values)


def grpo_config(directory: Path, model: Path, data: Path, seed: int, num_rollout: int | None) -> PostTrainConfig:
    """The GRPO half, on the exported SFT model."""
    values = read_toml(RECIPES / "demo-grpo.toml")
    values["run"] |= {"run": f"demo-grpo-seed{seed}", "store": str(directory / "store")}
    if num_rollout is not None:
        values["run"]["num_rollout"] = num_rollout
    values["convert"] = {"hf_checkpoint": str(model)}
    values["rollout"] |= {"prompt_data": [str(data / "train.jsonl")], "rollout_seed": seed}
    values["train"] |= {"seed": seed}
    values["eval"] |= {"eval_prompt_data": [["heldout", str(data / "heldout.jsonl")]]}
    return validated(values)


def exported(config: PostTrainConfig) -> Path:
    """Directory of a finished run's exported model."""
    from flows.runs import open_store

    store = open_store(config.run)
    commit = store.committed(RunKeys(config.run.run).export(config.run.num_rollout))
    assert commit is not None and commit.attempt is not None, "the sft flow ended without an export"
    return Path(store.path(commit.attempt))
