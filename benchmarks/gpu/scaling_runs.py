"""The runs of scaling.py: check that a part fits, train, stop and measure it, or kill its processes and replay it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import psutil
from scaling_parts import MEMORY, Part

from penstock.engines.local_gpus import visible_gpu_bytes
from penstock.engines.sglang.checks import graph_limit
from penstock.flows.commands.demo import EQUAL, TARGETS, command_line, num_trained
from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import VISION, train_arguments
from learning import read_commit
from run import median_seconds, read_publish_seconds, round_seconds

KILLS = ("trainer", "engine", "driver")  # one after each of the first rounds
CHECKS = ("all killed", "all rounds trained", "audit clean", "replay equal bit for bit")
POLL_SECONDS = 0.2
GAP = "train/train_rollout_logprob_abs_diff"  # mean difference between the log-probs of trainer and engine
PENSTOCK = [sys.executable, "-m", "penstock"]


class RunFailed(Exception):
    """A command failed. The message is the tail of its log."""


class DoesNotFit(Exception):
    """A part needs more memory than a GPU has. The message is the last line of the plan."""


class Interrupted(Exception):
    """The time is up."""


@dataclass(frozen=True)
class PartRun:
    """A part on the GPUs that it runs on.

    Attributes:
        part: the part.
        directory: where its store and log are.
        arguments: of `penstock train`.
        gpus: names of its GPUs for CUDA_VISIBLE_DEVICES; none without GPUs.
        stop: set when the time is up.
    """

    part: Part
    directory: Path
    arguments: list[str]
    gpus: list[str]
    stop: Event

    @property
    def store(self) -> Path:
        """Return the directory of the store."""
        return self.directory / self.part.name

    @property
    def keys(self) -> RunKeys:
        """Return the keys of the run in the store."""
        return RunKeys(self.part.name)

    @property
    def log(self) -> Path:
        """Return the file with the output of all commands."""
        return self.directory / f"{self.part.name}.log"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a `penstock` command that sees only the GPUs of the part, with a Prefect server of its own; SGLang's
        ports are reserved by Penstock."""
        env = os.environ | {"PREFECT_HOME": str(make_prefect_home(self.directory / "prefect", self.part.name))}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        with self.log.open("ab") as log:
            return subprocess.Popen([*PENSTOCK, *words], stdout=log, stderr=subprocess.STDOUT, env=env)

    def run(self, *words: str, each_poll: Callable[[int], bool] = lambda pid: False) -> int:
        """Run a command until it ends, or until `each_poll` of its process id returns True. Return the exit code.

        Raises:
            Interrupted: the time is up. The command was stopped.
        """
        process = self.start(*words)
        try:
            while process.poll() is None and not each_poll(process.pid):
                if self.stop.wait(POLL_SECONDS):
                    raise Interrupted
        finally:
            end_process(process)
        return process.returncode

    def num_trained(self) -> int:
        """Return the number of trained rounds."""
        return num_trained(str(self.store), self.keys)

    def remove_store(self) -> None:
        """Remove the store, but keep the logs of engines and trainer as NAME-logs."""
        logs, kept = self.store / self.keys.prefix / "logs", self.directory / f"{self.part.name}-logs"
        if logs.exists():
            shutil.rmtree(kept, ignore_errors=True)
            logs.rename(kept)
        shutil.rmtree(self.store, ignore_errors=True)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Stop a command with SIGTERM if it runs, and wait until its child processes have freed the GPUs."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(children, timeout=60)[1]:
        child.kill()


def make_prefect_home(directory: Path, name: str) -> Path:
    """Return `directory`/`name`, a copy of the Prefect home `directory`/empty. The first call creates `empty`: creating
    its database takes longer than starting a run, and two servers must not create the same one."""
    empty, home = directory / "empty", directory / name
    if not (empty / "created").exists():
        empty.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        subprocess.run(words, env=os.environ | {"PREFECT_HOME": str(empty)}, capture_output=True, check=True)
        (empty / "created").touch()
    if not home.exists():
        shutil.copytree(empty, home)
    return home


def make_arguments(part: Part, directory: Path, rehearse: bool, further: list[str]) -> list[str]:
    """Make model and prompts of a part, and return the arguments of `penstock train`. A measured run would train 100
    rounds, and is stopped before it saves a checkpoint, which can be larger than the disk."""
    length, prompts, options = part.length, part.prompts, f"{MEMORY[part.model]} {part.options}"
    if rehearse:
        length, prompts, options = (
            16,
            part.prompts // 16,
            f"{options} --max-tokens-per-gpu 4096 --sglang-mem-fraction-static 0.1",
        )
    rounds = part.rounds if part.group == "kills" else 100
    make_prefect_home(directory / "prefect", part.name)
    tiny = "tiny-vl" if part.model in VISION else "tiny"
    words = train_arguments(directory, tiny if rehearse else part.model, part.name)
    words += ["--num-rollout", str(rounds), "--rollout-batch-size", str(prompts), "--grace-period", "1"]
    words += ["--n-samples-per-prompt", str(part.samples), "--rollout-max-response-len", str(length)]
    if sizes := visible_gpu_bytes():
        words += ["--engine-concurrency", str(graph_limit(min(sizes), part.engine_gpus))]
    return [*words, *options.split(), *further]


def check_fit(run: PartRun) -> None:
    """Check with `penstock doctor --plan` that a part fits its GPUs. Raises DoesNotFit or RunFailed."""
    begin = log_size(run.log)
    code = run.run("doctor", "--plan", *run.arguments)
    lines = read_log(run.log, begin)
    if code == 1 and lines and lines[-1].startswith("does not fit"):
        raise DoesNotFit(lines[-1])
    if code:
        raise RunFailed(tail(lines))


# ---- measured parts --------------------------------------------------------------------------------------------------


def measure(run: PartRun) -> dict[str, Any]:
    """Train a part from the start, so that no interruption is measured, and stop it after the measured rounds. Return
    its seconds and speeds. A model that the store has is not converted again.

    Raises:
        DoesNotFit, RunFailed, Interrupted: it was not measured.
    """
    check_fit(run)
    shutil.rmtree(run.store / run.keys.prefix, ignore_errors=True)
    begin = log_size(run.log)
    try:
        run.run("train", *run.arguments, each_poll=lambda pid: run.num_trained() >= run.part.rounds)
        if run.num_trained() < run.part.rounds:
            raise RunFailed(tail(read_log(run.log, begin)))
        return read_figures(run)
    finally:
        run.remove_store()


def read_figures(run: PartRun) -> dict[str, Any]:
    """Return seconds and speeds of the measured rounds, from the store."""
    part, store, keys = run.part, Store(str(run.store)), run.keys
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    steady = range(part.warm_up, part.rounds)
    seconds = median_seconds([round_seconds(store, keys, r, published) for r in steady])
    steps = [read_commit(store, keys.step_prefix(r)) for r in range(part.rounds)]
    samples = [sample for r in steady for sample in read_samples(store, read_commit(store, keys.rollout_prefix(r)))]
    # Rounds overlap in asynchronous runs, so the whole time is measured, not the sum of the stages.
    wall = (steps[-1].created_at - steps[part.warm_up - 1].created_at) / len(steady)
    stages = [seconds.get(stage, 0.0) for stage in ("generation", "grading", "training")]
    trained = sum(sum(sample.loss_mask) for sample in samples) / len(steady)
    total = sum(len(sample.token_ids) for sample in samples) / len(steady)
    mfu = [steps[r].summary.get("perf/actor_train_mfu") for r in steady]
    return {
        "seconds of a round": round(wall, 3),
        "floor of a round": round(max(stages) if "--async-" in part.options else sum(stages), 3),
        "parts of a round": {name: round(value, 3) for name, value in seconds.items()},
        "tokens/s per GPU": round(total / wall / part.gpus, 1),
        "trained tokens/s per GPU": round(trained / wall / part.gpus, 1),
        "train MFU": None if None in mfu else round(statistics.median(mfu), 4),
        "gap": [round(steps[r].summary[GAP], 5) for r in steady],
    }


# ---- kills -----------------------------------------------------------------------------------------------------------


def kill_and_replay(run: PartRun, earlier: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> None:
    """Train a part, and kill one trainer rank, one engine and the driver after one round each; then check the commits
    and replay all rounds.

    Args:
        run: the part.
        earlier: the checks of an earlier, interrupted start of this program, which are not repeated.
        save: called with all checks after each of them.

    Raises:
        DoesNotFit, RunFailed, Interrupted: not all checks were made.
    """
    checks = dict(earlier) if run.store.exists() else {}
    where = [run.part.name, "--store", str(run.store)]
    if CHECKS[1] not in checks:
        check_fit(run)
        run.remove_store()
        checks |= train_with_kills(run)
        save(checks)
    if CHECKS[2] not in checks:
        checks[CHECKS[2]] = run.run("verify", *where) == 0
        save(checks)
    if CHECKS[3] not in checks:
        report = run.directory / f"{run.part.name}-replay.json"
        report.unlink(missing_ok=True)
        code = run.run("replay", *where, "--json", str(report))
        rounds = json.loads(report.read_text()) if report.exists() else {}
        equal = [replayed["verdict"] == EQUAL for replayed in rounds.values()]
        checks[CHECKS[3]] = code == 0 and len(equal) == run.num_trained() and all(equal)
        save(checks)
    if all(checks.values()):
        run.remove_store()


def train_with_kills(run: PartRun) -> dict[str, bool]:
    """Train a part to its end, kill its processes, and restart it after the kill of its driver. Return the first two
    checks."""
    begin, waiting = log_size(run.log), list(KILLS)

    def kill_next(pid: int) -> bool:
        """Kill the next process when its round is trained, and return whether it was the driver."""
        due = bool(waiting) and run.num_trained() > len(KILLS) - len(waiting)
        return due and kill_one(pid, waiting[0]) and waiting.pop(0) == "driver"

    code = run.run("train", *run.arguments, each_poll=kill_next)
    if "driver" not in waiting:
        code = run.run("train", *run.arguments)
    if code:
        raise RunFailed(tail(read_log(run.log, begin)))
    return {CHECKS[0]: not waiting, CHECKS[1]: run.num_trained() == run.part.rounds}


def kill_one(driver: int, target: str) -> bool:
    """Kill one process of the kind `target` with SIGKILL, and return whether there was one. A driver's children end by
    themselves."""
    try:
        process = psutil.Process(driver)
        children = process.children(recursive=True)
        victims = [child for child in children if TARGETS[target](command_line(child))]
        victims = [process] if target == "driver" else victims[:1]
        for victim in victims:
            victim.kill()
        if target == "driver":
            psutil.wait_procs(children, timeout=60)
    except psutil.NoSuchProcess:
        return False
    return bool(victims)


# ---- logs ------------------------------------------------------------------------------------------------------------


def log_size(path: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def read_log(path: Path, begin: int) -> list[str]:
    """Return the lines of a log from byte `begin` on that are not blank."""
    text = path.read_bytes()[begin:].decode(errors="replace")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()]


def tail(lines: list[str], number: int = 8) -> str:
    """Return the lines from the last error message of Penstock on, at most `number`, or else the last lines."""
    errors = [index for index, line in enumerate(lines) if line.startswith("penstock:")]
    return "\n".join(lines[errors[-1] :][:number] if errors else lines[-number:]) or "the command printed nothing"
