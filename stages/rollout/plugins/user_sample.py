"""Define `UserSample`, the class of the samples that user-defined functions get and return: a `Sample` that has second
names for some fields, and may have further attributes.

`checked_sample` converts a UserSample to a Sample before the sample is written to a shard. It fills in missing optional
fields, and raises an error for inconsistent fields, with which the wrong tokens would be trained on. The caller
prepends the name of the user-defined function to the error.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.stages.rollout.prompts.data_source import copy_sample
from penstock.storage.errors import PluginError, check_rules
from penstock.storage.samples.sample import ATTRIBUTES, Sample
from penstock.storage.samples.sample import Status as SampleStatus

NAMES = [field.name for field in fields(Sample)]
LARGEST_LOGPROB = 1e-3  # log-probs may exceed 0 by a rounding error; larger values are probabilities
_DIGEST = re.compile(r"[0-9a-f]{64}")  # name of an image in the store
LARGEST_TOKEN = 2**31 - 1  # token ids are stored as int32
ALIASES = {"tokens": "token_ids", "loss_masks": "loss_mask", "rollout_log_probs": "rollout_logprobs"}


def _number_at_end(text: str) -> int | None:
    match = re.search(r"[0-9]+$", text)
    return int(match[0]) if match else None


def _alias_property(name: str) -> Any:
    """Return a property that is an alias of the attribute `name`."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value), doc=f"`{name}`")


class EngineAnswer(NamedTuple):
    """An engine's answer to a request that a user-defined function has sent itself."""

    request: list[int]  # token ids
    token_ids: list[int]
    logprobs: list[float]
    meta_info: dict[str, Any]


# Answers of the engines to the requests of the running call of a generate function.
ANSWERS: ContextVar[list[EngineAnswer] | None] = ContextVar("ANSWERS", default=None)


class JsonLabel(str):
    """A label that is a dictionary in the prompt data: JSON text whose entries can be read like a dictionary's."""

    def __getitem__(self, key: Any) -> Any:
        return json.loads(self)[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry of the dictionary."""
        return json.loads(self).get(key, default)


class UserSample(Sample):
    """A `Sample` for a user-defined function, created with `UserSample.of`, or by user-defined code as
    `Sample(prompt=..., tokens=..., ...)`; all fields are optional. `loss_mask` and `rollout_log_probs` may cover only
    the response tokens, or all tokens. Further attributes may be set; those that JSON can express are recorded in the
    metadata, and set on the samples of functions that are called later."""

    Status = SampleStatus
    remove_sample: bool = False  # the sample's reward counts in its group, but none of the sample's tokens is trained
    aborted: bool = False  # the round aborted an engine request for this sample

    group_index: int | None = None  # number of the prompt in the run
    index: int | None = None  # number of the sample in its group

    # Attributes that functions written for another trainer may read; Penstock does not use them.
    session_id = generate_function_path = custom_rm_path = train_metadata = None
    multimodal_inputs = multimodal_train_inputs = rollout_routed_experts = None
    rollout_top_p_token_ids = rollout_top_p_token_offsets = None
    non_generation_time: float = 0.0

    _untouched: tuple[list[Any], list[Any]]
    _unrecorded: Mapping[str, str] = MappingProxyType({})  # attribute that JSON cannot express -> its type

    def __init__(self, *values: Any, **named: Any) -> None:
        named = {ALIASES.get(name, name): value for name, value in named.items()}
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
        self._response_length, self._sets_length = len(self.token_ids) - prompt_length, False
        # A user-defined function has not set the loss mask or log-probs if they are still these list objects.
        self._untouched = (self.loss_mask, self.rollout_logprobs)

    @classmethod
    def of(cls, sample: Sample, prompt_length: int | None = None) -> UserSample:
        """Return a copy of `sample` as a UserSample. `prompt_length` (default: the tokens before the first trained one)
        is needed if the response may start with untrained tokens."""
        copied = copy_sample(sample)
        view = cls(**{name: getattr(copied, name) for name in NAMES})
        view._start_response(sample.prompt_length if prompt_length is None else prompt_length)
        view.label = JsonLabel(view.label) if view.label.startswith("{") else view.label
        if recorded := view.metadata.pop(ATTRIBUTES, None):
            vars(view).update(recorded["values"])
            view._unrecorded = recorded["unrecorded"]
        view.group_index, view.index = _number_at_end(sample.group_id), _number_at_end(sample.trajectory_id)
        return view

    def __getattr__(self, name: str) -> Any:
        kind = self._unrecorded.get(name)
        if kind is None:
            raise AttributeError(f"the sample has no attribute {name!r}")
        raise PluginError(
            f"the sample's attribute {name!r} was a {kind}, which is not passed on to other functions: set numbers, "
            "text, lists and dictionaries"
        )

    def restart(self, prompt: str, token_ids: Sequence[int]) -> None:
        """Replace the prompt and discard the response."""
        self.prompt, self.response, self.token_ids = prompt, "", list(token_ids)
        self.loss_mask, self.rollout_logprobs = [0] * len(token_ids), [0.0] * len(token_ids)
        self.routed_experts = None
        self.metadata.pop("policy_spans", None)
        self._start_response(len(token_ids))

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_trained: bool) -> None:
        """Append tokens to the response. Lists are extended in place, because a user-defined function may hold
        references to them."""
        for name, untouched, earlier in zip(("loss_mask", "rollout_logprobs"), self._untouched, (1, math.nan)):
            values = getattr(self, name)
            if values is None or (values is untouched and len(values) != len(self.token_ids)):  # replaced prompt
                setattr(self, name, [earlier] * self._response_length)
        super().extend(token_ids, logprobs, is_trained=is_trained)
        self._response_length += len(token_ids)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response: tokens generated by the model (`trainable`, with the engine's log-probs), or
        tokens from a tool or an environment (not `trainable`). `text` is appended to `response`; an empty `response` is
        later decoded. The status is set to the finish reason of `meta_info`, if `update_terminal_info`."""
        added = list(tokens)
        if trainable and len(log_probs or ()) != len(added):
            number = "no" if log_probs is None else str(len(log_probs))
            raise PluginError(
                f"{len(added)} trained tokens came with {number} log-probs: give one log-prob per token, or "
                "trainable=False for tool tokens"
            )
        self.extend(added, list(log_probs or ()) if trainable else [0.0] * len(added), is_trained=trainable)
        self.response += text or ""
        if meta_info and update_terminal_info:
            self.update_from_meta_info(args, meta_info)
        elif meta_info:
            self._add_weight_version(meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Set the status to the finish reason of the engine's response, and remember its weight version."""
        reason = (meta_info.get("finish_reason") or {}).get("type", "stop")
        self.status = {"length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}.get(
            reason, SampleStatus.COMPLETED
        )
        self.aborted |= reason == "abort"
        self._add_weight_version(meta_info)

    def _add_weight_version(self, meta_info: Mapping[str, Any]) -> None:
        self.weight_versions += [str(meta_info["weight_version"])] if "weight_version" in meta_info else []

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens. If a function has set the length of the response: all tokens before the response."""
        return len(self.token_ids) - self._response_length if self._sets_length else len(self._prompt_ids)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt. A function that replaces the tokens must set it if the prompt changes."""
        return self._response_length

    @response_length.setter
    def response_length(self, length: int) -> None:
        self._response_length, self._sets_length = length, True

    @property
    def effective_response_length(self) -> int:
        """Number of trained tokens."""
        return sum(_mask_and_logprobs(self)[0])

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or its entry `args.reward_key` if it is a dictionary."""
        return self.reward if not isinstance(self.reward, dict) else self.reward[args.reward_key]

    def take_answers(self, answers: Sequence[EngineAnswer]) -> None:
        """Record the weight versions of the engine's answers whose request and tokens are at the start of this sample,
        and set their log-probs, unless the user-defined function has set log-probs."""
        tokens, logprobs = _token_ids(self), [math.nan] * len(self.token_ids)
        for answer in answers:
            start, end = len(answer.request), len(answer.request) + len(answer.token_ids)
            if tokens[:start] == answer.request and tokens[start:end] == answer.token_ids:
                logprobs[start:end] = answer.logprobs
                self._add_weight_version(answer.meta_info)
        is_set = _pad_to_all_tokens(self, self.rollout_logprobs, self._untouched[1], "rollout_log_probs") is not None
        if not is_set and not all(map(math.isnan, logprobs)):
            self.rollout_logprobs = logprobs

    # `ALIASES` as attributes; `checked_sample` converts their values to lists.
    tokens = _alias_property("token_ids")
    loss_masks = _alias_property("loss_mask")
    rollout_log_probs = _alias_property("rollout_logprobs")


def checked_sample(sample: Sample, prompt_length: int | None = None) -> Sample:
    """Check a sample that a user-defined function has returned, and return it as a plain `Sample` whose loss mask and
    log-probs have one entry per token. If the function has not set the loss mask, all response tokens are trained.
    Status `pending` becomes `completed`. `prompt_length`: see `UserSample.of`. Raises PluginError."""
    if not isinstance(sample, UserSample):
        sample = UserSample.of(sample, prompt_length)
    values = {name: getattr(sample, name) for name in NAMES}
    values["token_ids"] = _token_ids(sample)
    num_prompt = sample.prompt_length
    mask, logprobs = _mask_and_logprobs(sample)
    values["images"] = as_list(sample.images, "images")
    strange = [name for name in values["images"] if not (isinstance(name, str) and _DIGEST.fullmatch(name))]
    rules = [
        (
            sample.status not in [*SampleStatus],
            f"the sample's status is {sample.status!r}: set one of {', '.join(SampleStatus)}",
        ),
        (any(mask[:num_prompt]), "loss_mask is 1 on tokens of the prompt: set loss_mask to 0 on prompt tokens"),
        (
            strange,
            f"the sample's images hold {', '.join(map(repr, strange)):.80}: keep the names that the prompt's sample "
            "has",
        ),
        *(
            (
                not isinstance(values[name], str),
                f"{name} of the sample has type {type(values[name]).__name__}: set it to a string",
            )
            for name in ("prompt", "response")
        ),
    ]
    check_rules(rules, PluginError)
    (values["prompt"] + values["response"]).encode()  # raise for a lone surrogate here, not when the round is written
    status = SampleStatus(sample.status)
    values["status"] = SampleStatus.COMPLETED if status is SampleStatus.PENDING else status
    if sample.remove_sample:
        mask = [0] * len(mask)
    values["loss_mask"] = mask
    values["rollout_logprobs"] = [
        _to_logprob(logprob, position - num_prompt) if trained else 0.0
        for position, (trained, logprob) in enumerate(zip(mask, logprobs))
    ]
    values["metadata"] = _json_copy(sample.metadata)
    if (attributes := _attributes(sample)) != {"values": {}, "unrecorded": {}}:
        values["metadata"][ATTRIBUTES] = attributes
    values["label"] = "" if sample.label is None else str(sample.label)
    return Sample(**values)


def _token_ids(sample: UserSample) -> list[int]:
    """Return the token ids, which must start with the tokens of the prompt, unless the function has set another prompt,
    and have room for the length of the response. Raises PluginError."""
    try:
        token_ids = [operator.index(token) for token in as_list(sample.token_ids, "tokens")]
    except TypeError as error:
        raise PluginError(f"the sample's tokens are not integers ({error}): set `tokens` to token ids") from None
    own = len(sample._prompt_ids)
    keeps_prompt = tuple(token_ids[:own]) == sample._prompt_ids
    num_after = len(token_ids) - own * keeps_prompt
    problem = None
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= LARGEST_TOKEN:
        problem = (
            f"the sample's token ids range from {min(token_ids)} to {max(token_ids)}: they must be at least 0 and "
            "below 2**31"
        )
    elif not keeps_prompt and not sample._sets_length:
        problem = (
            f"the sample's tokens do not start with the {own} tokens of the prompt: keep the prompt tokens, or set "
            "another prompt with sample.restart(prompt, token_ids), or response_length"
        )
    elif sample._sets_length and not 0 <= sample.response_length <= num_after:
        problem = (
            f"response_length is {sample.response_length}, but {num_after} tokens follow the prompt: do not set "
            "response_length, or correct response_length or the tokens"
        )
    if problem is not None:
        raise PluginError(problem)
    return token_ids


def _mask_and_logprobs(sample: UserSample) -> tuple[list[int], list[float]]:
    """Return the loss mask and the log-probs of all tokens. If given only for the response, prepend zeros."""
    num_response = len(sample.token_ids) - sample.prompt_length
    mask = _pad_to_all_tokens(sample, sample.loss_mask, sample._untouched[0], "loss_mask")
    if mask is None:
        mask = [0] * sample.prompt_length + [1] * num_response
    wrong = next((value for value in mask if value not in (0, 1)), 0)
    logprobs = _pad_to_all_tokens(sample, sample.rollout_logprobs, sample._untouched[1], "rollout_log_probs")
    rules = [
        (wrong != 0, f"loss_mask holds {wrong}: use only 0 and 1"),
        (
            logprobs is None and any(mask) and not sample.remove_sample,
            "the sample has trained tokens without log-probs: generate the tokens with engine.generate, or set "
            "rollout_log_probs to the log-probs that the engine returned",
        ),
    ]
    check_rules(rules, PluginError)
    return [int(value) for value in mask], logprobs or [0.0] * len(mask)


def _pad_to_all_tokens(sample: UserSample, value: Any, untouched: list[Any], name: str) -> list[Any] | None:
    """Return `value` with one entry per token (0 for prompt tokens); None if the user-defined function has not set it,
    so that it is still the list `untouched`."""
    num_prompt, num_tokens, own = sample.prompt_length, len(sample.token_ids), len(sample._prompt_ids)
    if value is None or (value is untouched and len(untouched) == own and num_tokens != own):
        return None
    stream = as_list(value, name)
    if len(stream) not in (num_tokens - num_prompt, num_tokens):
        raise PluginError(
            f"{name} has {len(stream)} entries for a response of {num_tokens - num_prompt} tokens after a prompt of "
            f"{num_prompt}: give {num_tokens - num_prompt} entries, or {num_tokens} for all tokens"
        )
    return [0] * (num_tokens - len(stream)) + stream


def _to_logprob(value: Any, position: int) -> float:
    try:
        logprob = float(value)
    except (TypeError, ValueError):
        logprob = math.nan
    if not (math.isfinite(logprob) and logprob <= LARGEST_LOGPROB):
        raise PluginError(
            f"the log-prob of token {position} of the response is {value!r}: give a finite number of at most 0"
        )
    return logprob


def _attributes(sample: UserSample) -> dict[str, Any]:
    """Return the further attributes of a sample: their values, and the types of those that JSON cannot express."""
    own = ("remove_sample", "aborted", "group_index", "index", "weight_versions")
    unrecorded, values = dict(sample._unrecorded), {}
    for name, value in vars(sample).items():
        if name.startswith("_") or name in own or (value is None and hasattr(UserSample, name)):
            continue
        unrecorded.pop(name, None)
        try:
            values[name] = json.loads(json.dumps(value, ensure_ascii=False).encode())
        except (TypeError, ValueError):
            unrecorded[name] = type(value).__name__
    return {"values": values, "unrecorded": unrecorded}


def _json_copy(metadata: Any) -> dict[str, Any]:
    """Return the metadata after a round trip through JSON, in the form in which it will be read from the shard."""
    problem = text = ""
    try:
        text = json.dumps(metadata, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        problem = f"cannot be written as JSON ({error}): use only numbers, text, lists and dictionaries"
    if not isinstance(metadata, dict):
        problem = f"is a {type(metadata).__name__}: set it to a dictionary"
    if problem:
        raise PluginError(f"the sample's metadata {problem}")
    return dict(json.loads(text))


def as_list(value: Any, name: str) -> list[Any]:
    """Return a list, tuple, array or tensor as a list. Raises PluginError, whose message begins with `name`."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise PluginError(f"{name} is a {type(value).__name__}: it must be a list")
    return list(value)
