"""`penstock demo --kill`: the demo, while its engine, its trainer and its driver are killed with SIGKILL, then a check
of everything it has committed and a replay of every round.

The demo runs in a process of its own, whose output is printed here. Nothing in it knows of the kills.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import psutil
from rich.console import Console
from rich.text import Text

from penstock.engines.backends import engine_backend
from penstock.flows.terminal.console import TerminalConsole
from penstock.storage.errors import OptionError, PenstockError
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store

POLL_SECONDS = 0.2
LAUNCHER = engine_backend().start_check()[0][0]  # the script that runs an engine's server
EQUAL = "equal bit for bit"
TARGETS: dict[str, Callable[[str], bool]] = {  # in the order of the kills: what -> whether a command line is that
    "engine": lambda command: LAUNCHER in command,
    "trainer": lambda command: command.startswith("ray::TrainActor"),
    "driver": lambda command: False,  # the process itself
}


class DemoProcess:
    """`penstock demo` in a process of its own, restarted with the same command after its driver is killed.

    Args:
        words: the command.
        console: where its output is printed.
    """

    def __init__(self, words: list[str], console: Console) -> None:
        self.words = words
        self.console = console
        self.start()

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
        """Kill the processes of a target with SIGKILL. Return their process ids; none if there are no such processes at
        the moment. A killed driver is restarted when its children have ended."""
        try:
            driver = psutil.Process(self._process.pid)
            children = driver.children(recursive=True)
            victims = [child for child in children if TARGETS[target](command_line(child))]
            victims = [driver] if target == "driver" else victims
            for victim in victims:
                victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:  # it has ended by itself
            return []
        if target == "driver":
            self._process.wait()
            self._reader.join()
            psutil.wait_procs(children, timeout=60)
            self.start()
        return [victim.pid for victim in victims]

    def stop(self) -> None:
        """Stop the command, if it still runs. SIGTERM, because children of a shell's background jobs ignore SIGINT."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def run_demo_with_kills(directory: Path, run: str, *, seed: int, num_rollout: int) -> int:
    """Run the demo, kill its processes, check its commits, and replay every round. Return the exit code: 0 if nothing
    was lost and every round is equal bit for bit.

    Args:
        directory: of the demo.
        run: name of the run in which processes are killed.
        seed: of the demo.
        num_rollout: rounds of the run, at least 4.

    Raises:
        OptionError: the demo in the directory has already trained too many rounds to kill processes in them.
    """
    console = TerminalConsole(highlight=False, soft_wrap=True)
    store, keys = str(directory / "store"), RunKeys(run)
    kills = {target: num_rollout * (number + 1) // 4 for number, target in enumerate(TARGETS)}
    done = num_trained(store, keys)
    if done >= kills["engine"]:
        raise OptionError(
            f"the demo in {directory} has trained {done} of {num_rollout} rounds, and its first kill comes after "
            f"{kills['engine']}: add --fresh, or give another --directory"
        )
    words = ("--directory", str(directory), "--seed", str(seed), "--num-rollout", str(num_rollout))
    demo = DemoProcess(demo_command(*words), console)
    try:
        while (code := demo.exit_code()) is None:
            time.sleep(POLL_SECONDS)
            target = next(iter(kills), None)
            if target is not None and num_trained(store, keys) >= kills[target] and (pids := demo.kill(target)):
                del kills[target]
                print_kill(console, target, pids)
    finally:
        demo.stop()
    if code or kills:
        missed = f"; not killed: {', '.join(kills)}" if kills else ""
        console.print(f"the demo ended with exit code {code}{missed}")
        return code or 1
    return check_and_replay(store, keys, console)


def print_kill(console: Console, target: str, pids: list[int]) -> None:
    """Print which processes were killed."""
    what = {"engine": "the inference engine", "trainer": "the trainer", "driver": "the driver, and started it again"}
    console.print(Text(f"✗ kill -9 {' '.join(map(str, pids))}: {what[target]}", style="bold red"))


def check_and_replay(store: str, keys: RunKeys, console: Console) -> int:
    """Check all commits of a run and replay its rounds. Return 0 if nothing is wrong and all rounds are equal."""
    result = audit_run(Store(store, probe=False), keys)
    for problem in result.problems:
        console.print(Text(f"WRONG: {problem}", style="bold red"))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "replay.json"
        words = replay_command(keys.run, "--store", store, "--json", str(report))
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
        print_lines(process, console)
        code = process.wait()
        rounds = json.loads(report.read_text()) if report.exists() else {}
    num_equal = sum(replayed["verdict"] == EQUAL for replayed in rounds.values())
    good = not code and not result.problems and num_equal == len(rounds) == result.num_commits.get("step")
    console.print(
        Text(
            f"\nkilled engine, trainer and driver: {len(result.problems)} problems in {result.num_samples:,} samples, "
            f"{num_equal} of {len(rounds)} rounds {EQUAL}",
            style="bold green" if good else "bold red",
        )
    )
    return 0 if good else 1


def demo_command(*words: str) -> list[str]:
    """Return the command `penstock demo WORDS` of this installation."""
    return [sys.executable, "-m", "penstock", "demo", *words]


def replay_command(*words: str) -> list[str]:
    """Return the command `penstock replay WORDS` of this installation."""
    return [sys.executable, "-m", "penstock", "replay", *words]


def num_trained(store: str, keys: RunKeys) -> int:
    """Return the number of trained rounds of a run; 0 if the store does not exist yet."""
    try:
        return len(Store(store, probe=False).committed_indices(f"{keys.prefix}/steps"))
    except (PenstockError, OSError):  # it is being created
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
