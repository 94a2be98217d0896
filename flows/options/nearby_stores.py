"""Find the stores around the working directory, for commands that are called without --store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.storage.commit import RunKeys

MAX_DEPTH = 3  # levels of directories below the working directory
MAX_DIRECTORIES = 5000  # that are searched
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}


def find_nearby_stores(directory: Path | None = None) -> list[str]:
    """Return the paths of the store that contains a directory (default: the working directory) and of the stores below
    it. Stores below it have paths relative to the directory. Hidden directories and symbolic links are skipped, and
    upper levels are searched first."""
    start = (directory or Path.cwd()).absolute()
    stores: list[Path] = []
    level, num_searched = [start], 0
    for depth in range(MAX_DEPTH + 1):
        level = level[: MAX_DIRECTORIES - num_searched]
        num_searched += len(level)
        of_level = [path for path in level if _is_store(path)]
        stores += of_level
        if depth < MAX_DEPTH:
            level = [
                child for path in level if path == start or path not in of_level for child in _subdirectories(path)
            ]
    around = [path for path in start.parents if _is_store(path)][:1]
    found = around + sorted(stores)
    return [os.path.relpath(path, start) if path.is_relative_to(start) else str(path) for path in found]


def names_no_store(argv: Sequence[str]) -> bool:
    """Return whether a command line has none of the flags that say where the store is."""
    return not {argument.partition("=")[0].replace("_", "-") for argument in argv} & {"--store", "--config", "--save"}


def stores_with_run(run: str) -> list[str]:
    """Return the paths of the stores around the working directory that have a run named `run`."""
    return [store for store in find_nearby_stores() if (Path(store) / RunKeys(run).record).is_file()]


def _subdirectories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not readable
        return []
    return [path / name for name in sorted(names) if name[0] != "." and name not in _SKIPPED]


def _is_store(path: Path) -> bool:
    """Return whether a directory has the record of a run."""
    try:
        return any((run / "run.json").is_file() for run in _subdirectories(path / "runs"))
    except OSError:
        return False
