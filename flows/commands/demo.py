"""`penstock demo`: train a model of 402,176 parameters on arithmetic, on this machine, with the real engines and flows.

The demo creates its own model and data (flows/commands/demo_model.py), runs the `sft` flow, then the `train` flow
on the model that SFT exported. Both are ordinary runs of recipes (configs/recipes/demo-*.toml), so the same command
resumes a demo that was stopped at any point.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from penstock.engines.backends import engine_backend
from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.config import RECIPES, PostTrainConfig, read_toml, validate_config
from penstock.flows.options.argv import activate_command, parse_integer, penstock_command, short_repr, split_args
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store
from penstock.flows.terminal.console import TerminalConsole
from penstock.flows.terminal.panel import end_wait, show_wait
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, PenstockError, RunError, check_rules
from penstock.storage.leases import describe_live_drivers
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.store import Store

PENSTOCK = (sys.executable, "-m", "penstock")
POLL_SECONDS = 0.2
EQUAL = "equal bit for bit"
# What to kill, in this order -> whether a command line is that of such a process.
TARGETS: dict[str, Callable[[str], bool]] = {
    "engine": lambda command: next(iter(engine_backend().processes)) in command,
    "trainer": lambda command: command.startswith("ray::TrainActor"),
    "driver": lambda command: False,  # `DemoProcess` knows the process of the driver
}
KILLED = {"engine": "the inference engine", "trainer": "the trainer", "driver": "the driver, and started it again"}

DIRECTORY = "penstock-demo"
MAX_SEED = 2**32
NUM_ROUNDS = 60  # GRPO rounds, as in demo-grpo.toml
MARKER = ".penstock-demo"  # name of a file that marks a directory created by the demo
MARKER_TEXT = b"made by penstock demo; `penstock demo --fresh` may remove it\n"
SKILL_STEPS, HABIT_STEPS, SFT_BATCH = 340, 60, 128  # SFT steps on correct and on partly wrong answers; batch size

MEANING = """What the reward curve means: SFT first taught this model exact arithmetic, then 60 steps of lazy
demonstrations planted a habit (drop the units: 37+8= -> 40). GRPO removes that habit with a
right-or-wrong reward. It does not teach arithmetic from scratch, and a 400-thousand-parameter
model says nothing about a large one: the demo shows that every stage works and that learning
happens."""
USAGE = f"""penstock demo [--directory DIR] [--num-rollout N] [--seed N] [--fresh] [--kill]
penstock demo --model-only DIR [--seed N]

  Makes a Qwen3 model of 402,176 random parameters, teaches it problems such as 37+8= by SFT, and improves it by GRPO.

  --directory     output directory; default {DIRECTORY}, with --kill {DIRECTORY}-kill
  --num-rollout   GRPO rounds; default {NUM_ROUNDS}; the reward rises within 20
  --seed          seed of model, data order and prompt sampling; default 0
  --fresh         remove an earlier demo from the directory and restart
  --kill          kill the engine, the trainer and the driver during the run, then replay every round
  --model-only    only write the random model to DIR"""

FLAGS = {
    **dict.fromkeys(("--directory", "--num-rollout", "--seed", "--model-only"), True),
    **dict.fromkeys(("--fresh", "--kill"), False),
}


def main(argv: list[str]) -> int:
    """Run `penstock demo`. Return the exit code."""
    positional, own, rest = split_args(argv, FLAGS)
    unknown = positional + rest
    seed = parse_integer("--seed", own.get("--seed", "0"))
    num_rollout = parse_integer("--num-rollout", own["--num-rollout"]) if "--num-rollout" in own else None
    kill, model = "--kill" in own, Path(own["--model-only"]) if "--model-only" in own else None
    check_rules(
        (
            (unknown, f"penstock demo does not take {short_repr(''.join(unknown[:1]))}: see penstock demo --help"),
            (seed >= MAX_SEED, f"--seed takes an integer below {MAX_SEED}; found {seed}"),
            (model is not None and model.exists(), f"{model} exists: give --model-only a new directory"),
            (
                kill and num_rollout is not None and num_rollout < 4,
                f"--kill needs at least 4 rounds; found --num-rollout {num_rollout}: give 4 or more",
            ),
        )
    )
    if model is not None:
        print(f"{make_tiny_model(model, seed)}: give it to --hf-checkpoint")
        return 0
    directory = Path(own.get("--directory", f"{DIRECTORY}-kill" if kill else DIRECTORY))
    if "--fresh" in own:
        remove_demo(directory)
    if kill:
        return run_demo_with_kills(directory, seed=seed, num_rollout=num_rollout or NUM_ROUNDS)
    return run_demo(directory, seed=seed, num_rollout=num_rollout)


def run_demo(directory: Path, *, seed: int = 0, num_rollout: int | None = None) -> int:
    """Create the model and the data, run the SFT flow and then the GRPO flow. Return the exit code."""
    start_time = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.iterdir()):
            (directory / MARKER).write_bytes(MARKER_TEXT)  # --fresh removes only directories with this file
    except OSError as error:
        reason = f"--directory {directory} cannot be written ({error.strerror})"
        raise OptionError(f"{reason}: give another --directory") from error
    title = "Penstock demo: a tiny Qwen3 (402,176 parameters), two-digit +- one-digit arithmetic"
    print(f"{title}, seed {seed}\n{MEANING}\n", flush=True)
    show_wait("making the model and its data")
    try:
        model, data = make_model_and_data(directory / "inputs", seed)
    finally:
        end_wait()
    sft = recipe_config("sft", directory, model, data / "sft.jsonl", seed)
    if code := run_flow("sft", sft):
        return code
    store = open_store(sft.run)
    exported = store.committed(RunKeys(sft.run.run).export_prefix(sft.run.num_rollout))
    assert exported is not None and exported.attempt is not None, "the sft flow ended without an export"
    rounds = {} if num_rollout is None else {"num_rollout": num_rollout}
    evaluation = {"eval_prompt_data": [["heldout", str(data / "heldout.jsonl")]]}
    trained = Path(store.path(exported.attempt))
    grpo = recipe_config("grpo", directory, trained, data / "train.jsonl", seed, run=rounds, eval=evaluation)
    if code := run_flow("train", grpo):
        return code
    print(
        f"\nThe demo took {time.monotonic() - start_time:.0f} s. The same command resumes it; "
        f"`{penstock_command()} demo --fresh` restarts it.\n"
        f"In a new terminal: {activate_command()} puts penstock on the PATH."
    )
    return 0


def remove_demo(directory: Path) -> None:
    """Remove the files of an earlier demo from its directory. Other files are kept. Symbolic links are not followed.
    Raises an InputError if the directory is not that of a demo, or a demo is running in it."""
    if not directory.exists() and not directory.is_symlink():
        return
    resolved = directory.resolve()
    marker, reason = directory / MARKER, ""
    if directory.is_symlink() or any(other.resolve().is_relative_to(resolved) for other in (Path.home(), Path.cwd())):
        reason = "it is a link, or contains the home or the current directory"
    elif marker.is_symlink() or not marker.is_file() or marker.read_bytes() != MARKER_TEXT:
        reason = f"it was not created by a demo ({MARKER} is missing)"
    if reason:
        raise OptionError(f"--fresh does not remove {directory}: {reason}; give another --directory")
    if (directory / "store" / "runs").is_dir():
        store = Store(str(directory / "store"), probe=False)
        for run in store.list("runs"):
            if drivers := describe_live_drivers(store, RunKeys(run)):
                raise RunError(
                    f"run {run!r} in {directory / 'store'} has a running driver, {drivers[0]}: stop the driver, then "
                    "repeat --fresh"
                )
    for subdirectory in (directory / "inputs", directory / "store"):
        if subdirectory.is_symlink():
            subdirectory.unlink()
        elif subdirectory.exists():
            shutil.rmtree(subdirectory)
    marker.unlink()
    if not any(directory.iterdir()):
        directory.rmdir()


def make_model_and_data(directory: Path, seed: int) -> tuple[Path, Path]:
    """Create the tiny model and the data of this seed, unless they exist. Return their directories.

    Each directory is written under a temporary name and then renamed, so that a killed demo leaves no partial
    directory under the final name.
    """
    model, data = directory / f"model-seed{seed}", directory / f"data-seed{seed}"
    for target, make in ((data, make_demo_data), (model, make_tiny_model)):
        if not target.exists():
            scratch = target.with_name(target.name + ".partial")
            shutil.rmtree(scratch, ignore_errors=True)
            make(scratch, seed)
            scratch.rename(target)
    return model, data


def make_demo_data(data: Path, seed: int) -> None:
    """Write the data sets to the directory `data`, and from them `sft.jsonl`, the SFT rows in training order: first
    correct answers (`sft_skill.jsonl`), then answers of which some are rounded down to tens, a habit that RL has to
    remove (`sft_habit.jsonl`). No row occurs twice in a batch."""
    make_tiny_data(data)
    rng = random.Random(seed)
    with (data / "sft.jsonl").open("w", encoding="utf-8") as out:
        for name, steps in (("sft_skill", SKILL_STEPS), ("sft_habit", HABIT_STEPS)):
            rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
            for _ in range(steps):
                out.writelines(json.dumps(row) + "\n" for row in rng.sample(rows, SFT_BATCH))


def recipe_config(
    part: str, directory: Path, model: Path, prompts: Path, seed: int, **more: dict[str, Any]
) -> PostTrainConfig:
    """Return the config of a run of the demo: the recipe `part` ("sft" or "grpo") with the directory of the initial
    model, the file of prompts or demonstrations, and the options in `more`: section -> options."""
    values = read_toml(RECIPES / f"demo-{part}.toml")
    own: dict[str, dict[str, Any]] = {
        "run": {"run": f"demo-{part}-seed{seed}", "store": str(directory / "store")},
        "convert": {"hf_checkpoint": str(model)},
        "rollout": {"prompt_data": [str(prompts)], "rollout_seed": seed},
        "train": {"seed": seed},
    }
    for section, options in [*own.items(), *more.items()]:
        values[section] = values.get(section, {}) | options
    return validate_config(values)


# ---- penstock demo --kill --------------------------------------------------------------------------------------------
#
# The demo runs in another process, whose output is printed here. The demo itself has no code for the kills.


class DemoProcess:
    """A process that runs `penstock demo` (the command line `words`). After its driver is killed, the same command is
    started again."""

    def __init__(self, words: list[str], console: Console) -> None:
        self.words = words
        self.console = console

    def start(self) -> None:
        """Start the command."""
        self._process = subprocess.Popen(
            self.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
        )
        self._reader = Thread(target=print_lines, args=(self._process, self.console), daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """Return the exit code, after the last line is printed; None while the command runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join()
        return code

    def kill(self, target: str) -> list[int]:
        """Kill the processes of a target (a key of TARGETS) with SIGKILL. Return their process ids; [] if there are no
        such processes now. A killed driver is started again when its child processes have ended."""
        try:
            driver = psutil.Process(self._process.pid)
            children = driver.children(recursive=True)
            victims = [child for child in children if TARGETS[target](command_line(child))]
            if target == "driver":
                victims = [driver]
            for victim in victims:
                victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:  # the process has ended by itself
            return []
        if target == "driver":
            self._process.wait()
            self._reader.join()
            psutil.wait_procs(children, timeout=60)
            self.start()
        return [victim.pid for victim in victims]

    def stop(self) -> None:
        """Stop the command with SIGTERM, if it still runs. SIGINT is ignored in background jobs of a shell."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def run_demo_with_kills(directory: Path, *, seed: int, num_rollout: int) -> int:
    """Run the demo, kill its processes, check its commits, and replay every round. Return the exit code: 0 if nothing
    was lost and the replay of every round gives weights that are equal bit for bit."""
    console = TerminalConsole(highlight=False, soft_wrap=True)
    store, keys = str(directory / "store"), RunKeys(f"demo-grpo-seed{seed}")
    kills = {target: num_rollout * (number + 1) // 4 for number, target in enumerate(TARGETS)}
    done = num_trained(store, keys)
    if done >= kills["engine"]:
        raise OptionError(
            f"the demo in {directory} has already trained {done} of {num_rollout} rounds, but the first kill is due "
            f"after round {kills['engine']}: add --fresh, or give another --directory"
        )
    words = ("--directory", str(directory), "--seed", str(seed), "--num-rollout", str(num_rollout))
    demo = DemoProcess([*PENSTOCK, "demo", *words], console)
    demo.start()
    try:
        while (code := demo.exit_code()) is None:
            time.sleep(POLL_SECONDS)
            target = next(iter(kills), None)
            if target is not None and num_trained(store, keys) >= kills[target] and (pids := demo.kill(target)):
                del kills[target]
                killed = f"✗ kill -9 {' '.join(map(str, pids))}: {KILLED[target]}"
                console.print(Text(killed, style="bold red"))
    finally:
        demo.stop()
    if code or kills:
        missed = f"; not killed: {', '.join(kills)}" if kills else ""
        console.print(f"the demo ended with exit code {code}{missed}")
        return code or 1
    return audit_and_replay(store, keys, console)


def audit_and_replay(store: str, keys: RunKeys, console: Console) -> int:
    """Check all commits of a run and replay its rounds. Return 0 if nothing is wrong and all rounds are equal bit for
    bit, else 1."""
    result = audit_run(Store(store, probe=False), keys)
    for problem in result.problems:
        console.print(Text(f"WRONG: {problem}", style="bold red"))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "replay.json"
        words = [*PENSTOCK, "replay", keys.run, "--store", store, "--json", str(report)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
        print_lines(process, console)
        code = process.wait()
        rounds = json.loads(report.read_text()) if report.exists() else {}
    num_equal = sum(replayed["verdict"] == EQUAL for replayed in rounds.values())
    good = not code and not result.problems and num_equal == len(rounds) == result.num_commits.get("step")
    problems = f"{len(result.problems)} problems in {result.num_samples:,} samples"
    text = f"\nkilled engine, trainer and driver: {problems}, {num_equal} of {len(rounds)} rounds {EQUAL}"
    console.print(Text(text, style="bold green" if good else "bold red"))
    return 0 if good else 1


def num_trained(store: str, keys: RunKeys) -> int:
    """Return the number of trained rounds of a run; 0 if the store does not exist yet."""
    try:
        return len(Store(store, probe=False).committed_indices(f"{keys.prefix}/steps"))
    except (PenstockError, OSError):  # the store is being created
        return 0


def print_lines(process: subprocess.Popen[str], console: Console) -> None:
    """Print the output of a process until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        console.print(Text(line.rstrip("\n")))


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
