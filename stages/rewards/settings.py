"""Define the settings of grading, and select the reward that grades a sample.

The reward of a sample is named by the first of these that is set: `custom_rm_path` in the row's metadata,
--custom-rm-path, `rm_type` in the row's metadata, --rm-type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?::[A-Za-z_]\w*)?")


class RewardOptions(Protocol):
    """Configuration fields that determine how samples are graded."""

    rm_type: str | None
    custom_rm_path: str | None
    reward_key: str | None
    reward_timeout: float
    reward_start_timeout: float
    group_rm: bool
    rm_url: str | None
    rm_model_path: str | None
    allow_row_code: str | None
    rm_evaluated_integers: bool


@dataclass(frozen=True)
class RewardSettings:
    """How samples are graded; every grading process receives these settings when it starts."""

    rm_type: str | None = None  # name of the built-in reward; a sample's metadata overrides it
    custom_rm_path: str | None = None  # user-defined function or class; takes precedence over built-in rewards
    reward_key: str | None = None  # key of the reward, if the reward function returns a dictionary
    timeout: float = 30.0  # seconds per sample
    start_timeout: float = 300.0  # seconds to import the reward and construct its class in a grading process
    group_rm: bool = False  # the function at custom_rm_path takes all samples of a prompt
    rm_url: str | None = None  # server of remote_rm
    rm_model_path: str | None = None  # constructor argument of a class at custom_rm_path
    arguments: dict[str, Any] = field(default_factory=dict)  # attributes of the `args` of a user-defined function
    allow_row_code: str | None = None  # package whose functions rows may name as rewards; None: rows may name none
    evaluated_integers: bool = False  # `math` and `deepscaler`: an integer label requires a number as the answer
    required_package: str | None = None  # package that must define the function at custom_rm_path

    @classmethod
    def from_options(cls, options: RewardOptions, arguments: dict[str, Any] | None = None) -> RewardSettings:
        """Return the settings that `options` (a rollout's configuration) define. `arguments`: attributes of the `args`
        of user-defined functions."""
        return cls(
            rm_type=options.rm_type,
            custom_rm_path=options.custom_rm_path,
            reward_key=options.reward_key,
            timeout=options.reward_timeout,
            start_timeout=options.reward_start_timeout,
            group_rm=options.group_rm,
            rm_url=options.rm_url,
            rm_model_path=options.rm_model_path,
            arguments=arguments or {},
            allow_row_code=options.allow_row_code,
            evaluated_integers=options.rm_evaluated_integers,
        )


def builtin_reward_name(metadata: Mapping[str, Any], rm_type: str | None) -> str | None:
    """Return the name of the built-in reward that grades a row: `rm_type` in the row's metadata, else --rm-type."""
    return str(metadata.get("rm_type") or "").strip() or rm_type


def row_reward_path(metadata: Mapping[str, Any], allowed: str | None) -> str | None:
    """Return the path of the user-defined reward that a row's metadata names (`custom_rm_path`), or None.

    Raises:
        PluginError: rows may not name rewards (`allowed` is None), or the path is not inside the package `allowed`.
    """
    path = metadata.get("custom_rm_path")
    if not path:
        return None
    if allowed is None:
        raise PluginError(
            f"a row's metadata names code to import, custom_rm_path {path!r:.100}, which is off by default: if you "
            "trust the data, give --allow-row-code PACKAGE, else remove custom_rm_path from the metadata"
        )
    prefixes = (f"{allowed}.", f"{allowed}:")
    if not isinstance(path, str) or not _DOTTED_PATH.fullmatch(path) or not path.startswith(prefixes):
        raise PluginError(
            f"a row's custom_rm_path {path!r:.100} is not inside --allow-row-code {allowed}: "
            f"write {allowed}.module:name"
        )
    return path


def custom_reward_path(sample: Sample, settings: RewardSettings) -> str | None:
    """Return the path of the user-defined reward that grades a sample: `custom_rm_path` in the sample's metadata, else
    --custom-rm-path (or None).

    Raises:
        PluginError: --allow-row-code does not allow the path in the metadata.
    """
    return row_reward_path(sample.metadata, settings.allow_row_code) or settings.custom_rm_path
