"""Define `UserSample`, the class of the samples that user-defined functions get and return: a `Sample` whose fields
also have slime's names, and which may have further attributes.

`checked_sample` converts a UserSample to a Sample before the sample is written to a shard. It fills in missing optional
fields, and raises an error for inconsistent fields, which would train on the wrong tokens. The caller prepends the name
of the user-defined function to the error.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.stages.rollout.prompts.data_source import copy_sample
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.sample import Status as SampleStatus

NAMES = [field.name for field in fields(Sample)]
LARGEST_LOGPROB = 1e-3  # log-probs may exceed 0 by a rounding error; larger values are probabilities
LARGEST_TOKEN = 2**31 - 1  # token ids are stored as int32


SLIME_NAMES = {"tokens": "token_ids", "loss_masks": "loss_mask", "rollout_log_probs": "rollout_logprobs"}


def _number_at_end(text: str) -> int | None:
    match = re.search(r"[0-9]+$", text)
    return int(match[0]) if match else None


def _alias_property(name: str) -> Any:
    """Return a property that is an alias of the attribute `name`."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value), doc=f"`{name}`")


class UserSample(Sample):
    """A `Sample` for a user-defined function, created with `UserSample.of`. Further attributes may be set. User-defined
    code may also create one, as `Sample(prompt=..., tokens=..., ...)` with slime's names; all are optional.

    `loss_mask` and `rollout_log_probs` may cover only the response tokens, or all tokens. To return several samples for
    one prompt, copy the given sample with `copy.deepcopy`.
    """

    Status = SampleStatus
    remove_sample: bool = False  # the sample's reward counts in its group, but none of the sample's tokens is trained
    aborted: bool = False  # the round aborted an engine request for this sample

    group_index: int | None = None  # number of the prompt in the run
    index: int | None = None  # number of the sample in its group

    _response_length: int | None = None
    _untouched: tuple[list[Any], list[Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
        named = {SLIME_NAMES.get(name, name): value for name, value in named.items()}
        fields_given = {name: value for name, value in named.items() if name in NAMES}
        missing = {name: -1 if name == "rollout_id" else "" for name in NAMES[len(values) : 4]}
        super().__init__(*values, **{**missing, **fields_given})
        self.weight_versions: list[str] = []  # weight versions in the `meta_info` given to `append_response_tokens`
        length = named.get("response_length")
        if length is None:
            self._start_response(Sample.prompt_length.fget(self))  # type: ignore[attr-defined]
        else:
            self._start_response(len(self.token_ids) - length)
            self._untouched = ([], [])
        for name in named.keys() - fields_given.keys() - {"response_length"}:
            setattr(self, name, named[name])

    def _start_response(self, prompt_length: int) -> None:
        self._prompt_ids = tuple(self.token_ids[:prompt_length])
        # A field that is still the same object after the call was not set by the user-defined function.
        self._untouched = (self.loss_mask, self.rollout_logprobs)

    @classmethod
    def of(cls, sample: Sample, prompt_length: int | None = None) -> UserSample:
        """Return a copy of `sample` as a UserSample.

        Args:
            sample: the sample to copy.
            prompt_length: number of prompt tokens; None: the number of tokens before the first trained token. Needed if
                the response may start with untrained tokens.
        """
        copied = copy_sample(sample)
        view = cls(**{name: getattr(copied, name) for name in NAMES})
        view._start_response(sample.prompt_length if prompt_length is None else prompt_length)
        view.group_index, view.index = _number_at_end(sample.group_id), _number_at_end(sample.trajectory_id)
        return view

    def restart(self, prompt: str, token_ids: Sequence[int]) -> None:
        """Replace the prompt and discard the response."""
        self.prompt, self.response, self.token_ids = prompt, "", list(token_ids)
        self.loss_mask, self.rollout_logprobs = [0] * len(token_ids), [0.0] * len(token_ids)
        self.routed_experts, self._response_length = None, None
        self.metadata.pop("policy_spans", None)
        self._start_response(len(token_ids))

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Append tokens to the response: tokens generated by the model (`trainable`, with the engine's log-probs), or
        tokens from a tool or an environment (not `trainable`).

        Args:
            tokens: token ids.
            log_probs: log-prob of every token; ignored if the tokens are not trainable.
            trainable: whether the model generated the tokens.
            meta_info: `meta_info` of SGLang's response; the finish reason and weight version in it are used.
            text: text of the tokens, appended to `response`. An empty `response` is later decoded from the tokens.

        Raises:
            PluginError: `trainable` is true, and the number of log-probs differs from the number of tokens.
        """
        added = list(tokens)
        if trainable and (log_probs is None or len(log_probs) != len(added)):
            number = "no" if log_probs is None else str(len(log_probs))
            raise PluginError(
                f"{len(added)} trained tokens came with {number} log-probs: give one log-prob per token, or "
                "trainable=False for tool tokens"
            )
        mask, logprobs = _mask_and_logprobs(self)
        self.token_ids = [*self.token_ids, *added]
        self.loss_mask = mask + [int(trainable)] * len(added)
        self.rollout_logprobs = logprobs + (list(log_probs or ()) if trainable else [0.0] * len(added))
        self._response_length = None
        self.response += text or ""
        if meta_info:
            reason = (meta_info.get("finish_reason") or {}).get("type", "stop")
            self.status = {"length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}.get(
                reason, SampleStatus.COMPLETED
            )
            self.aborted |= reason == "abort"
            self.weight_versions += [str(meta_info["weight_version"])] if "weight_version" in meta_info else []

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self._prompt_ids)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt. If a function sets it, `checked_sample` checks the value."""
        return len(self.token_ids) - self.prompt_length if self._response_length is None else self._response_length

    @response_length.setter
    def response_length(self, length: int) -> None:
        self._response_length = length

    @property
    def effective_response_length(self) -> int:
        """Number of trained tokens."""
        return sum(_mask_and_logprobs(self)[0])

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or its entry `args.reward_key` if it is a dictionary."""
        return self.reward if not isinstance(self.reward, dict) else self.reward[args.reward_key]

    # slime's names; `checked_sample` converts their values to lists.
    tokens = _alias_property("token_ids")
    loss_masks = _alias_property("loss_mask")
    rollout_log_probs = _alias_property("rollout_logprobs")


def checked_sample(sample: Sample, prompt_length: int | None = None) -> Sample:
    """Check a sample that a user-defined function has returned, and return it as a plain `Sample` whose loss mask and
    log-probs have one entry per token.

    If the function has not set the loss mask, all response tokens are trained. Status `pending` becomes `completed`.

    Args:
        sample: the returned sample.
        prompt_length: number of prompt tokens, if `sample` is not a UserSample; see `UserSample.of`.

    Raises:
        PluginError: the sample cannot be trained on or written to a shard; the message says why.
    """
    if not isinstance(sample, UserSample):
        sample = UserSample.of(sample, prompt_length)
    values = {name: getattr(sample, name) for name in NAMES}
    values["token_ids"] = token_ids = _token_ids(sample)
    num_prompt = sample.prompt_length
    if tuple(token_ids[:num_prompt]) != sample._prompt_ids:
        raise PluginError(
            f"the sample's tokens do not start with the {num_prompt} tokens of the prompt: keep the prompt tokens, or "
            "set another prompt with sample.restart(prompt, token_ids)"
        )
    if sample.response_length != len(token_ids) - num_prompt:
        raise PluginError(
            f"response_length is {sample.response_length}, but {len(token_ids) - num_prompt} tokens follow the prompt: "
            "do not set response_length, or correct response_length or the tokens"
        )
    try:
        values["status"] = SampleStatus(sample.status)
    except ValueError:
        raise PluginError(f"the sample's status is {sample.status!r}: set one of {', '.join(SampleStatus)}") from None
    if values["status"] is SampleStatus.PENDING:
        values["status"] = SampleStatus.COMPLETED
    mask, logprobs = _mask_and_logprobs(sample)
    if any(mask[:num_prompt]):
        raise PluginError("loss_mask is 1 on tokens of the prompt: set loss_mask to 0 on prompt tokens")
    if sample.remove_sample:
        mask = [0] * len(mask)
    values["loss_mask"] = mask
    values["rollout_logprobs"] = [
        _checked_logprob(logprob, position - num_prompt) if trained else 0.0
        for position, (trained, logprob) in enumerate(zip(mask, logprobs))
    ]
    values["metadata"] = _json_copy(sample.metadata)
    for name in ("prompt", "response"):
        if not isinstance(values[name], str):
            raise PluginError(f"{name} is a {type(values[name]).__name__}: set it to text")
        values[name].encode()  # raise for a lone surrogate here, not when the round is written
    return Sample(**values)


def _token_ids(sample: UserSample) -> list[int]:
    try:
        token_ids = [operator.index(token) for token in _as_list(sample.token_ids, "tokens")]
    except TypeError as error:
        raise PluginError(f"the sample's tokens are not integers ({error}): set `tokens` to token ids") from None
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= LARGEST_TOKEN:
        raise PluginError(
            f"the sample's token ids range from {min(token_ids)} to {max(token_ids)}: they must be at least 0 and "
            "below 2**31"
        )
    return token_ids


def _mask_and_logprobs(sample: UserSample) -> tuple[list[int], list[float]]:
    """Return the loss mask and the log-probs of all tokens. If given only for the response, prepend zeros."""
    num_response = len(sample.token_ids) - sample.prompt_length
    mask = _pad_to_all_tokens(sample, sample.loss_mask, sample._untouched[0], "loss_mask")
    if mask is None:
        mask = [0] * sample.prompt_length + [1] * num_response
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise PluginError(f"loss_mask holds {wrong[0]}: use only 0 and 1")
    logprobs = _pad_to_all_tokens(sample, sample.rollout_logprobs, sample._untouched[1], "rollout_log_probs")
    if logprobs is None and any(mask) and not sample.remove_sample:
        raise PluginError(
            "the sample has trained tokens without log-probs: generate the tokens with engine.generate, or set "
            "rollout_log_probs to the log-probs that the engine returned"
        )
    return [int(value) for value in mask], logprobs or [0.0] * len(mask)


def _pad_to_all_tokens(sample: UserSample, value: Any, untouched: list[Any], name: str) -> list[Any] | None:
    """Return `value` with one entry per token (0 for prompt tokens); None if the user function did not set it."""
    num_prompt, num_tokens = sample.prompt_length, len(sample.token_ids)
    if value is None or (value is untouched and len(untouched) == num_prompt and num_tokens != num_prompt):
        return None
    stream = _as_list(value, name)
    if len(stream) not in (num_tokens - num_prompt, num_tokens):
        raise PluginError(
            f"{name} has {len(stream)} entries for a response of {num_tokens - num_prompt} tokens after a prompt of "
            f"{num_prompt}: give {num_tokens - num_prompt} entries, or {num_tokens} for all tokens"
        )
    return [0] * (num_tokens - len(stream)) + stream


def _checked_logprob(value: Any, position: int) -> float:
    try:
        logprob = float(value)
    except (TypeError, ValueError):
        logprob = math.nan
    if not (math.isfinite(logprob) and logprob <= LARGEST_LOGPROB):
        raise PluginError(
            f"the log-prob of token {position} of the response is {value!r}: give a finite number of at most 0"
        )
    return logprob


def _json_copy(metadata: Any) -> dict[str, Any]:
    """Return the metadata after a round trip through JSON, in the form in which it will be read from the shard."""
    if not isinstance(metadata, dict):
        raise PluginError(f"the sample's metadata is a {type(metadata).__name__}: set it to a dictionary")
    try:
        text = json.dumps(metadata, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"the sample's metadata cannot be written as JSON ({error}): use only numbers, text, lists and dictionaries"
        ) from None
    return dict(json.loads(text))


def _as_list(value: Any, name: str) -> list[Any]:
    """Return a list, tuple, array or tensor as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise PluginError(f"{name} is a {type(value).__name__}: it must be a list")
    return list(value)
