"""The steps of an installation, in the order that they need, and how one is run with pip.

Without CUDA, torch comes first and alone (its CPU wheel), then everything with ordinary dependencies, then the packages
whose pins would pull CUDA builds, without dependencies. torchvision must not be in site-packages (the registry's wheel
is a CUDA build whose operators break every model import of transformers): it gets a folder of its own that only
SGLang's server has on its path.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from penstock.flows.install.requirements import (
    PROJECT,
    find_distribution,
    installation_problem,
    is_partly_installed,
    lock_file,
    missing_requirements,
    read_lock,
    site_packages,
)
from penstock.storage.errors import InstallError

TORCH, TORCHVISION = "2.13.0", "0.28.0"
SGLANG = {  # installed without dependencies where there is no CUDA
    "sglang": "0.5.21",
    "xgrammar": "0.2.7",
    "apache-tvm-ffi": "0.1.11",
    "compressed-tensors": "0.18.0",
    "soundfile": "0.13.1",
}
PIP = "25.1"  # the first version that resumes an interrupted download
TRIES = 5  # of a step that the network has failed
FIRST_PAUSE = 5.0  # seconds before the second try; doubles for each further one
REPORT_INTERVAL = 30.0  # seconds between reports of a slow step
PIP_SETTINGS = {  # used unless the user has set them
    "PIP_RETRIES": "10",
    "PIP_RESUME_RETRIES": "50",
    "PIP_DEFAULT_TIMEOUT": "60",
    "PIP_PROGRESS_BAR": "off",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
_NETWORK_ERROR = re.compile(  # old versions of pip accept half a download, and find it to be invalid
    r"connection ?(broken|error)|timed out|timeout|incompleteread|incomplete-download|protocolerror|remotedisconnected"
    r"|name resolution|network is unreachable|HTTP error 5\d\d|5\d\d server error|do not match the hash|is invalid",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Step:
    """One call of pip."""

    name: str
    find_missing: Callable[[], list[str]]  # lines about the packages that the step has to install; [] if it is done
    arguments: tuple[str, ...]  # of `pip install`

    def missing(self) -> list[str]:
        """Return `find_missing()` for what is installed now, also by pip since the last call."""
        importlib.invalidate_caches()
        return self.find_missing()


def installation_steps(kind: str, extras: Sequence[str], source: Path | None, torch_index: str | None) -> list[Step]:
    """Return the steps of an installation.

    Args:
        kind: "cpu" or "cuda".
        extras: extras of penstock-rl besides cpu or gpu.
        source: a checkout to install in editable mode; None keeps the installed wheel.
        torch_index: URL of the package index for torch and torchvision; None: pip's.

    Raises:
        InstallError: Penstock has no lock file for this Python version.
    """
    lock = lock_file(kind)
    if not lock.exists():
        found = ".".join(map(str, sys.version_info[:3]))
        raise InstallError(
            f"Python {found} found, Penstock needs 3.11 or 3.12: create the environment with one of them"
        )
    names = ("cpu" if kind == "cpu" else "gpu", *extras)
    target = [f"{PROJECT}[{','.join(names)}]=={version(PROJECT)}"] if source is None else []
    if source is not None:
        target = ["--editable", f"{source}[{','.join(names)}]"]
    index = ("--index-url", torch_index) if torch_index else ()
    pins = read_lock(lock)
    steps = [
        Step("pip", lambda: _problems({"pip": f">={PIP}"}), ("--upgrade", f"pip>={PIP}")),
        Step(f"torch {TORCH}", lambda: missing_torch(kind), (f"torch=={TORCH}", *index)),
        Step(
            f"penstock, ray, prefect, mlflow, megatron-core ({', '.join(names)})",
            lambda: missing_project(names, source, pins),
            ("--constraint", str(lock), *target),
        ),
    ]
    if kind == "cpu":
        exact = {name: f"=={pin}" for name, pin in SGLANG.items()}
        steps += [
            Step(
                f"sglang {SGLANG['sglang']}",
                lambda: _problems(exact),
                ("--no-deps", *(name + pin for name, pin in exact.items())),
            ),
            Step(
                "torchvision, in a folder for SGLang",
                missing_torchvision,
                ("--no-deps", "--upgrade", "--target", str(sglang_site()), f"torchvision=={TORCHVISION}", *index),
            ),
        ]
    return steps


def sglang_site() -> Path:
    """Return the folder that only SGLang's server has on its import path (engines/sglang/launch.py)."""
    return Path(sys.prefix) / "sglang-site"


def missing_torch(kind: str) -> list[str]:
    """Return what is wrong with the installed torch: missing, another version, or a build for the other kind."""
    if problems := _problems({"torch": f"=={TORCH}"}):
        return problems
    found = version("torch")
    if kind == "cuda" and found.endswith("+cpu"):
        return [f"torch: {found} is a build without CUDA (use a new environment)"]
    if kind == "cpu" and re.search(r"\+cu\d", found):
        return [f"torch: {found} is a build for CUDA (use a new environment)"]
    return []


def missing_project(extras: Sequence[str], source: Path | None, pins: dict[str, str]) -> list[str]:
    """Return what Penstock with `extras` lacks, and Penstock itself if it is not installed."""
    # Not on the whole import path: a checkout may have metadata of an earlier build.
    installed = source is None or find_distribution(PROJECT, site_packages()) is not None
    return ([] if installed else [f"{PROJECT}: not installed"]) + missing_requirements(extras, source, pins)


def missing_torchvision() -> list[str]:
    """Return what is wrong with the torchvision in SGLang's folder."""
    installed = find_distribution("torchvision", sglang_site())
    if installed is None or is_partly_installed(installed) or installed.version.partition("+")[0] != TORCHVISION:
        return [f"torchvision {TORCHVISION}: not in {sglang_site()}"]
    return []


def run_step(step: Step, log: Path) -> None:
    """Run a step with pip, again after a failure of the network, and check that it has installed everything.

    Packages that an interrupted installation left in part are installed again.

    Raises:
        InstallError: pip failed, or packages are still missing.
    """
    partly = [line.partition(":")[0] for line in step.missing() if "installed in part" in line]
    if partly and "--target" not in step.arguments:
        pinned = [f"{name}=={version(name)}" for name in partly]
        run_pip(("--no-deps", "--ignore-installed", *pinned), log)
    run_pip(step.arguments, log)
    if missing := step.missing():
        raise InstallError(f"pip has finished, but this is still missing: {'; '.join(missing[:5])}; its log is {log}")


def run_pip(arguments: Sequence[str], log: Path) -> None:
    """Run `pip install` with `arguments`, up to TRIES times while the network fails. Its output is appended to `log`.

    Downloads that were finished are in pip's cache, so a later try does not repeat them.

    Raises:
        InstallError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "install", *arguments]
    pause = FIRST_PAUSE
    for attempt in range(1, TRIES + 1):
        start = log.stat().st_size if log.exists() else 0
        code = _run_and_report([*command], log)
        output = log.read_bytes()[start:].decode(errors="replace")
        if code == 0:
            return
        reason = _last_error(output)
        if attempt == TRIES or not _NETWORK_ERROR.search(output):
            raise InstallError(
                f"pip failed: {reason}; its log is {log}. Finished downloads are kept: repeat the command"
            )
        print(
            f"\n    the network failed ({reason}); trying again in {pause:.0f} s ({attempt + 1} of {TRIES}) ...", end=""
        )
        sys.stdout.flush()
        time.sleep(pause)
        pause *= 2


def _run_and_report(command: list[str], log: Path) -> int:
    """Run a command, append its output to `log`, and print the log's last line now and then. Return the exit code."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**PIP_SETTINGS, **os.environ})
    try:
        while True:
            try:
                return process.wait(REPORT_INTERVAL)
            except subprocess.TimeoutExpired:
                lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
                print(f"\n    {next((line for line in reversed(lines) if line.strip()), '').strip()[:100]} ...", end="")
                sys.stdout.flush()
    except BaseException:  # Ctrl-C: pip does not continue alone
        process.terminate()
        process.wait()
        raise


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1][:160]


def _problems(specifiers: dict[str, str]) -> list[str]:
    found = [installation_problem(name, specifier) for name, specifier in specifiers.items()]
    return [problem for problem in found if problem]
