"""`penstock setup`: install in the active environment what the wheel of Penstock cannot install by itself.

A wheel can declare neither the order of installation nor packages to install without their dependencies. A machine
without CUDA needs both. torch is installed first and alone, from its CPU wheel, and then everything with ordinary
dependencies. Last come packages whose dependencies include CUDA builds; these are installed without dependencies.
torchvision must not be in site-packages, because its wheel from the package index is a CUDA build whose operators break
every model import of transformers. It gets a folder of its own that only SGLang's server has on its path. Each step
first checks which packages are installed, so the command continues where an interrupted one stopped.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import penstock
from penstock.flows.options.argv import penstock_command, short_repr, split_args
from penstock.storage.errors import InstallError, check_rules

PROJECT = "penstock-rl"
LOCKS = Path(penstock.__file__).parent / "environment" / "lock"

USAGE = """penstock setup [--cpu | --cuda] [--with EXTRAS] [--torch-index URL] [--check]

  Installs everything a run needs in the active Python environment, in the order that a machine with CUDA or without
  needs. Run it after `pip install --no-deps penstock-rl`; in a checkout it installs the checkout in editable mode.
  It continues after an interruption; finished steps are skipped, and pip repeats broken downloads.

  --cpu, --cuda   which engines to install; default: CUDA if nvidia-smi lists a GPU
  --with EXTRAS   optional parts, separated by commas; default s3,query. Names: s3, gs, az (stores), query
                  (penstock query), wandb, tensorboard, cluster (ray job submit), docs, test, dev
  --torch-index URL   package index for torch and torchvision only, such as PyTorch's index of CPU builds
  --check         print what is missing and install nothing; exit code 1 if something is"""

FLAGS = {"--cpu": False, "--cuda": False, "--with": True, "--torch-index": True, "--check": False}
DEFAULT_EXTRAS = "s3,query"
LOG = "setup.log"  # in sys.prefix
TORCH, TORCHVISION = "2.13.0", "0.28.0"
SGLANG = {  # installed without dependencies on machines without CUDA
    "sglang": "0.5.21",
    "xgrammar": "0.2.7",
    "apache-tvm-ffi": "0.1.11",
    "compressed-tensors": "0.18.0",
    "soundfile": "0.13.1",
}
PIP = "25.1"  # the first version that resumes an interrupted download
REPORT_INTERVAL = 30.0  # seconds between reports of a slow step
PIP_SETTINGS = {  # used unless the user has set them
    "PIP_RETRIES": "10",
    "PIP_RESUME_RETRIES": "50",
    "PIP_DEFAULT_TIMEOUT": "60",
    "PIP_PROGRESS_BAR": "off",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def main(argv: list[str]) -> int:
    """Run `penstock setup`. Return 0, or 1 if --check finds that something is missing."""
    positional, own, rest = split_args(argv, FLAGS)
    unknown = [*positional, *rest]
    rules = (
        (unknown, f"penstock setup does not take {short_repr(''.join(unknown[:1]))}: see penstock setup --help"),
        ("--cpu" in own and "--cuda" in own, "--cpu and --cuda cannot be combined: give one, or none to detect CUDA"),
    )
    check_rules(rules)
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
    """Run the steps that are not done, and check at the end that no step has replaced packages of an earlier step."""
    for step in steps:
        if not step.missing():
            print(f"  done before  {step.name}", flush=True)
            continue
        start = time.monotonic()
        print(f"  installing   {step.name} ...", end="", flush=True)
        try:
            run_step(step, log)
        except (KeyboardInterrupt, InstallError) as error:
            is_failure = isinstance(error, InstallError)
            print(" failed" if is_failure else " interrupted; the same command continues with this step", flush=True)
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
    """Return the extras that the value `text` of --with names. Raises OptionError for an unknown name."""
    try:
        known = declared(source)[1]
    except PackageNotFoundError as error:
        raise InstallError(
            f"penstock-rl is not installed in {sys.prefix}: run {sys.executable} -m pip install --no-deps penstock-rl"
        ) from error
    extras = [name.strip() for name in text.split(",") if name.strip()]
    choices = sorted(set(known) - {"cpu", "gpu"})
    problem = f"--with takes names of {', '.join(choices)}, separated by commas; found"
    check_rules((name not in choices, f"{problem} {short_repr(name)}") for name in extras)
    return extras


def has_cuda() -> bool:
    """Return whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


# ---- the steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call of pip."""

    name: str
    missing: Callable[[], list[str]]  # lines about the packages that the step has to install; [] if it is done
    arguments: tuple[str, ...]  # arguments of `pip install`


def installation_steps(kind: str, extras: Sequence[str], source: Path | None, torch_index: str | None) -> list[Step]:
    """Return the steps of an installation of `kind`, "cpu" or "cuda", with further extras of penstock-rl.

    Args:
        source: a checkout to install in editable mode; None keeps the installed wheel.
        torch_index: URL of the package index for torch and torchvision; None: pip's default index.
    """
    lock = lock_file(kind)
    if not lock.exists():
        found = ".".join(map(str, sys.version_info[:3]))
        raise InstallError(
            f"Python {found} found, Penstock needs 3.11 or 3.12: create the environment with one of them"
        )
    names = ("cpu" if kind == "cpu" else "gpu", *extras)
    if source is None:
        target = [f"{PROJECT}[{','.join(names)}]=={version(PROJECT)}"]
    else:
        target = ["--editable", f"{source}[{','.join(names)}]"]
    index = ("--index-url", torch_index) if torch_index else ()
    pins = read_lock(lock)

    def missing_project() -> list[str]:
        # Only site-packages is searched: a checkout on the import path may have metadata of an earlier build.
        installed = source is None or find_distribution(PROJECT, Path(sysconfig.get_path("purelib"))) is not None
        return ([] if installed else [f"{PROJECT}: not installed"]) + missing_requirements(names, source, pins)

    steps = [
        Step("pip", lambda: installation_problems({"pip": f">={PIP}"}), ("--upgrade", f"pip>={PIP}")),
        Step(f"torch {TORCH}", lambda: missing_torch(kind), (f"torch=={TORCH}", *index)),
        Step(
            f"penstock, ray, prefect, mlflow, megatron-core ({', '.join(names)})",
            missing_project,
            ("--constraint", str(lock), *target),
        ),
    ]
    if kind == "cpu":
        exact = {name: f"=={pin}" for name, pin in SGLANG.items()}
        steps += [
            Step(
                f"sglang {SGLANG['sglang']}",
                lambda: installation_problems(exact),
                ("--no-deps", *(name + pin for name, pin in exact.items())),
            ),
            Step(
                "torchvision, in a folder for SGLang",
                lambda: installation_problems({"torchvision": f"=={TORCHVISION}"}, sglang_site()),
                ("--no-deps", "--upgrade", "--target", str(sglang_site()), f"torchvision=={TORCHVISION}", *index),
            ),
        ]
    return steps


def sglang_site() -> Path:
    """Return the folder that only SGLang's server has on its import path (engines/sglang/launch.py)."""
    return Path(sys.prefix) / "sglang-site"


def missing_torch(kind: str) -> list[str]:
    """Return a line that says what is wrong with torch (missing, another version, or a build for the other `kind`); an
    empty list if nothing is."""
    problems = installation_problems({"torch": f"=={TORCH}"})
    found = "" if problems else version("torch")
    if kind == "cuda" and found.endswith("+cpu"):
        problems = [f"torch: {found} is a build without CUDA (use a new environment)"]
    elif kind == "cpu" and re.search(r"\+cu\d", found):
        problems = [f"torch: {found} is a build for CUDA (use a new environment)"]
    return problems


def run_step(step: Step, log: Path) -> None:
    """Run a step with pip, and check that it has installed everything. Packages of which an interrupted installation
    has written only some files are installed again first."""
    partly = [line.partition(":")[0] for line in step.missing() if "installed in part" in line]
    if partly and "--target" not in step.arguments:
        pinned = [f"{name}=={version(name)}" for name in partly]
        run_pip(("--no-deps", "--ignore-installed", *pinned), log)
    run_pip(step.arguments, log)
    if missing := step.missing():
        raise InstallError(
            f"pip has finished, but these are still missing: {'; '.join(missing[:5])}; see its log {log}"
        )


def run_pip(arguments: Sequence[str], log: Path) -> None:
    """Run `pip install` with `arguments`. Append its output to `log`, and print every REPORT_INTERVAL seconds what it
    does and for how long."""
    command = [sys.executable, "-m", "pip", "install", *arguments]
    with log.open("ab") as out:
        start, began = out.tell(), time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**PIP_SETTINGS, **os.environ})
    try:
        while process.poll() is None:
            try:
                process.wait(REPORT_INTERVAL)
            except subprocess.TimeoutExpired:
                progress = describe_progress(_printed_lines(log, start))
                print(f"\n    {progress}, {time.monotonic() - began:.0f} s ...", end="", flush=True)
    except BaseException:  # Ctrl-C: stop pip, too
        process.terminate()
        process.wait()
        raise
    importlib.invalidate_caches()
    if process.returncode:
        lines = _printed_lines(log, start)
        reason = ([line for line in lines if line.lower().startswith("error")] or lines)[-1][:160]
        raise InstallError(f"pip failed: {reason}; see its log {log}. Finished downloads are kept: repeat the command")


def describe_progress(lines: Sequence[str]) -> str:
    """Return what pip does, from the lines of its log. The last line is often of no use: pip writes nothing while it
    installs files, for minutes."""
    for line in reversed(lines):
        if line.startswith("Installing collected packages: "):
            return f"installing {line.count(',') + 1} packages, which takes minutes"
        if line.startswith("WARNING: ") and re.search("[Rr]etrying|resume", line):
            return line.removeprefix("WARNING: ")[:100]
        if line.startswith(("Collecting ", "Downloading ", "Using cached ", "Processing ", "Building ")):
            return line[0].lower() + line[1:100]
    return "pip is starting"


def _printed_lines(log: Path, start: int) -> list[str]:
    """Return the lines of a log after position `start` that are not empty; ["no output"] if there are none."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()] or ["no output"]


# ---- what is installed -----------------------------------------------------------------------------------------------
#
# These functions work in an environment that has pip but none of Penstock's dependencies.


def lock_file(kind: str) -> Path:
    """Return the lock file for this Python version and `kind`, "cpu" or "cuda"."""
    return LOCKS / f"{kind}-py{sys.version_info.major}.{sys.version_info.minor}.txt"


def read_lock(path: Path) -> dict[str, str]:
    """Return the pinned versions of a lock file: normalized package name -> version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {normalize(name): version for name, version in pins}


def checkout() -> Path | None:
    """Return the checkout that this module belongs to; None in an installed wheel."""
    root = Path(penstock.__file__).resolve().parents[1]
    project = root / "pyproject.toml"  # some packages wrongly install a pyproject.toml into site-packages
    return root if project.is_file() and f'name = "{PROJECT}"' in project.read_text(encoding="utf-8") else None


def declared(source: Path | None) -> tuple[list[str], dict[str, list[str]]]:
    """Return Penstock's requirements, and extra -> requirements of the extra. They are read from the checkout `source`
    or, if it is None, from the installed wheel."""
    if source is not None:
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["dependencies"], project["optional-dependencies"]
    installed = distribution(PROJECT)
    base: list[str] = []
    extras: dict[str, list[str]] = {name: [] for name in installed.metadata.get_all("Provides-Extra") or []}
    for line in installed.requires or []:
        text, _, marker = line.partition(";")
        named = re.search(r"""extra == ["']([^"']+)["']""", marker)
        (extras[named[1]] if named else base).append(text.strip())
    return base, extras


def missing_requirements(extras: Sequence[str], source: Path | None, pins: Mapping[str, str]) -> list[str]:
    """Return one line for each package that Penstock with `extras` needs, directly or as a dependency, and that is not
    installed, is installed only in part, or has another version than required or pinned (`pins`: package ->
    version)."""
    base, of_extra = declared(source)
    lines: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    pending = [_requirement(text) for text in base] + [_requirement(f"{PROJECT}[{','.join(extras)}]")]
    while pending:
        requirement = pending.pop()
        name = normalize(requirement.name)
        if name == PROJECT:
            new = [extra for extra in requirement.extras if (name, extra) not in visited]
            visited.update((name, extra) for extra in new)
            pending += [_requirement(text) for extra in new for text in of_extra[extra]]
            continue
        problems = installation_problems({name: str(requirement.specifier)})
        if not problems and name in pins and (found := version(name)).partition("+")[0] != pins[name]:
            problems = [f"{name}: {found} found, {pins[name]} in the lock file"]
        if problems:
            lines[name] = problems[0]
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in visited:
                visited.add((name, extra))
                needed = [_requirement(text) for text in distribution(name).requires or []]
                pending += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return sorted(lines.values())


def installation_problems(specifiers: Mapping[str, str], folder: Path | None = None) -> list[str]:
    """Return one line for each package that is not installed as required, such as "ray: not installed". `specifiers`:
    package -> required versions, ">=2.60,<3" or "" for any; `folder`: where they are looked up, by default on the
    import path."""
    problems = []
    for name, specifier in specifiers.items():
        installed = find_distribution(name, folder)
        if installed is None:
            problems.append(f"{name}: not installed")
        elif installed.read_text("INSTALLER") is None:  # an installer writes this file last
            problems.append(f"{name}: installed in part (the installation was interrupted)")
        elif not _requirement(f"{name}{specifier}").specifier.contains(installed.version, prereleases=True):
            problems.append(f"{name}: {installed.version} found, {specifier} needed")
    return problems


def find_distribution(name: str, folder: Path | None = None) -> Distribution | None:
    """Return the installed package `name`, looked up in `folder` (None: on the import path); None if there is none."""
    path = sys.path if folder is None else [str(folder)]
    return next(iter(Distribution.discover(name=name, path=path)), None)


def normalize(name: str) -> str:
    """Return a package name as package indexes spell it: `PyYAML` -> `pyyaml`, `ruamel.yaml` -> `ruamel-yaml`."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _requirement(text: str) -> Any:
    """Parse a requirement with `packaging`, or with the copy of it in pip, which a new virtual environment has."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment, unused-ignore]
    return Requirement(text)
