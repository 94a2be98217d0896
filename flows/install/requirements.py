"""Compare the packages of the running Python with what Penstock declares and what its lock file pins.

Everything here works in an environment that has pip but none of Penstock's dependencies, since `penstock setup` runs
there.
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import penstock

PROJECT = "penstock-rl"
LOCKS = Path(penstock.__file__).parent / "environment" / "lock"


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
    project = root / "pyproject.toml"  # careless packages put theirs into site-packages
    return root if project.is_file() and f'name = "{PROJECT}"' in project.read_text(encoding="utf-8") else None


def declared(source: Path | None) -> tuple[list[str], dict[str, list[str]]]:
    """Return Penstock's requirements and those of its extras, as text.

    Args:
        source: a checkout, whose pyproject.toml is read; None reads the metadata of the installed wheel.
    """
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
    """Return one line for each package that Penstock with `extras` needs, directly or not, and that is not installed,
    installed in part, or in another version than required or pinned."""
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
        if problem := installation_problem(name, str(requirement.specifier), pins.get(name)):
            lines[name] = problem
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in visited:
                visited.add((name, extra))
                needed = [_requirement(text) for text in distribution(name).requires or []]
                pending += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return sorted(lines.values())


def installation_problem(name: str, specifier: str, pin: str | None = None) -> str:
    """Return how the installation of a package differs from what is needed ("ray: not installed"); "" if it does not.

    Args:
        name: the package.
        specifier: required versions (">=2.60,<3"); "" for any.
        pin: the version in the lock file, if it has one.
    """
    installed = find_distribution(name)
    if installed is None:
        return f"{name}: not installed"
    if is_partly_installed(installed):
        return f"{name}: installed in part (the installation was interrupted)"
    if not _requirement(f"{name}{specifier}").specifier.contains(installed.version, prereleases=True):
        return f"{name}: {installed.version} found, {specifier} needed"
    if pin is not None and installed.version.partition("+")[0] != pin:
        return f"{name}: {installed.version} found, {pin} in the lock file"
    return ""


def find_distribution(name: str, folder: Path | None = None) -> Distribution | None:
    """Return the installed package `name`, in `folder` or on the import path; None if it is not there."""
    if folder is not None:
        return next(iter(Distribution.discover(name=name, path=[str(folder)])), None)
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def is_partly_installed(installed: Distribution) -> bool:
    """Return whether the installation of a package was killed: installers write the file INSTALLER after all others."""
    return installed.read_text("INSTALLER") is None


def normalize(name: str) -> str:
    """Return a package name as package indexes spell it: `PyYAML` -> `pyyaml`, `ruamel.yaml` -> `ruamel-yaml`."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _requirement(text: str) -> Any:
    """Parse a requirement with `packaging`; a new virtual environment only has pip's copy of it."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment, unused-ignore]
    return Requirement(text)
