"""The base of every stage's configuration.

The flag of a field is its name with dashes: `rollout_batch_size` is `--rollout-batch-size` on the command line and
`rollout_batch_size` under `[rollout]` in TOML. The docstring below a field is its help text.

A field whose type is another config is a section within the section: `lora` of the trainer is `[train.lora]`, and its
options are flags as well. A flag of an optional section creates it, so there are no options without their section.

The mutability of a field determines whether a resumed run may change it:

    identity    model, seed, data, algorithm: cannot change; fork the run instead. Exception: Megatron options
                that do not change results (`options_by_mutability` in flows/config.py)
    schedule    number of rounds, intervals of checkpoints and evaluations: may change; the change is recorded
    placement   GPUs, engines, threads, time limits: may change; results differ only by floating-point rounding
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from penstock.storage.errors import check_rules

Mutability = Literal["identity", "schedule", "placement"]


class FieldMeta(NamedTuple):
    """The metadata that `option` attaches to a config field."""

    mutability: Mutability
    aliases: list[str]
    secret: bool


class StageConfig(BaseModel):
    """Base class of the stage configs: unknown keys are errors, field docstrings are the help text of the flags."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield (is violated, error message) for each rule about several options."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> StageConfig:
        check_rules(self.rules())
        return self


def option(
    default: Any = ...,
    *,
    mutability: Mutability = "identity",
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    **constraints: Any,
) -> Any:
    """Return a pydantic field for a stage's config, with mutability, flag aliases and secrecy as metadata.

    Args:
        default: the default value; `...` makes the field required, unless `constraints` has a `default_factory`.
        mutability: whether a resumed run may change the field (see the module's docstring).
        aliases: further flag spellings without leading dashes, e.g. `("prompt-key",)`.
        secret: the value may contain a secret (storage/secrets.py), for instance a URL with a password or a table with
            an API key. Not allowed for identity fields.
        constraints: arguments of `pydantic.Field` (`ge`, `gt`, `le`, `default_factory`, ...).
    """
    assert not (secret and mutability == "identity"), (
        'a field with mutability "identity" cannot be secret: its recorded value is hashed and compared on resume'
    )
    # In the JSON schema of a Prefect deployment, the key "change" says whether the option may change.
    extra: dict[str, Any] = {"change": mutability, "aliases": list(aliases), "secret": secret}
    return Field(default, json_schema_extra=extra, **constraints)


def field_meta(field: FieldInfo) -> FieldMeta:
    """Return the metadata that `option` attached to a field, or the default metadata for any other field."""
    extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return FieldMeta(extra.get("change", "identity"), extra.get("aliases", []), extra.get("secret", False))


def section_model(field: FieldInfo) -> type[StageConfig] | None:
    """Return the config class of a field that is a section, also an optional one; None if the field is an option."""
    for kind in typing.get_args(field.annotation) or [field.annotation]:
        if isinstance(kind, type) and issubclass(kind, StageConfig):
            return kind
    return None


def entries_of(values: Any, section: str) -> dict[str, Any]:
    """Return a section (such as `train.lora`) of a config's values; {} if it is absent or not a table."""
    for part in section.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}
