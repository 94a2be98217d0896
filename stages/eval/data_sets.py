"""The file of --eval-config: data sets with their settings, and defaults for all of them.

A setting that a data set lacks comes from the file's defaults, then from the --eval-* flags, then from the rollout
(config.py merges them). A run records the content of the file instead of its path, so it can resume on another machine.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from penstock.storage.commit import JOURNAL, commit_key
from penstock.storage.config import StageConfig
from penstock.storage.disk import read_file
from penstock.storage.errors import OptionError, check_rules

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # part of file names, which have at most 255 bytes
_MAX_BYTES = 4 << 20
MAX_YAML_VALUES = 100_000
_YAML = (".yaml", ".yml", ".json")  # endings of names; JSON is YAML


class DataSetSettings(BaseModel):
    """Sampling and scoring settings of a data set. None: use the value in the file's [defaults], else that of the
    --eval-* flag, else that of the rollout's option."""

    model_config = StageConfig.model_config

    n_samples_per_eval_prompt: int | None = Field(default=None, ge=1)  # responses per prompt
    temperature: float | None = Field(default=None, ge=0)  # sampling temperature, 0 is greedy
    top_p: float | None = Field(default=None, gt=0, le=1)  # probability mass of nucleus sampling
    top_k: int | None = Field(default=None, ge=-1)  # number of most likely tokens to sample from; -1 means all
    max_response_len: int | None = Field(default=None, ge=1)  # maximum number of tokens of a response
    input_key: str | None = None  # column with the prompt
    label_key: str | None = None  # column with the label
    metadata_key: str | None = None  # column with the metadata
    tool_key: str | None = None  # column with tool definitions
    rm_type: str | None = None  # built-in reward
    reward_key: str | None = None  # key of the reward if the reward function returns a dictionary
    pass_threshold: float | None = None  # a response passes if its reward is at least this

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_and_empty(cls, value: Any) -> Any:
        """Refuse booleans, which pydantic would convert to numbers, and ""."""
        rules = [
            (isinstance(value, bool), "a setting cannot be true or false: give a number or text"),
            (value == "", "give a value, or remove the line"),
        ]
        check_rules(rules)
        return value


class DataSet(DataSetSettings):
    """An entry of [[datasets]] in the --eval-config file."""

    name: str
    path: str


class EvalFile(BaseModel):
    """The content of the --eval-config file."""

    model_config = StageConfig.model_config

    defaults: DataSetSettings = DataSetSettings()
    datasets: list[DataSet] = Field(default_factory=list)

    @property
    def names_and_paths(self) -> list[tuple[str, str]]:
        return [(data_set.name, data_set.path) for data_set in self.datasets]

    def data_set_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of the data set `name`, including the file's [defaults]; {} if it is not in the file."""
        for data_set in self.datasets:
            if data_set.name == name:
                own = data_set.model_dump(exclude={"name", "path"}, exclude_none=True)
                return self.defaults.model_dump(exclude_none=True) | own
        return {}


def read_eval_file(path: str) -> EvalFile:
    """Read and validate the --eval-config file at `path`. Raises OptionError for the first problem in it."""
    is_yaml = path.endswith(_YAML)
    try:
        text = read_file(path, _MAX_BYTES).decode("utf-8").replace("\r\n", "\n")
        values = parse_yaml(text) if is_yaml else tomllib.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # includes TOMLDecodeError and UnicodeDecodeError
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise OptionError(f"this file is not {'YAML' if is_yaml else 'TOML'} ({reason}): correct it") from None
    except OSError as error:
        raise OptionError(f"this file cannot be read ({error.strerror}): give a TOML file with [[datasets]]") from None
    return parse_eval_file(_structure_of_toml(values) if is_yaml else values)


def _structure_of_toml(values: Any) -> dict[str, Any]:
    """Return the content of a YAML or JSON file in the structure of the TOML file. In YAML, everything may be below the
    key `eval`, and `datasets` may be a mapping from names to settings."""
    if isinstance(values, dict) and list(values) == ["eval"]:
        values = values["eval"]
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise OptionError("this file is not a mapping: write `datasets:`, and below it a list of names and paths")
    data_sets = values.get("datasets")
    if isinstance(data_sets, dict) and all(isinstance(entry, dict) for entry in data_sets.values()):
        values["datasets"] = [{"name": str(name), **entry} for name, entry in data_sets.items()]
    return values


def parse_eval_file(values: dict[str, Any]) -> EvalFile:
    """Validate the parsed content of an --eval-config file. Raises OptionError for the first problem in it."""
    data_sets = values.get("datasets")
    if not (isinstance(data_sets, list) and data_sets and all(isinstance(entry, dict) for entry in data_sets)):
        found = ", ".join(map(str, values))[:80] or "nothing"
        raise OptionError(
            f"the file has no data sets, but {found}: write a [[datasets]] table with name and path for each data set"
        )
    try:
        file = EvalFile.model_validate(values)
    except ValidationError as errors:
        first = min(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
        raise OptionError(_describe_error(first, data_sets)) from None
    check_data_set_names([data_set.name for data_set in file.datasets])
    return file


def _describe_error(error: Any, data_sets: list[dict[str, Any]]) -> str:
    """Return one of pydantic's errors as a sentence with the data set and the setting."""
    *section, last = error["loc"]
    name, where, known = str(last), "the file", list(EvalFile.model_fields)
    if section[:1] == ["defaults"]:
        where, known = "[defaults]", list(DataSetSettings.model_fields)
    elif section:
        number = int(section[1])
        where, known = f"data set {str(data_sets[number].get('name', number + 1))[:60]}", list(DataSet.model_fields)
    if error["type"] == "extra_forbidden":
        near = [key for key in known if name in key] or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
        return f"{where} has the unknown setting {name[:60]!r}: {hint}"
    if error["type"] == "missing":
        return f"{where} has no {name}: every [[datasets]] needs a name and a path"
    if not section:
        return "defaults is not a table: write [defaults], and below it setting = value"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where} has {name} = {repr(error.get('input'))[:80]}: {message[0].lower()}{message[1:]}"


def check_data_set_names(names: list[str]) -> None:
    """Check that data set names are valid and unique."""
    for name in names:
        rules = [
            (
                not _NAME.fullmatch(name),
                f"{name[:60]!r} cannot name a data set: use at most 100 letters, digits, dots, dashes and underscores, "
                "with a letter or digit first",
            ),
            (
                name.endswith((JOURNAL, commit_key(""))),
                f"{name[:60]!r} cannot name a data set, because its evaluation would look like the journal or the "
                "commit record of another one: give it another name",
            ),
            (names.count(name) > 1, f"two data sets are named {name}: give each a different name"),
        ]
        check_rules(rules)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises ValueError if it contains itself or, with aliases expanded, has more
    than MAX_YAML_VALUES parts; YAMLError if it is not YAML."""
    value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C parser is 10x faster
    parts, count = [value], 0
    while parts:
        part, count = parts.pop(), count + 1
        if count > MAX_YAML_VALUES:
            raise ValueError(f"with its aliases expanded it has more than {MAX_YAML_VALUES} values")
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return value
