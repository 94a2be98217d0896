"""Read and write files of torch.save that other tools read: debug dumps of rollouts and training data.

A path may have placeholders (`{rollout_id}`), so that every round has its own file. Files are written to a temporary
name and renamed, so a reader never sees an incomplete file.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.storage.errors import DataError

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def template_rules(
    flag: str, template: str, allowed: tuple[str, ...], required: tuple[str, ...]
) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each rule about a path with placeholders.

    Args:
        flag: option that names the path, for error messages.
        template: the path.
        allowed: names of placeholders that may occur.
        required: names of placeholders that must occur, because a file would otherwise replace another.
    """
    found, option = _PLACEHOLDER.findall(template), f"{flag} {template}"
    known = ", ".join(f"{{{name}}}" for name in allowed)
    yield "://" in template, f"{option} is a URI: give a local path"
    for name in found:
        yield name not in allowed, f"{option} has the placeholder {{{name}}}: use {known}, without a format"
    for name in required:
        yield name not in found, f"{option} has no {{{name}}}, so that every file would replace the one before: add it"


def fill_template(template: str, **values: object) -> Path:
    """Return the path `template` with its placeholders replaced: `{rollout_id}` by `values["rollout_id"]`."""
    return Path(_PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)).expanduser()


def save_torch_file(path: Path, data: Any) -> None:
    """Write `data` with torch.save, atomically; missing directories are created. Raises OSError."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            torch.save(data, temporary)
        except RuntimeError as error:  # torch does not raise OSError if the disk is full
            raise OSError(f"{path} cannot be written: {error}") from error
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_torch_file(path: Path) -> Any:
    """Return the content of a file of torch.save. Only tensors, numbers, text, lists and dicts are unpickled, so the
    file cannot run code. Raises DataError."""
    import torch

    problem = "does not exist: correct the path, or write it with --save-debug-rollout-data"
    if path.is_file():
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many classes for damaged files
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            content = "only tensors, numbers, text, lists and dictionaries"
            problem = f"cannot be read ({reason}): give a file of torch.save with {content}"
    raise DataError(f"{path} {problem}")
