"""The one parameter of every flow, composed of the stages' own models, and what must agree between them.

Nothing is defined twice: a field lives in the stage that uses it, and its name is its flag and its TOML key. This file adds what belongs
to the run as a whole (its name, its store, its length) and the rules that span stages. Prefect shows the model as a form and refuses
bad values at submission.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo

from flows.option_values import check_value
from flows.words import shown
from stages.convert.config import ConvertConfig
from stages.eval.config import EvalConfig
from stages.rollout.config import RolloutConfig
from stages.train.config import TrainConfig
from storage.config import Change, StageConfig, extra_of, option
from storage.errors import InputError, OptionError
from storage.keys import MAX_RUN_NAME, RUN_NAME
from storage.secrets import has_credentials, hide, is_hidden, reveal

MAX_CONFIG_BYTES = 4 << 20  # of a --config file; the longest recipe has 3 kB


class RunConfig(StageConfig):
    """The run as a whole."""

    run: str = option("", aliases=("run-name",), pattern=rf"^({RUN_NAME})?$", max_length=MAX_RUN_NAME)
    """Name of the run, and the key by which it is resumed; letters, digits, dot, dash, underscore, at most 200 characters."""

    store: str = option("penstock-store", change="placement", secret=True)
    """Where runs lie: a directory or any fsspec URI such as s3://bucket/prefix."""

    store_options: dict[str, Any] = option({}, change="placement", secret=True)
    """Passed to the fsspec file system (endpoint, credentials, ...); a secret as env:NAME or secret-file:PATH."""

    store_single_writer: bool = option(False, change="placement")
    """Promise that only one process writes, for stores without conditional create."""

    num_rollout: int = option(0, change="schedule", ge=0)
    """Number of generate -> train rounds; 0 only evaluates."""

    save_interval: int | None = option(None, change="schedule", ge=1)
    """Save a checkpoint every so many rounds; the last round is always saved."""

    num_rollout_per_start: int | None = option(None, change="schedule", ge=1)
    """For schedules: every start of the run trains so many rounds beyond what earlier starts were to reach, in place of --num-rollout."""

    keep_checkpoints: int | None = option(None, change="placement", ge=1)
    """Keep only so many checkpoints, the newest; all of them if not given. The rounds stay: older policies can be replayed."""

    keep_best: str | None = option(None, change="placement")
    """Keep the checkpoint with the best evaluation too, by this number of the evaluations (e.g. eval/gsm8k; higher is better)."""

    grace_period: float = option(30.0, change="placement", ge=0)
    """Seconds that a stage may go on after SIGTERM; what it has not finished by then is given up and done by the next start."""

    ray_address: str | None = option(None, change="placement")
    """Address of a standing Ray (`auto` finds a local one); without it the run owns a local Ray that ends with it."""

    mlflow_tracking_uri: str | None = option(None, change="placement", secret=True)
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else an SQLite file beside the store."""

    update_weight_transport: Literal["tensor", "disk"] | None = option(None, change="placement")
    """How weights reach the engines: in memory (same machine or same GPU) or through files; chosen by placement if not given."""

    stage_retries: int = option(2, change="placement", ge=0)
    """How often a failed stage is tried again before the run fails."""


class PostTrainConfig(StageConfig):
    """Everything about one run: convert -> [rollout -> train -> publish -> (checkpoint) -> (evaluate)] x N -> export."""

    run: RunConfig = option(default_factory=RunConfig)
    convert: ConvertConfig = option(default_factory=ConvertConfig)
    rollout: RolloutConfig = option(default_factory=RolloutConfig)
    train: TrainConfig = option(default_factory=TrainConfig)
    eval: EvalConfig = option(default_factory=EvalConfig)

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, values: Any) -> Any:
        """Refuse values that pydantic converts or that no stage can use."""
        for section, entries in values.items() if isinstance(values, dict) else ():
            fields = SECTIONS[section].model_fields if section in SECTIONS else {}
            for name, value in entries.items() if isinstance(entries, dict) else ():
                if name in fields:
                    check_value(flag(name), value, fields[name])
        return values

    @model_validator(mode="after")
    def _check_retention(self) -> PostTrainConfig:
        best, names = self.run.keep_best, [f"eval/{name}" for name, _ in self.eval.eval_prompt_data]
        if best is not None and self.run.keep_checkpoints is None:
            raise OptionError(f"--keep-best {best} has no effect without --keep-checkpoints, for then all are kept: add it")
        if best is not None and not best.startswith(tuple(names)):
            found = ", ".join(names) or "none, for --eval-prompt-data is not given"
            raise OptionError(f"--keep-best {best} does not match any evaluation metric: name one of this run's ({found})")
        return self

    @model_validator(mode="after")
    def _fill_and_check(self) -> PostTrainConfig:
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        steps, batch = self.train.num_steps_per_rollout, self.train.global_batch_size
        if batch is None:
            batch = samples // (steps or 1)
        if steps is None:
            steps = samples // batch if batch else 0
        if batch * steps != samples:
            raise OptionError(
                f"--rollout-batch-size {self.rollout.rollout_batch_size} x --n-samples-per-prompt {self.rollout.n_samples_per_prompt} = {samples} samples, but "
                f"--global-batch-size {batch} x --num-steps-per-rollout {steps} = {batch * steps}: make them equal, no sample is dropped silently"
            )
        self.train.check_batch(batch)
        self.train.global_batch_size, self.train.num_steps_per_rollout = batch, steps
        return self


SECTIONS: dict[str, type[StageConfig]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in PostTrainConfig.model_fields.items()
}


def options() -> Iterator[tuple[str, str, FieldInfo]]:
    """Every option as (section, name, field)."""
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            yield section, name, field


def validated(values: dict[str, Any]) -> PostTrainConfig:
    """Return the config of nested values. Literal secrets become references: only this process can resolve them (storage/secrets.py).

    Raises:
        InputError: the first thing wrong, in one sentence; the class that a validator raised, `OptionError` for pydantic's own checks.
    """
    if has_credentials(str(values.get("run", {}).get("store", ""))):
        raise OptionError("--store holds credentials: give them as --store-options NAME=env:VARIABLE (or secret-file:PATH)")
    try:
        return PostTrainConfig.model_validate(_without_secrets(values))
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        raise (type(cause) if isinstance(cause, InputError) else OptionError)(_sentence(error)) from error


def check_secrets(config: PostTrainConfig, *, literal: bool = True) -> None:
    """Check that every reference to a secret can be resolved.

    Args:
        literal: whether secrets may be given literally, which only this process knows.

    Raises:
        OptionError: a variable is not set, a file cannot be read, or a secret is given literally and must not be.
    """
    for section, name in secret_fields():
        value = getattr(getattr(config, section), name)
        if not literal and is_hidden(value):
            raise OptionError(
                f"{flag(name)} holds a secret, which everybody would see there: give env:NAME or secret-file:PATH in its place"
            )
        reveal(value)


def secret_fields() -> list[tuple[str, str]]:
    """Return section and name of every option that may hold a secret."""
    return [(section, name) for section, name, field in options() if extra_of(field)["secret"]]


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    result = {section: dict(entries) if isinstance(entries, dict) else entries for section, entries in values.items()}
    for section, name in secret_fields():
        entries = result.get(section)
        if isinstance(entries, dict) and name in entries:
            entries[name] = hide(name, entries[name])
    return result


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return the nested values of a TOML file: `[section] option = value`.

    Raises:
        OptionError: no such file, not TOML, or not a table of sections and options.
    """
    text = _read_text(path)
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise OptionError(f"config file {path} is not TOML ({reason}): correct it") from None
    if not values:
        raise OptionError(f"config file {path} is empty: write [section] and below it option = value, or leave it out")
    for name, entries in values.items():
        _check_section(path, name, entries)
    return values


def _read_text(path: str | Path) -> str:
    """Return the text of a config file. Raises OptionError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)  # a device has no size
        if len(data) > MAX_CONFIG_BYTES:
            raise OptionError(f"config file {path} is larger than {MAX_CONFIG_BYTES} bytes: give --config a TOML file")
        return data.decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise OptionError(f"config file {path} does not exist: give --config a TOML file") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"config file {path} is not UTF-8 (byte {error.start}): give --config a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        if isinstance(error, OptionError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"config file {shown(str(path))} cannot be read ({reason}): give --config a TOML file") from None


def _check_section(path: str | Path, name: str, entries: Any) -> None:
    """Check one top-level entry of a config file. Raises OptionError."""
    if name in SECTIONS:
        if not isinstance(entries, dict):
            kind = "an array of tables" if isinstance(entries, list) else f"the value {shown(entries)}"
            raise OptionError(f"config file {path}: {name} is {kind}: write [{name}] and below it option = value")
        return
    owner = next((section for section, option_name, _ in options() if option_name == name.replace("-", "_")), None)
    if owner is not None:
        raise OptionError(f"config file {path}: {name} stands outside its section: write it below [{owner}]")
    known = ", ".join(f"[{section}]" for section in SECTIONS)
    raise OptionError(f"config file {path} has the section [{shown(name)[1:-1]}]: the sections are {known}")


def part(config: PostTrainConfig, change: Change) -> dict[str, Any]:
    """The fields of one kind, as `section.name` -> plain value."""
    dumped = config.model_dump(mode="json")
    return {
        f"{section}.{name}": dumped[section][name] for section, name, field in options() if extra_of(field)["change"] == change
    }


def config_hash(config: PostTrainConfig) -> str:
    """Hash of what a run keeps for life."""
    return hashlib.sha256(json.dumps(part(config, "identity"), sort_keys=True).encode()).hexdigest()[:16]


def flag(name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    section_of_options = len(where) == 1 and where[0] in SECTIONS
    if not where or (section_of_options and first["type"] == "value_error"):
        return message  # a rule that spans options: its sentence names them
    if section_of_options:
        return f"[{where[0]}] is {shown(first.get('input'))}: write [{where[0]}] and below it option = value"
    if first["type"] == "extra_forbidden":
        return _unknown_option(where)
    name = where[1] if len(where) > 1 else where[0]
    value = "" if any(name == secret for _, secret in secret_fields()) else f" {shown(first.get('input'))}"
    return f"{flag(name)}{value}: {message[0].lower()}{message[1:]}"


def _unknown_option(where: list[str]) -> str:
    """`[train] learning_rate: no such option`, with the nearest known one."""
    section, name = ".".join(where[:-1]), where[-1]
    if not section:
        return f"[{shown(name)[1:-1]}]: no such section; the sections are {', '.join(f'[{known}]' for known in SECTIONS)}"
    fields = SECTIONS[where[0]].model_fields if where[0] in SECTIONS else {}
    near = difflib.get_close_matches(name.replace("-", "_")[:64], fields, n=1, cutoff=0.5)
    owner = next((other for other, option_name, _ in options() if option_name == name), None)
    hint = f", it belongs to [{owner}]" if owner else f": did you mean {near[0]}?" if near else ""
    return f"[{section}] {shown(name)[1:-1]}: no such option{hint}"


def is_model(annotation: Any) -> bool:
    """Whether a field's type is a pydantic model."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
