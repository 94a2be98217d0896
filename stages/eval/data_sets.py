"""The file of --eval-config: data sets, each with settings of its own, and defaults for all of them.

What a set does not say is as the file's defaults say, then as the --eval-* flags, then as in the rollout (config.py puts them
together). A run keeps the content of the file, not its path: it goes on the same on another machine.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from storage.config import StageConfig
from storage.errors import OptionError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_NAME = 100  # characters: a name is part of file names, which have at most 255 bytes
_MAX_BYTES = 4 << 20


class DataSetSettings(StageConfig):
    """How a data set is sampled and scored; None is what somebody else says."""

    n_samples_per_eval_prompt: int | None = Field(default=None, ge=1)
    """Responses per prompt."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, 0 is greedy."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus size."""

    top_k: int | None = Field(default=None, ge=-1)
    """Number of tokens to sample from; -1 takes all."""

    max_response_len: int | None = Field(default=None, ge=1)
    """Most tokens of a response."""

    input_key: str | None = None
    """Column with the prompt."""

    label_key: str | None = None
    """Column with the label."""

    metadata_key: str | None = None
    """Column with the metadata."""

    tool_key: str | None = None
    """Column with tool definitions."""

    rm_type: str | None = None
    """Built-in reward."""

    reward_key: str | None = None
    """Which entry is the reward when it is a dictionary."""

    pass_threshold: float | None = None
    """A response passes if its reward is at least this."""


class DataSet(DataSetSettings):
    """One [[datasets]] of the file."""

    name: str
    path: str


class EvalFile(StageConfig):
    """The content of the file."""

    defaults: DataSetSettings = DataSetSettings()
    datasets: list[DataSet] = Field(default_factory=list)

    def settings(self, name: str) -> dict[str, Any]:
        """What the file says about a data set; nothing if it does not know it."""
        for data_set in self.datasets:
            if data_set.name == name:
                said = data_set.model_dump(exclude={"name", "path"}, exclude_none=True)
                return self.defaults.model_dump(exclude_none=True) | said
        return {}


def read_eval_file(path: str) -> EvalFile:
    """The file at `path`. Raises OptionError with one sentence for the first thing wrong with it."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise OptionError(f"this file is larger than {_MAX_BYTES} bytes: give a TOML file with [[datasets]]")
        values = tomllib.loads(data.decode("utf-8").replace("\r\n", "\n"))
    except FileNotFoundError:
        raise OptionError("this file does not exist: give a TOML file with [[datasets]]") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"this file is not TOML ({type(error).__name__}: {error}): correct it") from None
    except OSError as error:
        raise OptionError(f"this file cannot be read ({error.strerror}): give a TOML file with [[datasets]]") from None
    return eval_file(values)


def eval_file(values: dict[str, Any]) -> EvalFile:
    """The content of such a file, checked. Raises OptionError with one sentence for the first thing wrong."""
    _check_keys("the file", values, ["defaults", "datasets"])
    defaults, data_sets = values.get("defaults", {}), values.get("datasets", [])
    if not isinstance(defaults, dict):
        raise OptionError("defaults is not a table: write [defaults], and below it setting = value")
    if not (isinstance(data_sets, list) and data_sets and all(isinstance(one, dict) for one in data_sets)):
        raise OptionError("the file has no data sets: write [[datasets]] with name and path, once for each")
    _check_keys("[defaults]", defaults, list(DataSetSettings.model_fields))
    _check_kinds("[defaults]", defaults)
    for number, one in enumerate(data_sets, start=1):
        where = f"data set {str(one.get('name', number))[:60]}"
        _check_keys(where, one, list(DataSet.model_fields))
        _check_kinds(where, one)
        if missing := {"name", "path"} - one.keys():
            raise OptionError(f"{where} has no {min(missing)}: every [[datasets]] needs a name and a path")
    try:
        file = EvalFile.model_validate(values)
    except ValidationError as error:
        raise OptionError(_sentence(error, data_sets)) from None
    check_names([one.name for one in file.datasets])
    return file


def check_names(names: list[str]) -> None:
    """Every name can name a data set, and names one. Raises OptionError."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise OptionError(f"{name[:60]!r} cannot name a data set: use letters, digits, dot, dash and underscore")
        if len(name) > _MAX_NAME:
            raise OptionError(f"data set {name[:60]}... has a name of {len(name)} characters: use at most {_MAX_NAME}")
        if names.count(name) > 1:
            raise OptionError(f"two data sets are named {name}: give each its own name")


def _check_keys(where: str, values: dict[str, Any], known: list[str]) -> None:
    if unknown := next((key for key in values if key not in known), None):
        near = [key for key in known if unknown in key] or difflib.get_close_matches(unknown, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(known)}"
        raise OptionError(f"{where} has the unknown setting {unknown[:60]!r}: {hint}")


def _check_kinds(where: str, values: dict[str, Any]) -> None:
    """Refuse what pydantic would convert (a switch for a number) and empty text. Raises OptionError."""
    for name, value in values.items():
        if isinstance(value, bool):
            raise OptionError(f"{where} has {name} = {str(value).lower()}: it takes no switch, give a number or text")
        if value == "":
            raise OptionError(f"{where} has {name} = '': give a value, or leave it out")


def _sentence(error: ValidationError, data_sets: list[dict[str, Any]]) -> str:
    first = error.errors()[0]
    section, *rest = first["loc"]
    where = "[defaults]" if section == "defaults" else f"data set {str(data_sets[int(rest[0])]['name'])[:60]}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} has {rest[-1]} = {repr(first.get('input'))[:80]}: {message[0].lower()}{message[1:]}"
