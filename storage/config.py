"""The base of every stage's configuration.

A field is a sentence: type, bound, default, and one line of docstring in the reader's words. Field names are the flag names
(`rollout_batch_size` is `--rollout-batch-size` and `[rollout] rollout_batch_size` in TOML), so no name stands twice.

Each field also says what a resumed run may do with it:

    identity    model, seed, data, algorithm: a run keeps them for life; to change one, fork the run
    schedule    how long and how often: may change, and the change is recorded
    placement   GPUs, engines, threads, time limits: free, no result depends on it (bit for bit only under equal placement)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Change = Literal["identity", "schedule", "placement"]


class StageConfig(BaseModel):
    """Base of the per-stage models: unknown keys are errors, attribute docstrings are the help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


def option(
    default: Any = ..., *, change: Change = "identity", aliases: tuple[str, ...] = (), secret: bool = False, **constraints: Any
) -> Any:
    """A config field.

    Args:
        default: the value when nobody says anything; `...` makes it required.
        change: what a resumed run may do with the field (see the module's docstring).
        aliases: further flag spellings without dashes in front, e.g. `("prompt-key",)`.
        secret: may hold a secret (storage/secrets.py): a URL with a password, or a table with a key in it. Not of an identity.
        constraints: pydantic's own (`ge`, `gt`, `le`, `default_factory`, ...).
    """
    assert not (secret and change == "identity"), "a run's identity is compared and hashed as it is recorded"
    extra: dict[str, Any] = {"change": change, "aliases": list(aliases), "secret": secret}
    if "default_factory" in constraints:
        return Field(json_schema_extra=extra, **constraints)
    return Field(default, json_schema_extra=extra, **constraints)


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """The `change`, `aliases` and `secret` of a field made by `option` (defaults for any other field)."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return {"change": extra.get("change", "identity"), "aliases": extra.get("aliases", []), "secret": extra.get("secret", False)}
