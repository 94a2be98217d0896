"""`penstock setup`: install in the active environment what the wheel of Penstock cannot install by itself.

A wheel cannot declare an order of installation or packages without their dependencies, which a machine without CUDA
needs. Each step looks first at what is installed, so the command continues where an interrupted one has stopped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

from penstock.flows.install.requirements import checkout, declared
from penstock.flows.install.steps import Step, installation_steps, run_step
from penstock.flows.options.argv import penstock_command, short_repr, split_args
from penstock.storage.errors import InstallError, OptionError

USAGE = """penstock setup [--cpu | --cuda] [--with EXTRAS] [--torch-index URL] [--check]

  Installs everything a run needs in the active Python environment, in the order that a machine with CUDA or without
  needs. Run it after `pip install --no-deps penstock-rl`; in a checkout it installs the checkout in editable mode.
  It continues after an interruption and repeats a step that the network has failed; finished steps are skipped.

  --cpu, --cuda   which engines to install; default: CUDA if nvidia-smi lists a GPU
  --with EXTRAS   optional parts, separated by commas; default s3,query. There are s3, gs, az (stores), query
                  (penstock query), wandb, tensorboard, cluster (ray job submit), docs, test, dev
  --torch-index URL   package index for torch and torchvision only, such as PyTorch's index of CPU builds
  --check         print what is missing and install nothing; exit code 1 if something is"""

FLAGS = {"--cpu": False, "--cuda": False, "--with": True, "--torch-index": True, "--check": False}
DEFAULT_EXTRAS = "s3,query"
LOG = "setup.log"  # in sys.prefix


def main(argv: list[str]) -> int:
    """Run the command. Return 0, or 1 if --check finds something missing.

    Raises:
        OptionError: an option is invalid.
        InstallError: the environment cannot be used, or a step failed.
    """
    positional, own, rest = split_args(argv, FLAGS)
    if positional or rest:
        raise OptionError(
            f"penstock setup does not take {short_repr((positional + rest)[0])}: see penstock setup --help"
        )
    if "--cpu" in own and "--cuda" in own:
        raise OptionError("--cpu and --cuda exclude each other: give one of them, or none to detect CUDA")
    if find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip, then repeat the command")
    source = checkout()
    extras = parse_extras(own.get("--with", DEFAULT_EXTRAS), source)
    kind = "cpu" if "--cpu" in own else "cuda" if "--cuda" in own or has_cuda() else "cpu"
    steps = installation_steps(kind, extras, source, own.get("--torch-index"))
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Penstock setup: {sys.prefix}, {kind}, Python {version}", flush=True)
    if "--check" in own:
        return print_missing(steps)
    install(steps, Path(sys.prefix) / LOG)
    print(f"Penstock is installed. Try it: {penstock_command()} demo")
    return 0


def install(steps: list[Step], log: Path) -> None:
    """Run the steps that are not done, and check at the end that no later step has undone an earlier one.

    Raises:
        InstallError: a step failed.
    """
    for step in steps:
        if not step.missing():
            print(f"  done before  {step.name}", flush=True)
            continue
        start = time.monotonic()
        print(f"  installing   {step.name} ...", end="", flush=True)
        try:
            run_step(step, log)
        except KeyboardInterrupt:
            print(" interrupted; the same command continues with this step", flush=True)
            raise
        except InstallError:
            print(" failed", flush=True)
            raise
        print(f" {time.monotonic() - start:.0f} s", flush=True)
    if undone := [line for step in steps for line in step.missing()]:
        raise InstallError(f"a later step has replaced packages ({'; '.join(undone[:3])}): use a new environment")


def print_missing(steps: list[Step]) -> int:
    """Print for each step what is missing. Return the exit code: 1 if anything is."""
    missing = {step.name: step.missing() for step in steps}
    for name, lines in missing.items():
        print(f"  {'missing' if lines else 'done   '}  {name}")
        for line in lines[:12]:
            print(f"             {line}")
        if len(lines) > 12:
            print(f"             and {len(lines) - 12} more")
    if any(missing.values()):
        print("To install what is missing, repeat the command without --check")
        return 1
    return 0


def parse_extras(text: str, source: Path | None) -> list[str]:
    """Return the extras named in --with.

    Raises:
        OptionError: Penstock does not have one of them.
        InstallError: Penstock is neither installed nor a checkout.
    """
    try:
        known = declared(source)[1]
    except PackageNotFoundError as error:
        raise InstallError(
            f"penstock-rl is not installed in {sys.prefix}: run {sys.executable} -m pip install --no-deps penstock-rl"
        ) from error
    extras = [name.strip() for name in text.split(",") if name.strip()]
    for name in extras:
        if name not in known or name in ("cpu", "gpu"):
            choices = ", ".join(sorted(set(known) - {"cpu", "gpu"}))
            raise OptionError(f"--with takes names of {choices}, separated by commas; found {short_repr(name)}")
    return extras


def has_cuda() -> bool:
    """Return whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    from penstock.flows.cli import main as penstock

    sys.exit(penstock(["setup", *sys.argv[1:]]))
