"""The config, the parameter of every flow: a pydantic model composed of the stages' configs, and checks across stages.

An option is defined once, in the config of the stage that uses it; the field's name is also the flag and the TOML key.
The options of the run as a whole (name, store, number of rounds) are in run_config.py. Prefect shows the model as a
form and rejects invalid values at submission.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from penstock.engines.backends import DEFAULT, EngineFacts, engine_backend
from penstock.flows.debug_config import DebugConfig
from penstock.flows.options.argv import flag_of_field, short_repr
from penstock.flows.options.refused import OTHER_NAMES, REFUSED
from penstock.flows.options.values import check_value
from penstock.flows.run_config import RunConfig
from penstock.stages.convert.config import ConvertConfig
from penstock.stages.eval.config import EvalConfig
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.train.config import TrainConfig
from penstock.storage.config import Mutability, StageConfig, entries_of, field_meta, option, section_model
from penstock.storage.disk import read_file
from penstock.storage.errors import InputError, OptionError, check_rules, nearest_name
from penstock.storage.history.run_record import ParentRecord, RecordedConfig
from penstock.storage.secret_references import contains_hidden_secret, hide_literal_secrets, resolve_secrets
from penstock.storage.secrets import has_credentials

GROUP_SIZE = 8  # default of --n-samples-per-prompt with a group-relative estimator
RECIPES = Path(__file__).parents[1] / "recipes"  # penstock/recipes, in a checkout a link to configs/recipes
MAX_CONFIG_BYTES = 4 << 20  # size limit of a --config file; the longest recipe has 3 kB


class Flow(StrEnum):
    """The flows. The value is the name of the flow's module in flows/; a row also says what the flow starts."""

    TRAIN = "train", True, True
    SFT = "sft", True, False
    EVALUATE = "evaluate", False, True
    CONVERT = "convert"

    trains: bool  # whether the flow has a trainer
    generates: bool  # whether the flow has engines
    has_run: bool  # whether the flow has a run, with a name and a record in the store
    has_rollouts: bool  # whether the flow trains on responses that it generates
    has_demonstrations: bool  # whether the flow trains on responses that are given

    def __new__(cls, name: str, trains: bool = False, generates: bool = False) -> Flow:
        flow = str.__new__(cls, name)
        flow._value_ = name
        flow.trains, flow.generates, flow.has_run = trains, generates, trains or generates
        flow.has_rollouts, flow.has_demonstrations = trains and generates, trains and not generates
        return flow


class PostTrainConfig(StageConfig):
    """The config of one run: convert -> [rollout -> train -> publish -> (checkpoint) -> (evaluate)] x N -> export."""

    run: RunConfig = option(default_factory=RunConfig)
    convert: ConvertConfig = option(default_factory=ConvertConfig)
    rollout: RolloutConfig = option(default_factory=RolloutConfig)
    train: TrainConfig = option(default_factory=TrainConfig)
    eval: EvalConfig = option(default_factory=EvalConfig)
    debug: DebugConfig = option(default_factory=DebugConfig)

    @property
    def rollout_with_args(self) -> RolloutConfig:
        """Return the options of the rollout, whose user-defined functions also get the options of the other sections as
        attributes of `args`, except secrets."""
        others = {
            name: option_value(self, section, name)
            for section, name, field in OPTIONS
            if section != "rollout" and not field_meta(field).secret
        }
        for section, switch in SWITCHES.items():
            if section.startswith("rollout."):  # `args` has the options of the rollout itself
                continue
            others[switch[2:].replace("-", "_")] = option_value(self, *section.rsplit(".", 1)) is not None
        return self.rollout.model_copy(update={"plugin_args": others | self.rollout.plugin_args})

    @property
    def start_weights(self) -> str:
        """Return the path of the weights of policy version 0. Call this on a `Plan`, in which --load is a checkpoint or
        None: as it is given, it may name a run that has no checkpoint yet."""
        return self.convert.load or self.train.ref_load or self.convert.hf_checkpoint

    @property
    def engine_facts(self) -> EngineFacts:
        """Return what the inference engine's own flags (such as --ENGINE-speculative-algorithm) say about it."""
        return engine_backend(self.rollout.engine).facts(self.rollout.engine_options)

    @property
    def drafts_with_mtp_layers(self) -> bool:
        """Return whether the engines draft with the MTP layers of --hf-checkpoint, which exports then keep."""
        return self.engine_facts.speculates and self.engine_facts.draft_model is None

    @model_validator(mode="before")
    @classmethod
    def _reject_unusable_values(cls, values: Any) -> Any:
        """Reject values that pydantic would convert or that no stage can use."""
        for section, name, field in OPTIONS:
            if name in (entries := entries_of(values, section)):
                flag = f"--{entries.get('engine', DEFAULT)}" if name == "engine_options" else flag_of_field(name)
                check_value(flag, entries[name], field)
        return values

    def rules(self) -> Iterator[tuple[object, str]]:
        run, evals = self.run, self.eval
        yield (
            run.keep_best is not None and run.keep_checkpoints is None,
            f"--keep-best {run.keep_best} has no effect without --keep-checkpoints (all checkpoints are "
            "kept): add --keep-checkpoints N",
        )
        replay, groups = self.train.replay, self.rollout.rollout_batch_size
        yield (
            replay and replay.replay_share * groups < 1,
            f"--replay-share {replay and replay.replay_share} of --rollout-batch-size {groups} is less than one group: "
            "raise it, or omit --replay-share",
        )
        yield (
            replay and self.debug.load_debug_rollout_data,
            "--replay-share needs the policy version that generated each sample, which the files of "
            "--load-debug-rollout-data do not tell: omit one of the two options",
        )
        engines, ranks = self.rollout.rollout_num_gpus, self.train.num_ranks
        yield (
            run.colocate and engines not in (None, ranks),
            f"--colocate puts the engines on the trainer's {ranks} GPUs, but --rollout-num-gpus is {engines}: "
            "omit --rollout-num-gpus to share them, or --colocate to use others",
        )
        yield (
            run.offloads_engines and self.rollout.rollout_external_engine_addrs,
            "--offload-rollout (or --colocate) cannot be combined with --rollout-external-engine-addrs, because "
            "external engines keep their memory: omit --offload-rollout and --colocate",
        )
        mode = "--async-mode streaming" if run.streams else f"--async-buffer-size {run.async_buffer_size}"
        yield (
            run.generates_ahead and run.alternates_trainer_and_engines,
            f"{mode} generates while the trainer works, but with --colocate, --offload-train or --offload-rollout "
            f"trainer and engines use the memory in turns: omit {mode}, or these options",
        )
        yield (
            run.offloads_engines and run.update_weights_interval > 1,
            f"--update-weights-interval {run.update_weights_interval} leaves weights in the engines for several "
            "rounds, but with --colocate or --offload-rollout the engines release their weights after each round: give "
            "an interval of 1, or omit these options",
        )
        yield (
            evals.eval_mode == "apart" and run.alternates_trainer_and_engines,
            "--eval-mode apart evaluates while the trainer works, but with --colocate, --offload-train or "
            "--offload-rollout trainer and engines take turns: omit --eval-mode apart, or these options",
        )
        yield (
            evals.eval_mode == "apart" and not evals.data_sets,
            "--eval-mode apart reserves engines, but nothing is evaluated: add --eval-prompt-data, or omit --eval-mode",
        )
        yield (
            evals.eval_mode == "between" and evals.eval_num_engines != 1,
            "--eval-num-engines has no effect without --eval-mode apart: add --eval-mode apart, or omit "
            "--eval-num-engines",
        )
        yield from self._streaming_rules()
        yield from self._teacher_rules()

    def _streaming_rules(self) -> Iterator[tuple[object, str]]:
        """Yield those of `rules` about --async-mode streaming and the options that belong to it."""
        run, rollout = self.run, self.rollout
        if not run.streams:
            for name in {"max_staleness", "pause_generation_mode"} & run.model_fields_set:
                yield (
                    getattr(run, name) != RunConfig.model_fields[name].default,
                    f"{flag_of_field(name)} has no effect without --async-mode streaming: add --async-mode streaming, "
                    f"or omit {flag_of_field(name)}",
                )
            return
        unused: dict[str, Any] = {
            "--async-buffer-size": run.async_buffer_size,
            "--partial-rollout": rollout.partial_rollout,
            "--data-source-path": rollout.data_source_path,
            "--rollout-function-path": rollout.rollout_function_path,
        }
        for flag, value in unused.items():
            yield (
                value,
                f"{flag} cannot be combined with --async-mode streaming, in which rounds have no end at which "
                f"groups are aborted or returned to a data source: omit {flag}, or --async-mode streaming",
            )
        yield (
            run.check_weight_update_equal,
            "--check-weight-update-equal cannot be combined with --async-mode streaming, because it overwrites the "
            "weights while requests use them: omit --check-weight-update-equal",
        )
        yield (
            run.update_weights_interval > run.max_staleness + 1,
            f"--update-weights-interval {run.update_weights_interval} makes tokens older than --max-staleness "
            f"{run.max_staleness} allows: give an interval of at most {run.max_staleness + 1}",
        )

    def _teacher_rules(self) -> Iterator[tuple[object, str]]:
        """Yield those of `rules` about what a teacher with hints, or in an engine, needs of the rollouts."""
        rollout, train = self.rollout, self.train
        names = ["rollout_function_path", "custom_convert_samples_to_train_data_path"]
        names += ["custom_generate_function_path"] if train.hinted else []
        for name in names if train.hinted or train.stored_top_k else ():
            yield (
                getattr(rollout, name),
                f"{flag_of_field(name)} may change the tokens for which the samples store what the teacher sees or "
                "says: omit it, or use a teacher in the trainer (--opd-teacher-load)",
            )
        yield (
            train.reads_teacher_logprobs and rollout.rollout_temperature != 1,
            "a teacher in an engine returns log-probs at temperature 1, but --rollout-temperature is "
            f"{rollout.rollout_temperature}: give 1, or use a teacher in the trainer (--opd-teacher-load)",
        )
        yield (
            rollout.multimodal_keys and (train.reads_teacher_logprobs or train.hinted),
            "--multimodal-keys gives prompts images, which a teacher in an engine and one with hints (--opd-self) do "
            "not see: use a vision-language teacher in the trainer (--opd-teacher-load)",
        )

    @model_validator(mode="after")
    def _check_derived_options(self) -> PostTrainConfig:
        """Check that the options that depend on others can be derived, for instance that the batch sizes agree."""
        derive(self)
        return self


class Plan(PostTrainConfig):
    """A config in which every option has its final value. `model_dump` omits the fields that only a plan has."""

    flow: Flow = Field(exclude=True)
    given: RecordedConfig = Field(exclude=True)  # the options as the user gave them, but with absolute paths
    parent: ParentRecord | None = Field(exclude=True)  # the run and round that this run was forked from, if it was
    notes: tuple[str, ...] = Field(exclude=True)  # messages to print, about options that have an unexpected effect


def _sections(model: type[StageConfig], prefix: str = "") -> dict[str, type[StageConfig]]:
    """Return the sections of a config, each before its subsections: dotted path -> class of the section."""
    sections: dict[str, type[StageConfig]] = {}
    for name, field in model.model_fields.items():
        if inner := section_model(field):
            sections |= {prefix + name: inner} | _sections(inner, f"{prefix}{name}.")
    return sections


SECTIONS = _sections(PostTrainConfig)
SWITCHES = {  # optional section -> the flag that adds it: the first alias of its field, or its name
    f"{section}.{name}": flag_of_field(next(iter(field_meta(field).aliases), name))
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
    if section_model(field) and field.default is None
}


OPTIONS = tuple(  # every option: (dotted path of its section, name, field)
    (section, name, field)
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
    if section_model(field) is None
)


SECRETS = [(section, name) for section, name, field in OPTIONS if field_meta(field).secret]


def option_value(config: PostTrainConfig, section: str, name: str) -> Any:
    """Return the value of an option; None if its section is absent."""
    owner: Any = config
    for part in section.split("."):
        owner = owner and getattr(owner, part)
    return owner and getattr(owner, name)


def with_options(config: Any, section: str, values: dict[str, Any]) -> Any:
    """Return the config with `values` set in a section; unchanged if the section is absent. `model_fields_set`, which
    tells what the user gave, gets only options whose value changes."""
    if not section:
        return config.model_copy(update={name: new for name, new in values.items() if new != getattr(config, name)})
    first, _, rest = section.partition(".")
    inner = getattr(config, first)
    return config if inner is None else config.model_copy(update={first: with_options(inner, rest, values)})


def with_entry(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of the nested values of a config (section -> option -> value) in which the option at the dotted
    `path` has the given value."""
    first, _, rest = path.partition(".")
    if rest:
        value = with_entry(entries_of(values, first), rest, value)
    return {**values, first: value}


def create_section(values: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the entries of a section in the nested values of a config. A section that is absent is added to `values`.
    Raises OptionError if `values` has something other than a table at its place."""
    for part in section.split("."):
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise OptionError(NOT_A_TABLE.format(section=section, value=short_repr(values)))
    return values


def derive(config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with values for those options that were not given and depend on others.

    These are --n-samples-per-prompt, --global-batch-size, --num-steps-per-rollout, --use-tis, --params-dtype, the
    learning-rate schedule, and --debug-train-only with --load-debug-rollout-data. Raises OptionError if the sizes
    contradict each other.
    """
    run, rollout, train = config.run, config.rollout, config.train
    if config.debug.load_debug_rollout_data and not run.debug_rollout_only:  # needs no engines
        run = run.model_copy(update={"debug_train_only": True})
    if train.compares_samples and "n_samples_per_prompt" not in rollout.model_fields_set:
        rollout = rollout.model_copy(update={"n_samples_per_prompt": GROUP_SIZE})
    changes: dict[str, Any] = {}
    if train.megatron.bf16:
        changes["params_dtype"] = "bf16"
    is_policy_loss = train.loss_type == "policy_loss" and not train.use_rollout_logprobs
    if run.staleness_limit and is_policy_loss and "use_tis" not in train.model_fields_set:
        changes["use_tis"] = True  # tokens may be older than the policy that is trained on them
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    batch, steps = train.global_batch_size, train.num_steps_per_rollout
    if batch is None:
        batch = samples // (steps or 1)
    if steps is None:
        steps = samples // batch if batch else 0
    rules = (
        (
            batch * steps != samples,
            f"--rollout-batch-size {rollout.rollout_batch_size} x --n-samples-per-prompt "
            f"{rollout.n_samples_per_prompt} = {samples} samples, but --global-batch-size {batch} x "
            f"--num-steps-per-rollout {steps} = {batch * steps}: make both products equal",
        ),
        train.batch_rule(batch),
    )
    check_rules(rules)
    changes |= {"global_batch_size": batch, "num_steps_per_rollout": steps}
    if run.num_rollout or not run.num_epoch:  # otherwise --num-epoch still has to be converted to a number of rounds
        changes |= train.lr_schedule(run.num_rollout * steps * train.ppo_epochs)
    train = train.model_copy(update=changes)
    return config.model_copy(update={"run": run, "rollout": rollout, "train": train})


def validate_config(values: dict[str, Any]) -> PostTrainConfig:
    """Validate `values` (section -> option -> value), and return them as a config. A literal secret is replaced by a
    reference that only this process can resolve. Raises InputError, whose message describes the first invalid value;
    its class is `OptionError`, or that of the exception which a validator raised."""
    if has_credentials(str(values.get("run", {}).get("store", ""))):
        raise OptionError(
            "--store contains credentials: give them as --store-options NAME=env:VARIABLE (or secret-file:PATH)"
        )
    try:
        for section, name in SECRETS:
            if name in (entries := entries_of(values, section)):
                values = with_entry(values, f"{section}.{name}", hide_literal_secrets(name, entries[name]))
        return PostTrainConfig.model_validate(values)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        raise (type(cause) if isinstance(cause, InputError) else OptionError)(describe_error(error)) from error


def with_sft_loss(values: Any) -> Any:
    """Return the values of a config (section -> option -> value) with --loss-type sft_loss, unless they have a loss. A
    config that is already validated is returned unchanged."""
    train = values.get("train", {}) if isinstance(values, dict) else None
    return values | {"train": {"loss_type": "sft_loss"} | train} if isinstance(train, dict) else values


def check_secrets(config: PostTrainConfig, *, allow_literal: bool = True) -> None:
    """Check that every reference to a secret can be resolved and, unless `allow_literal`, that no secret is a literal
    value, which another process could not resolve."""
    values = {flag_of_field(name): option_value(config, section, name) for section, name in SECRETS}
    rules = (
        (
            not allow_literal and contains_hidden_secret(value),
            f"{flag} contains a secret, which would be readable on the Prefect server: give env:NAME or "
            "secret-file:PATH instead",
        )
        for flag, value in values.items()
    )
    check_rules(rules)
    resolve_secrets(values)


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes, which `--config` accepts instead of a path."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return section -> option -> value of a TOML file, or of the bundled recipe `path` if no file has this name.
    Raises OptionError if it is not a config file."""
    if str(path) in recipe_names() and not Path(path).is_file():
        path = RECIPES / f"{path}.toml"
    text = read_config_text(path)
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise OptionError(f"config file {path} is not valid TOML ({reason}): correct it") from None
    where = f"config file {path}"
    rules: list[tuple[object, str]] = [
        (not values, f"{where} is empty: write [section] and below it option = value, or leave out --config")
    ]
    for name, entries in values.items():
        is_section = name in PostTrainConfig.model_fields
        owner = next((section for section, option, _ in OPTIONS if option == name.replace("-", "_")), None)
        kind = "an array of tables" if isinstance(entries, list) else f"the value {short_repr(entries)}"
        rules += [
            (owner and not is_section, f"{where}: {name} is outside its section: write it below [{owner}]"),
            (not is_section, f"{where} has the section [{short_repr(name)[1:-1]}]: the sections are {_KNOWN}"),
            (not isinstance(entries, dict), f"{where}: {name} is {kind}: write [{name}] and below it option = value"),
        ]
    check_rules(rules)
    return values


def read_config_text(path: str | Path, flag: str = "--config", kind: str = "TOML") -> str:
    """Return the text of the file that `flag` names, in the format `kind`. Raises OptionError if it cannot be read."""
    needed = f"give {flag} a {kind} file"
    try:
        return read_file(path, MAX_CONFIG_BYTES).decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        recipes = f" or the name of a bundled recipe ({', '.join(recipe_names())})" if flag == "--config" else ""
        problem = f"{path} does not exist: {needed}{recipes}"
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 (byte {error.start}): {needed}"
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"{short_repr(str(path))} cannot be read ({reason}): {needed}"
    raise OptionError(f"config file {problem}")


NOT_A_TABLE = "[{section}] is {value}: write [{section}] and below it option = value"
_KNOWN = ", ".join(f"[{section}]" for section in PostTrainConfig.model_fields)


def options_by_mutability(config: PostTrainConfig, mutability: Mutability) -> dict[str, Any]:
    """Return the options of one mutability class (see storage/config.py): `section.name` -> JSON value. The options of
    an absent section are None."""
    dumped = config.model_dump(mode="json")
    options = {
        f"{section}.{name}": entries_of(dumped, section).get(name)
        for section, name, field in OPTIONS
        if field_meta(field).mutability == mutability
    }
    if mutability == "identity":
        options["train.megatron.recompute_modules"] = config.train.megatron.rounding_modules
    return options


def changed_flag(before: PostTrainConfig, now: PostTrainConfig, *mutabilities: Mutability) -> str | None:
    """Return the flag of the first option of these mutability classes that differs between two configs, or None."""
    for mutability in mutabilities:
        old, new = (options_by_mutability(config, mutability) for config in (before, now))
        if changed := [name for name in new if new[name] != old[name]]:
            return flag_of_field(changed[0].rpartition(".")[2])
    return None


def config_hash(config: PostTrainConfig) -> str:
    """Return a hash of the options that a resumed run cannot change (mutability `identity`)."""
    identity = options_by_mutability(config, "identity")
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def training_options(config: PostTrainConfig) -> dict[str, Any]:
    """Return the options that determine the weights after training on a given rollout: name -> JSON value."""
    identity = options_by_mutability(config, "identity")
    train = {name: value for name, value in identity.items() if name.startswith("train.")}
    return train | {"temperature": config.rollout.rollout_temperature}


def describe_error(error: ValidationError) -> str:
    """Return the first error of a validation as one sentence with the flag or the section."""
    first = error.errors()[0]
    where, message = [str(part) for part in first["loc"]], first["msg"].removeprefix("Value error, ")
    depth = next(n for n in range(len(where), -1, -1) if n == 0 or ".".join(where[:n]) in SECTIONS)
    section, value = ".".join(where[:depth]), first.get("input")
    if depth == len(where) and (not where or first["type"] == "value_error"):
        return message  # a check across options: its message has their flags
    if depth == len(where):
        return NOT_A_TABLE.format(section=section, value=short_repr(value))
    if first["type"] == "extra_forbidden":
        return describe_unknown_option(where)
    name, flag = where[depth], flag_of_field(where[depth])
    if first["type"] == "missing" and depth == len(where) - 1:
        given = ", ".join(map(flag_of_field, value)) if isinstance(value, dict) else ""
        but_has = f", but has only {given}" if given else ""
        return f"[{section}] needs {flag}{but_has}: add {flag}, or omit {given or 'the section'}"
    shown = "" if (section, name) in SECRETS else f" {short_repr(value)}"
    return f"{flag}{shown}: {message[0].lower()}{message[1:]}"


def describe_unknown_option(where: list[str]) -> str:
    """Return the message about the unknown option at the path `where`, with the nearest known option."""
    section, name = ".".join(where[:-1]), where[-1]
    if not section:
        return f"[{short_repr(name)[1:-1]}]: no such section; the sections are {_KNOWN}"
    if reason := REFUSED.get(flag_of_field(name)):
        return f"[{section}] {name} is not supported: {reason}"
    other_name = OTHER_NAMES.get(name.replace("_", "-"), "").replace("--", "").replace("-", "_").replace(" ", " or ")
    known = SECTIONS[section].model_fields if section in SECTIONS else {}
    near = other_name or nearest_name(name.replace("-", "_"), known)
    owners = [other for other, option_name, _ in OPTIONS if option_name == name]
    owners += [path for path, switch in SWITCHES.items() if switch == flag_of_field(name)]
    hint = f"; it belongs to [{owners[0]}]" if owners else ": `penstock train --help-all` lists them"
    hint = f": did you mean {near}?" if near and not owners else hint
    return f"[{section}] {short_repr(name)[1:-1]}: no such option{hint}"
