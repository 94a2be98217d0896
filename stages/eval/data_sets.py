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

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
    """The file at `path`. Raises ValueError with one sentence for the first thing wrong with it."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("this file does not exist: give a TOML file with [[datasets]]") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"no TOML file can be read there: {error}") from None
    return eval_file(values)


def eval_file(values: dict[str, Any]) -> EvalFile:
    """The content of such a file, checked. Raises ValueError with one sentence for the first thing wrong."""
    _check_keys("the file", values, ["defaults", "datasets"])
    defaults, data_sets = values.get("defaults", {}), values.get("datasets", [])
    if not isinstance(defaults, dict):
        raise ValueError("the defaults are no table: write [defaults], and below it setting = value")
    if not (isinstance(data_sets, list) and data_sets and all(isinstance(one, dict) for one in data_sets)):
        raise ValueError("there are no data sets in it: write [[datasets]] with name and path, one for each")
    _check_keys("[defaults]", defaults, list(DataSetSettings.model_fields))
    for number, one in enumerate(data_sets, start=1):
        where = f"data set {one.get('name', number)}"
        _check_keys(where, one, list(DataSet.model_fields))
        if missing := {"name", "path"} - one.keys():
            raise ValueError(f"{where} has no {min(missing)}: every [[datasets]] needs a name and a path")
    try:
        file = EvalFile.model_validate(values)
    except ValidationError as error:
        raise ValueError(_sentence(error, data_sets)) from None
    check_names([one.name for one in file.datasets])
    return file


def check_names(names: list[str]) -> None:
    """Every name can name a data set, and names one. Raises ValueError."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a data set: use letters, digits, dot, dash and underscore")
        if names.count(name) > 1:
            raise ValueError(f"two data sets are named {name}: give each its own name")


def _check_keys(where: str, values: dict[str, Any], known: list[str]) -> None:
    if unknown := next((key for key in values if key not in known), None):
        near = [key for key in known if unknown in key] or difflib.get_close_matches(unknown, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(known)}"
        raise ValueError(f"{where} has {unknown!r}, which means nothing here: {hint}")


def _sentence(error: ValidationError, data_sets: list[dict[str, Any]]) -> str:
    first = error.errors()[0]
    section, *rest = first["loc"]
    where = "[defaults]" if section == "defaults" else f"data set {data_sets[int(rest[0])]['name']}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} has {rest[-1]} = {first.get('input')!r}: {message[0].lower()}{message[1:]}"
