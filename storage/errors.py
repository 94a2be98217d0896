"""Errors that Penstock raises on purpose. Each class has a stable `code` for tests and scripts; messages may change.

A message is one sentence: the problem found, the requirement, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from penstock.storage.secrets import redact

NEAR = 0.8  # lowest similarity (difflib's ratio) at which a name is suggested


class PenstockError(Exception):
    """Root of all errors that Penstock raises on purpose. Credentials are removed from the message."""

    code = "penstock"

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(PenstockError, ValueError):
    """The command, its options or its input files are invalid. The command exits with code 2. Also a `ValueError`, so
    that pydantic validators may raise it."""

    code = "input"


class OptionError(InputError):
    """A flag, TOML key or config value is unknown, malformed, out of range, or conflicts with another option."""

    code = "option"


class InstallError(InputError):
    """The Python environment is incomplete or not suitable, or an installation step failed."""

    code = "install"


class DataError(InputError):
    """A file of prompt or evaluation data is missing, or has malformed rows, missing columns or missing labels."""

    code = "data"


class TemplateError(DataError):
    """A chat template is missing or fails, or rendering it exceeds the time, memory or output limit."""

    code = "template"


class ModelError(InputError):
    """A model directory has a missing, malformed or unsupported config.json, weight file or tokenizer."""

    code = "model"


class LayoutError(InputError):
    """A model cannot be sharded with the requested parallel sizes."""

    code = "layout"


class RewardError(InputError):
    """A reward function is missing, unknown, or cannot grade the given data."""

    code = "reward"


class PluginError(InputError):
    """A user-defined function is not found, has a wrong signature, is not allowed, or returns an invalid result."""

    code = "plugin"


class EngineError(InputError):
    """An option or address of an engine or its router is invalid, or the engine cannot serve the model."""

    code = "engine"


class RunError(InputError):
    """A run is unknown or in use, its record is damaged, or its recorded options differ from the given ones."""

    code = "run"


class PromotionRefused(PenstockError, ValueError):
    """A policy does not meet the conditions of its promotion. A `ValueError`, so the stage is not retried."""

    code = "promotion"


class GateFailed(PenstockError, ValueError):
    """A metric violates a gate of --ci-test or --ci-load-grad-norm. A `ValueError`, so the stage is not retried."""

    code = "gate"


class WeightMismatch(PenstockError, ValueError):
    """A weight tensor of an engine differs from the trainer's. A `ValueError`, so the stage is not retried."""

    code = "weights"


class StoreError(PenstockError, RuntimeError):
    """The store is unreachable, not writable or full, or a file in it differs from its commit record."""

    code = "store"


class TrackerError(PenstockError, RuntimeError):
    """An experiment tracker is not available, or failed when `penstock report --to` sent a run to it."""

    code = "tracker"


class StoreFull(StoreError):
    """A disk or quota is full (ENOSPC or EDQUOT). Retry after freeing space."""

    code = "store-full"


def check_rules(rules: Iterable[tuple[object, str]], error: type[PenstockError] = OptionError) -> None:
    """Raise `error` with the message of the first violated rule, given as (is violated, error message)."""
    for is_violated, message in rules:
        if is_violated:
            raise error(message)


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to the misspelled `word`, or that has the same letters in another
    order. Otherwise return the name that continues `word` after a dash or underscore (`lr-decay` -> `lr-decay-style`)
    if there is exactly one, else None."""
    names, text = list(known), word[:64]
    near = difflib.get_close_matches(text, names, n=1, cutoff=NEAR)
    near = near or [name for name in names if sorted(name) == sorted(text)]
    longer = [name for name in names if name.startswith((f"{text}-", f"{text}_"))]
    if near:
        return near[0]
    return longer[0] if len(longer) == 1 else None
