"""Call the user-defined functions between the samples of a round and the data that the trainer gets:

    def post_process(args, samples) -> (raw_rewards, rewards)       --custom-reward-post-process-path
    def convert(args, samples) -> dictionary of lists               --custom-convert-samples-to-train-data-path

They are called before the round's commit, with its graded samples. Everything that they change is in the shards, where
the trainer, a resumed run and a replay read it. `rewards` become the component TRAIN_REWARD of the samples' rewards,
which advantage estimators use as they are, without normalizing them within groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from penstock.stages.plugins import DEFAULT_NAMES, Plugin
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import TRAIN_REWARD, Sample, Status

REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks")
OPTIONAL = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "rollout_log_probs", "teacher_log_probs")


def load_train_data_function(config: RolloutConfig) -> Plugin | None:
    """Load the function of one of the two options, if one is given. Raises PluginError."""
    for option in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        if path := getattr(config, option):
            name = DEFAULT_NAMES[option]
            return Plugin(path, ("args", "samples"), default_name=name, timeout=config.reward_timeout)
    return None


def make_train_data(samples: list[Sample], config: RolloutConfig, tokenizer: PromptTokenizer) -> list[Sample]:
    """Return the samples to train on, as changed by the function that `config` names; without one, `samples`.

    Args:
        samples: samples of the round. The function gets those that have a reward; the others are not trained on, and
            follow the changed ones.
        config: names the function; its options are attributes of `args`.
        tokenizer: decodes tokens that the function has changed.

    Raises:
        PluginError: the function raises, exceeds --reward-timeout, or returns something that cannot be recorded.
    """
    plugin = load_train_data_function(config)
    if plugin is None:
        return samples
    graded = [sample for sample in samples if sample.reward is not None]
    others = [sample for sample in samples if sample.reward is None]
    if not graded:
        return samples
    views = [UserSample.of(sample) for sample in graded]
    for index, view in enumerate(views):
        view.index = index  # `sample_indices` refer to it
    returned = plugin(SimpleNamespace(**config.plugin_arguments()), views)
    if config.custom_reward_post_process_path:
        _set_rewards(graded, returned, plugin.name)
        return samples
    rows = _Rows(returned, graded, plugin.name, tokenizer)
    return rows.samples({sample.sample_id for sample in others}) + others


def _set_rewards(samples: Sequence[Sample], returned: Any, name: str) -> None:
    """Set the rewards and train rewards of samples from (raw_rewards, rewards)."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise PluginError(f"{name} returned {type(returned).__name__}: return the two lists (raw_rewards, rewards)")
    raw, rewards = (_numbers(values, len(samples), name) for values in returned)
    for sample, raw_reward, reward in zip(samples, raw, rewards):
        sample.reward, sample.rewards = raw_reward, {**sample.rewards, TRAIN_REWARD: reward}


class _Rows:
    """The dictionary that a conversion returned: lists with one entry per row to train on.

    Args:
        returned: the dictionary.
        origins: the samples that the function got, to which `sample_indices` refer.
        name: of the function, for messages.
        tokenizer: decodes the tokens of rows that differ from their samples.
    """

    def __init__(self, returned: Any, origins: Sequence[Sample], name: str, tokenizer: PromptTokenizer) -> None:
        self.name, self.origins, self.tokenizer = name, origins, tokenizer
        self.columns = self._columns(returned)
        self.num_rows = len(self.columns["tokens"])
        self.index = self._sample_indices()
        self.rewards = _numbers(self.columns["rewards"], self.num_rows, name)
        own = [origins[index].reward for index in self.index]
        self.raw_rewards = _numbers(self.columns.get("raw_reward", own), self.num_rows, name)
        self._check_rollout_ids()

    def samples(self, taken: set[str]) -> list[Sample]:
        """Return one sample per row, with ids that are not among `taken`."""
        out = []
        for row in range(self.num_rows):
            try:
                sample = self._sample(row)
            except (TypeError, ValueError) as error:  # PluginError among them
                raise PluginError(f"{self.name}, row {row}: {error}") from error
            trajectory = sample.trajectory_id
            ids = (f"{trajectory}.{number}" if number else trajectory for number in count())
            sample.sample_id = next(id for id in ids if id not in taken)
            taken.add(sample.sample_id)
            out.append(sample)
        return out

    def _sample(self, row: int) -> Sample:
        origin = self.origins[self.index[row]]
        tokens, length = list(map(int, self.columns["tokens"][row])), int(self.columns["response_lengths"][row])
        if not 0 < length <= len(tokens):
            raise PluginError(f"response_lengths is {length}, but there are {len(tokens)} tokens: count the response")
        is_same = tokens == origin.token_ids
        logprobs = self._entry("rollout_log_probs", row)
        if logprobs is None and is_same:
            logprobs = origin.rollout_logprobs
        if origin.routed_experts is not None and not is_same:
            raise PluginError("its tokens differ from the sample's, whose experts are recorded per token: keep them")
        view = UserSample(
            tokens=tokens,
            response_length=length,
            loss_mask=list(self.columns["loss_masks"][row]),
            rollout_log_probs=None if logprobs is None else list(logprobs),
            prompt=origin.prompt,
            response=origin.response,
        )
        if not is_same or length != origin.response_length:
            texts = self.tokenizer.decode([tokens[:-length], tokens[-length:]], skip_special_tokens=False)
            view.prompt, view.response = texts
        checked = checked_sample(view)
        metadata = dict(origin.metadata)
        if checked.loss_mask != origin.loss_mask:
            metadata.pop("policy_spans", None)  # numbers of trained tokens that are not those of this row
        return replace(
            origin,
            **{name: getattr(checked, name) for name in ("prompt", "response", "token_ids", "loss_mask")},
            rollout_logprobs=checked.rollout_logprobs,
            teacher_logprobs=self._teacher_logprobs(row, origin, len(tokens), is_same),
            reward=self.raw_rewards[row],
            rewards={**origin.rewards, TRAIN_REWARD: self.rewards[row]},
            status=self._status(row, origin),
            metadata=metadata,
        )

    def _teacher_logprobs(self, row: int, origin: Sample, num_tokens: int, is_same: bool) -> list[float] | None:
        logprobs = self._entry("teacher_log_probs", row)
        if logprobs is not None:
            return [0.0] * (num_tokens - len(logprobs)) + list(map(float, logprobs))
        if origin.teacher_logprobs is not None and not is_same:
            raise PluginError("its tokens differ from the sample's: return the teacher_log_probs of its response")
        return origin.teacher_logprobs

    def _status(self, row: int, origin: Sample) -> Status:
        truncated = self._entry("truncated", row)
        if truncated is None:
            return origin.status
        return Status.TRUNCATED if truncated else Status.COMPLETED

    def _entry(self, name: str, row: int) -> Any:
        return self.columns[name][row] if name in self.columns else None

    def _columns(self, returned: Any) -> dict[str, list[Any]]:
        """Return the columns as lists. Raises PluginError if they are not the known ones, or of different lengths."""
        if not isinstance(returned, Mapping):
            raise PluginError(f"{self.name} returned {type(returned).__name__}: return a dictionary of lists")
        if unknown := sorted(map(str, returned.keys() - {*REQUIRED, *OPTIONAL})):
            raise PluginError(
                f"{self.name} returned {', '.join(unknown)}, which shards have no column for, so that a replay would "
                f"miss them: return {', '.join(REQUIRED)} and perhaps {', '.join(OPTIONAL)}"
            )
        if missing := [name for name in REQUIRED if name not in returned]:
            raise PluginError(f"{self.name} returned no {missing[0]}: return {', '.join(REQUIRED)}")
        columns = {name: _to_list(values) for name, values in returned.items()}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            text = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise PluginError(f"{self.name} returned lists of different lengths ({text}): return one entry per row")
        return columns

    def _sample_indices(self) -> list[int]:
        """Return the index of each row's sample. Raises PluginError if a sample has no row."""
        num_samples = len(self.origins)
        indices = [int(index) for index in self.columns.get("sample_indices", range(self.num_rows))]
        if strange := next((index for index in indices if not 0 <= index < num_samples), None):
            raise PluginError(
                f"{self.name} returned the sample index {strange} for {num_samples} samples: return sample_indices "
                "with the `index` of each row's sample"
            )
        if missing := sorted(set(range(num_samples)) - set(indices)):
            raise PluginError(
                f"{self.name} returned no row of sample {missing[0]}, but optimizer steps need all: set its loss_masks "
                "to 0 to exclude it"
            )
        return indices

    def _check_rollout_ids(self) -> None:
        ids = list(map(str, self.columns.get("rollout_ids", ())))
        trajectories = [self.origins[index].trajectory_id for index in self.index]
        if ids and not len(set(ids)) == len(set(trajectories)) == len(set(zip(ids, trajectories))):
            raise PluginError(
                f"{self.name} returned rollout_ids that are not one per sample of the generation: give rows of one "
                "sample the same id, or omit rollout_ids"
            )


def _to_list(values: Any) -> list[Any]:
    """Return a list, an array or a tensor as a list."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _numbers(values: Any, length: int, name: str) -> list[float]:
    """Return `length` finite numbers. Raises PluginError."""
    try:
        numbers = [float(value) for value in _to_list(values)]
    except (TypeError, ValueError) as error:
        raise PluginError(f"{name} returned rewards that are not numbers ({error}): return lists of numbers") from None
    if len(numbers) != length or not all(map(math.isfinite, numbers)):
        raise PluginError(
            f"{name} returned {len(numbers)} rewards for {length} samples, or rewards that are not finite: return one "
            "finite number for each"
        )
    return numbers
