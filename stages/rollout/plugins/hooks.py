"""Call user-defined hooks with the samples of a round, and apply their changes.

    def sample_hook(args, sample)                 gets each sample after generation, before grading
    def sample_filter(args, groups)               gets the kept groups of a round; sets `remove_sample` on samples that
                                                  are not trained on
    def process_all(args, groups, data_source)    gets all groups of a round, including dropped ones; changes are
                                                  ignored
    def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time)
    def log_eval_rollout_data(rollout_id, args, data, extra_metrics)
                                                  get the samples before the round's commit; numbers that they add to
                                                  the metrics are recorded in the commit

Hooks may be `async`. They get copies of the samples (user_sample.py), whose fields also have their aliases; changes are
checked and then applied. A sample with `remove_sample` keeps its reward, which still counts in its group's mean. A hook
blocks the calling thread for up to `--reward-timeout` seconds; call it from an event loop with `asyncio.to_thread`.

Two functions change the data that the trainer gets:

    def post_process(args, samples) -> (raw_rewards, rewards)       --custom-reward-post-process-path
    def convert(args, samples) -> dictionary of lists               --custom-convert-samples-to-train-data-path

They are called before the round's commit, with its graded samples. Everything that they change is in the shards, where
the trainer, a resumed run and a replay read it. `rewards` become the component TRAIN_REWARD of the samples' rewards,
which advantage estimators use as they are, without normalizing them within groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

from penstock.stages.plugins import DEFAULT_NAMES, Plugin
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.user_sample import UserSample, as_list, checked_sample
from penstock.stages.rollout.prompts.data_source import Group
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError, check_rules
from penstock.storage.samples.sample import TEACHER_COLUMNS, TRAIN_REWARD, Sample, Status

K = TypeVar("K")

# Fields that a hook cannot change.
_IDENTITY = {"sample_id", "group_id", "trajectory_id", "rollout_id"}
_FROM_ENGINES = {"policy_versions", "routed_experts", "teacher_logprobs", *TEACHER_COLUMNS.names}
_CHANGEABLE = [field.name for field in fields(Sample) if field.name not in _IDENTITY | _FROM_ENGINES]


class Hooks:
    """Calls the user-defined hooks that `config` names. The method for a hook that `config` does not name does nothing.
    Raises PluginError."""

    def __init__(self, config: RolloutConfig) -> None:
        self._args = SimpleNamespace(**config.plugin_arguments())
        self._sample_hook = _load_plugin(config, "rollout_sample_hook_path", "args", "sample")
        self._sample_filter = _load_plugin(config, "rollout_sample_filter_path", "args", "groups")
        self._all_samples = _load_plugin(config, "rollout_all_samples_process_path", "args", "groups", "data_source")

    def run_sample_hook(self, sample: Sample) -> None:
        """Call the sample hook. If the hook raises, exceeds the timeout or makes the sample invalid, the sample's
        status becomes failed, with the reason in `metadata["error"]`."""
        if self._sample_hook is None:
            return
        view = UserSample.of(sample)
        try:
            _call_in_place(self._sample_hook, self._args, view)
            _apply_changes([(sample, view)], self._sample_hook)
        except ValueError as error:
            sample.status, sample.metadata["error"] = Status.FAILED, str(error)

    def run_sample_filter(self, groups: list[Group]) -> None:
        """Call the sample filter with the kept groups of a round. Raises PluginError."""
        if self._sample_filter is None:
            return
        views = [[UserSample.of(sample) for sample in group] for group in groups]
        arguments = [list(group) for group in views]
        _call_in_place(self._sample_filter, self._args, arguments)
        if arguments != views:
            raise PluginError(
                f"{self._sample_filter.name} adds, removes or reorders groups or samples: to exclude a sample from "
                "training, set its `remove_sample` to True"
            )
        pairs = [pair for group, seen in zip(groups, views) for pair in zip(group, seen)]
        _apply_changes(pairs, self._sample_filter)

    def run_round_hook(self, groups: list[Group], source: Any) -> None:
        """Call the function of --rollout-all-samples-process-path with all groups of a round. Raises PluginError."""
        if self._all_samples is not None:
            views = [[UserSample.of(sample) for sample in group] for group in groups]
            self._all_samples(self._args, views, source)


def run_log_function(
    config: RolloutConfig, rollout_id: int, samples: Sequence[Sample], seconds: float, data_set: str | None = None
) -> dict[str, float]:
    """Call the user-defined log function of rollouts or, if `data_set` is given, of evaluations. Return the metrics
    that it adds; {} if `config` names no such function. `seconds`: duration of the rollout. Raises PluginError."""
    plugin = load_log_function(config, is_eval=data_set is not None)
    if plugin is None:
        return {}
    metrics: dict[str, Any] = {}
    args = SimpleNamespace(**config.plugin_arguments(), logged_metrics=metrics)
    views = [UserSample.of(sample) for sample in samples]
    if data_set is None:
        plugin(rollout_id, args, views, metrics, seconds)
    else:
        truncated = [sample.status is Status.TRUNCATED for sample in samples]
        rewards = [sample.reward for sample in samples]
        data = {data_set: {"rewards": rewards, "truncated": truncated, "samples": views}}
        plugin(rollout_id, args, data, metrics)
    return numbers_of(metrics, plugin.name)


def load_log_function(config: RolloutConfig, *, is_eval: bool) -> Plugin | None:
    """Load the log function of rollouts or evaluations, if `config` names it. Raises PluginError."""
    if is_eval:
        of_eval = ("rollout_id", "args", "data", "extra_metrics")
        return _load_plugin(config, "custom_eval_rollout_log_function_path", *of_eval)
    of_rollout = ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    return _load_plugin(config, "custom_rollout_log_function_path", *of_rollout)


def _load_plugin(config: RolloutConfig, option: str, *parameters: str) -> Plugin | None:
    path, name = getattr(config, option), DEFAULT_NAMES[option]
    return Plugin(path, parameters, default_name=name, timeout=config.reward_timeout) if path else None


def to_finite_numbers(values: Mapping[K, Any]) -> tuple[dict[K, float], list[K]]:
    """Return the values as floats, and the keys of those that are not finite numbers."""
    numbers = {}
    for key, value in values.items():
        try:
            numbers[key] = float(value)
        except (TypeError, ValueError):
            numbers[key] = math.nan
    return numbers, [key for key, number in numbers.items() if not math.isfinite(number)]


def numbers_of(metrics: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the metrics of a user-defined function as floats. Raises PluginError, whose message begins with `name`."""
    numbers, wrong = to_finite_numbers(metrics)
    if wrong:
        raise PluginError(f"{name} adds the metric {wrong[0]!r:.80} = {metrics[wrong[0]]!r:.80}: give a finite number")
    return {str(key): number for key, number in numbers.items()}


def _call_in_place(plugin: Plugin, args: Any, argument: Any) -> None:
    """Call a hook that changes `argument` in place. Raises PluginError if it returns another value, which would be
    ignored."""
    value = plugin(args, argument)
    if value is not None and value is not argument:
        raise PluginError(
            f"{plugin.name} returned {type(value).__name__}: modify the argument in place and return None"
        )


def _apply_changes(samples_and_changed: list[tuple[Sample, UserSample]], plugin: Plugin) -> None:
    """Apply a hook's changes to the samples. If any change is invalid, apply none and raise PluginError."""
    try:
        changed = [(sample, checked_sample(view)) for sample, view in samples_and_changed]
        for _, new in changed:
            if new.reward is not None and not (isinstance(new.reward, int | float) and math.isfinite(new.reward)):
                raise PluginError(f"the sample's reward is {new.reward!r:.100}: set a finite number, or None")
    except ValueError as error:
        raise PluginError(f"{plugin.name} makes a sample invalid: {error}") from error
    for sample, new in changed:
        for name in _CHANGEABLE:
            setattr(sample, name, getattr(new, name))


# ---- train data ------------------------------------------------------------------------------------------------------


REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks")
OPTIONAL = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "rollout_log_probs", "teacher_log_probs")


def load_train_data_function(config: RolloutConfig) -> Plugin | None:
    """Load the function of --custom-reward-post-process-path or --custom-convert-samples-to-train-data-path; return
    None without these options. Raises PluginError."""
    post_process = _load_plugin(config, "custom_reward_post_process_path", "args", "samples")
    return post_process or _load_plugin(config, "custom_convert_samples_to_train_data_path", "args", "samples")


def make_train_data(samples: list[Sample], config: RolloutConfig, tokenizer: PromptTokenizer) -> list[Sample]:
    """Return the samples to train on, as changed by the function of --custom-reward-post-process-path or
    --custom-convert-samples-to-train-data-path; without these options, `samples`. The function gets only samples that
    have a reward; the other samples are not trained on, and are appended to the result. Raises PluginError."""
    plugin = load_train_data_function(config)
    if plugin is None:
        return samples
    graded = [sample for sample in samples if sample.reward is not None]
    if not graded:
        return samples
    views = [UserSample.of(sample) for sample in graded]
    for index, view in enumerate(views):
        view.index = index  # the function returns this number in `sample_indices`
    returned = plugin(SimpleNamespace(**config.plugin_arguments()), views)
    if config.custom_reward_post_process_path:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            kind = type(returned).__name__
            raise PluginError(f"{plugin.name} returned {kind}: return the two lists (raw_rewards, rewards)")
        raw, rewards = (_numbers(values, len(graded), plugin.name) for values in returned)
        for sample, raw_reward, reward in zip(graded, raw, rewards):
            sample.reward, sample.rewards = raw_reward, {**sample.rewards, TRAIN_REWARD: reward}
        return samples
    others = [sample for sample in samples if sample.reward is None]
    return _samples_of_rows(returned, graded, {sample.sample_id for sample in others}, plugin.name, tokenizer) + others


def _samples_of_rows(
    returned: Any, origins: Sequence[Sample], taken: set[str], name: str, tokenizer: PromptTokenizer
) -> list[Sample]:
    """Return one sample per row that a user-defined function has converted samples to, with ids that are not among
    `taken`. `returned`: dictionary of lists with one entry per row; its `sample_indices` refer to `origins`, the
    samples that the function got. Raises PluginError."""
    columns = _read_columns(returned, name)
    num_rows = len(columns["tokens"])
    indices = [int(index) for index in columns.get("sample_indices", range(num_rows))]
    strange = next((index for index in indices if not 0 <= index < len(origins)), None)
    missing = min(set(range(len(origins))) - set(indices), default=None)
    rules = [
        (
            strange is not None,
            f"{name} returned the sample index {strange} for {len(origins)} samples: return sample_indices with the "
            "`index` of each row's sample",
        ),
        (
            missing is not None,
            f"{name} returned no row of sample {missing}, but optimizer steps need a row of every sample: to exclude "
            "the sample, return a row whose loss_masks are 0",
        ),
    ]
    check_rules(rules, PluginError)
    rewards = _numbers(columns["rewards"], num_rows, name)
    raw_rewards = _numbers(columns.get("raw_reward", [origins[index].reward for index in indices]), num_rows, name)
    ids = list(map(str, columns.get("rollout_ids", ())))
    trajectories = [origins[index].trajectory_id for index in indices]
    if ids and not len(set(ids)) == len(set(trajectories)) == len(set(zip(ids, trajectories))):
        raise PluginError(
            f"{name} returned rollout_ids that differ between the rows of one sample, or are equal for two samples: "
            "give the rows of each sample an id of their own, or return no rollout_ids"
        )
    samples = []
    for row, trajectory in enumerate(trajectories):
        entries = {column: values[row] for column, values in columns.items()}
        try:
            sample = _sample_of_row(entries, origins[indices[row]], tokenizer)
        except (TypeError, ValueError) as error:  # PluginError among them
            raise PluginError(f"{name}, row {row}: {error}") from error
        sample.reward, sample.rewards = raw_rewards[row], {**sample.rewards, TRAIN_REWARD: rewards[row]}
        candidates = (f"{trajectory}.{number}" if number else trajectory for number in count())
        sample.sample_id = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(sample.sample_id)
        samples.append(sample)
    return samples


def _read_columns(returned: Any, name: str) -> dict[str, list[Any]]:
    """Return the columns as lists. Raises PluginError if a column is unknown or missing, or if they differ in
    length."""
    given = returned.keys() if isinstance(returned, Mapping) else ()
    unknown = sorted(map(str, {*given} - {*REQUIRED, *OPTIONAL}))
    missing = [column for column in REQUIRED if column not in given]
    rules = [
        (
            not isinstance(returned, Mapping),
            f"{name} returned {type(returned).__name__}: return a dictionary of lists",
        ),
        (
            unknown,
            f"{name} returned {', '.join(unknown)}, which cannot be stored with the samples, so a replay would lack "
            f"them: return {', '.join(REQUIRED)} and, if needed, {', '.join(OPTIONAL)}",
        ),
        (missing, f"{name} returned no {', '.join(missing)}: return {', '.join(REQUIRED)}"),
    ]
    check_rules(rules, PluginError)
    columns = {column: as_list(values, f"{name} returned {column}, which") for column, values in returned.items()}
    if len(set(map(len, columns.values()))) != 1:
        text = ", ".join(f"{len(values)} {column}" for column, values in columns.items())
        raise PluginError(f"{name} returned lists of different lengths ({text}): return one entry per row")
    return columns


def _sample_of_row(entries: dict[str, Any], origin: Sample, tokenizer: PromptTokenizer) -> Sample:
    """Return a copy of the sample `origin` with the tokens, loss mask, log-probs and status of a row."""
    tokens, length = list(map(int, entries["tokens"])), int(entries["response_lengths"])
    logprobs, teacher_logprobs = entries.get("rollout_log_probs"), entries.get("teacher_log_probs")
    is_same = tokens == origin.token_ids
    rules = [
        (
            not 0 < length <= len(tokens),
            f"response_lengths is {length}, but there are {len(tokens)} tokens: give the number of response tokens",
        ),
        (
            origin.routed_experts is not None and not is_same,
            "its tokens differ from the sample's, for which the engine has recorded the experts: return the sample's "
            "tokens",
        ),
        (
            origin.teacher_logprobs is not None and teacher_logprobs is None and not is_same,
            "its tokens differ from the sample's: return the teacher_log_probs of these tokens",
        ),
    ]
    check_rules(rules, PluginError)
    if logprobs is None and is_same:
        logprobs = origin.rollout_logprobs
    view = UserSample(
        tokens=tokens,
        response_length=length,
        loss_mask=list(entries["loss_masks"]),
        rollout_log_probs=None if logprobs is None else list(logprobs),
        prompt=origin.prompt,
        response=origin.response,
    )
    if not is_same or length != origin.response_length:
        texts = tokenizer.decode([tokens[:-length], tokens[-length:]], skip_special_tokens=False)
        view.prompt, view.response = texts
    checked = checked_sample(view)
    if teacher_logprobs is not None:
        teacher_logprobs = [0.0] * (len(tokens) - len(teacher_logprobs)) + list(map(float, teacher_logprobs))
    status, metadata = origin.status, dict(origin.metadata)
    if (truncated := entries.get("truncated")) is not None:
        status = Status.TRUNCATED if truncated else Status.COMPLETED
    if checked.loss_mask != origin.loss_mask:
        metadata.pop("policy_spans", None)  # its numbers of tokens would be wrong for this row
    return replace(
        origin,
        **{name: getattr(checked, name) for name in ("prompt", "response", "token_ids", "loss_mask")},
        rollout_logprobs=checked.rollout_logprobs,
        teacher_logprobs=origin.teacher_logprobs if teacher_logprobs is None else teacher_logprobs,
        status=status,
        metadata=metadata,
    )


def _numbers(values: Any, length: int, name: str) -> list[float]:
    """Return `length` finite numbers. Raises PluginError."""
    values = as_list(values, f"{name} returned rewards, which")
    numbers, wrong = to_finite_numbers(dict(enumerate(values)))
    if len(values) != length or wrong:
        shown = f", of which {values[wrong[0]]!r:.80} is not a finite number" if wrong else ""
        raise PluginError(
            f"{name} returned {len(values)} rewards for {length} samples{shown}: return one finite number for each"
        )
    return list(numbers.values())
