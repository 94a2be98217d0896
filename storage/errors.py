"""Every error that Penstock raises on purpose, rooted in one class. Each class has a stable `code` that tests and scripts can check.

A message is one sentence: what was found, what is needed, what to do. Wording may change; codes do not.
"""

from __future__ import annotations

from storage.secrets import redact


class PenstockError(Exception):
    """Root of all errors that Penstock raises on purpose. Credentials are removed from the message."""

    code = "penstock"

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(PenstockError, ValueError):
    """The request cannot be carried out as it was made; nothing expensive has started. The command ends with exit code 2.

    A `ValueError` too, so pydantic validators may raise it.
    """

    code = "input"


class OptionError(InputError):
    """A flag, a TOML file or a config value: unknown, malformed, out of range, or contradicting another one."""

    code = "option"


class DataError(InputError):
    """Prompt or evaluation data: missing files, broken rows, missing columns or labels."""

    code = "data"


class TemplateError(DataError):
    """A chat template that is missing, fails, or exceeds its limits."""

    code = "template"


class ModelError(InputError):
    """A checkpoint directory: config.json, weights, tokenizer."""

    code = "model"


class LayoutError(InputError):
    """A model cannot be sharded with the requested parallel sizes."""

    code = "layout"


class RewardError(InputError):
    """A reward that is missing, unknown, or cannot grade the given data."""

    code = "reward"


class PluginError(InputError):
    """A user-defined function: not found, wrong signature, or not allowed."""

    code = "plugin"


class EngineError(InputError):
    """Options or addresses of SGLang or its router, or an architecture that the engine cannot serve."""

    code = "engine"


class RunError(InputError):
    """A run's name or record: unknown, taken, damaged, or started with other options."""

    code = "run"


class StoreError(PenstockError, RuntimeError):
    """The store: not reachable, not writable, full, or a file that is not what was committed."""

    code = "store"


class StoreFull(StoreError):
    """A disk has no room left: ENOSPC or EDQUOT. Retrying can help once somebody has made room."""

    code = "store-full"
