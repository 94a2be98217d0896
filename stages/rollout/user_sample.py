"""What a user's function gets and gives back as a sample: `Sample` with slime's spellings, any attribute, and a check at the end.

`taken` is the only way from here into a shard. It fills in what may be left out and refuses everything else: a sample that trains on
the wrong tokens is worse than one that is missing. Which function it was, and what becomes of a refusal, is the caller's.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from stages.rollout.round import copied
from storage.errors import PluginError
from storage.sample import Sample
from storage.sample import Status as SampleStatus

NAMES = [field.name for field in fields(Sample)]
LARGEST_LOGPROB = 1e-3  # of a certain token, after rounding; probabilities given instead are above it
LARGEST_TOKEN = 2**31 - 1  # what a shard's int32 holds


def _spelling_of(name: str) -> Any:
    """An attribute that is another one under another name."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value), doc=f"`{name}`")


class UserSample(Sample):
    """A `Sample` for a user's function; made by `of`. It has no slots, so that any attribute may be set on it.

    `loss_mask` and `rollout_log_probs` may be given for the response alone or for all tokens. `copy.deepcopy` makes a sibling.
    """

    Status = SampleStatus
    remove_sample: bool = False  # keep it, its reward counts, but train on none of its tokens
    aborted: bool = False  # an engine call for it was stopped from outside

    _response_length: int | None = None

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.weight_versions: list[str] = []  # that `append_response_tokens` was told
        self._begin(Sample.prompt_length.fget(self))  # type: ignore[attr-defined]

    def _begin(self, prompt_length: int) -> None:
        self._prompt_ids = tuple(self.token_ids[:prompt_length])
        self._untouched = (self.loss_mask, self.rollout_logprobs)  # to tell "not said" from "as long as the prompt"

    @classmethod
    def of(cls, sample: Sample, prompt_length: int | None = None) -> UserSample:
        """A copy of `sample`. `prompt_length` is needed if the response may begin with tokens that are not trained."""
        given = copied(sample)
        made = cls(**{name: getattr(given, name) for name in NAMES})
        made._begin(sample.prompt_length if prompt_length is None else prompt_length)
        return made

    def restart(self, prompt: str, token_ids: Sequence[int]) -> None:
        """Begin anew with another prompt than the row's; what there was of a response is gone."""
        self.prompt, self.response, self.token_ids = prompt, "", list(token_ids)
        self.loss_mask, self.rollout_logprobs = [0] * len(token_ids), [0.0] * len(token_ids)
        self.routed_experts, self._response_length = None, None
        self.metadata.pop("policy_spans", None)
        self._begin(len(token_ids))

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Append what the model wrote (`trainable`, with the engine's log-probs), or what a tool or an environment did (without).

        Args:
            tokens: any number.
            log_probs: one per token; of tool tokens they are not asked for.
            trainable: whether the model wrote them.
            meta_info: SGLang's, of the answer: finish reason and weight version.
            text: what the tokens say, for `response`; decoded at the end if no piece is given.

        Raises:
            PluginError: trained tokens without a log-prob each.
        """
        given = list(tokens)
        if trainable and (log_probs is None or len(log_probs) != len(given)):
            found = "none" if log_probs is None else str(len(log_probs))
            raise PluginError(
                f"{len(given)} trained tokens came with {found} log-probs: give one for each, or say trainable=False of tool tokens"
            )
        mask, logprobs = _streams(self)
        self.token_ids = [*self.token_ids, *given]
        self.loss_mask = mask + [int(trainable)] * len(given)
        self.rollout_logprobs = logprobs + (list(log_probs or ()) if trainable else [0.0] * len(given))
        self._response_length = None
        self.response += text or ""
        if meta_info:
            reason = (meta_info.get("finish_reason") or {}).get("type", "stop")
            self.status = {"length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}.get(reason, SampleStatus.COMPLETED)
            self.aborted |= reason == "abort"
            self.weight_versions += [str(meta_info["weight_version"])] if "weight_version" in meta_info else []

    @property
    def prompt_length(self) -> int:
        """Number of tokens that are the prompt."""
        return len(self._prompt_ids)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt. It may be set, and is then compared with the tokens."""
        return len(self.token_ids) - self.prompt_length if self._response_length is None else self._response_length

    @response_length.setter
    def response_length(self, length: int) -> None:
        self._response_length = length

    # In slime's spelling; `taken` makes lists of what they are set to.
    tokens = _spelling_of("token_ids")
    loss_masks = _spelling_of("loss_mask")
    rollout_log_probs = _spelling_of("rollout_logprobs")


def taken(sample: Sample, prompt_length: int | None = None) -> Sample:
    """A plain sample of what a user's function has made of one, all streams as long as its tokens.

    A mask that was never touched means that every response token is trained; a status that is still `pending` means `completed`.

    Args:
        sample: what it has made.
        prompt_length: of a plain sample whose response may begin with tokens that are not trained.

    Raises:
        PluginError: it cannot be trained on or not be written down; the sentence says why.
    """
    if not isinstance(sample, UserSample):
        sample = UserSample.of(sample, prompt_length)
    values = {name: getattr(sample, name) for name in NAMES}
    values["token_ids"] = token_ids = _token_ids(sample)
    num_prompt = sample.prompt_length
    if tuple(token_ids[:num_prompt]) != sample._prompt_ids:
        raise PluginError(
            f"its tokens do not begin with the {num_prompt} tokens of the prompt: keep those, or begin with sample.restart(prompt, token_ids)"
        )
    if sample.response_length != len(token_ids) - num_prompt:
        raise PluginError(
            f"response_length is {sample.response_length}, but {len(token_ids) - num_prompt} tokens come after the prompt: "
            "leave it out, or correct one of them"
        )
    values["status"] = _status(sample)
    mask, logprobs = _streams(sample)
    if any(mask[:num_prompt]):
        raise PluginError("loss_mask trains on tokens of the prompt: it must be 0 there")
    if sample.remove_sample:
        mask = [0] * len(mask)
    values["loss_mask"] = mask
    values["rollout_logprobs"] = [
        _logprob(logprob, position - num_prompt) if trained else 0.0
        for position, (trained, logprob) in enumerate(zip(mask, logprobs))
    ]
    values["metadata"] = _plain(sample.metadata)
    for name in ("prompt", "response"):
        if not isinstance(values[name], str):
            raise PluginError(f"{name} is a {type(values[name]).__name__}: it must be text")
        values[name].encode()  # a lone surrogate is a ValueError here, and would end the round when it is written
    return Sample(**values)


def _token_ids(sample: UserSample) -> list[int]:
    try:
        token_ids = [operator.index(token) for token in _listed(sample.token_ids, "tokens")]
    except TypeError as error:
        raise PluginError(f"its tokens are no whole numbers ({error}): give token ids") from None
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= LARGEST_TOKEN:
        raise PluginError(
            f"its tokens go from {min(token_ids)} to {max(token_ids)}: a token id is 0 or more, and less than 2**31"
        )
    return token_ids


def _streams(sample: UserSample) -> tuple[list[int], list[float]]:
    """Mask and log-probs of all tokens, zeros on the prompt, whichever of the two lengths they were given in."""
    num_response = len(sample.token_ids) - sample.prompt_length
    mask = _stream(sample, sample.loss_mask, sample._untouched[0], "loss_mask")
    if mask is None:
        mask = [0] * sample.prompt_length + [1] * num_response
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise PluginError(f"loss_mask holds {wrong[0]}: only 0 and 1 are allowed")
    logprobs = _stream(sample, sample.rollout_logprobs, sample._untouched[1], "rollout_log_probs")
    if logprobs is None and any(mask) and not sample.remove_sample:
        raise PluginError(
            "it has trained tokens without log-probs: write them with engine.generate, or set rollout_log_probs to the engine's"
        )
    return [int(value) for value in mask], logprobs or [0.0] * len(mask)


def _stream(sample: UserSample, value: Any, untouched: list[Any], name: str) -> list[Any] | None:
    """One entry per token, 0 on the prompt; None if nobody has given any."""
    num_prompt, num_tokens = sample.prompt_length, len(sample.token_ids)
    if value is None or (value is untouched and len(untouched) == num_prompt and num_tokens != num_prompt):
        return None
    stream = _listed(value, name)
    if len(stream) not in (num_tokens - num_prompt, num_tokens):
        raise PluginError(
            f"{name} has {len(stream)} entries for a response of {num_tokens - num_prompt} tokens after a prompt of {num_prompt}: "
            f"give {num_tokens - num_prompt}, or {num_tokens} for all tokens"
        )
    return [0] * (num_tokens - len(stream)) + stream


def _logprob(value: Any, position: int) -> float:
    try:
        logprob = float(value)
    except (TypeError, ValueError):
        logprob = math.nan
    if not (math.isfinite(logprob) and logprob <= LARGEST_LOGPROB):
        raise PluginError(f"the log-prob of token {position} of the response is {value!r}: a finite number, 0 or less, is needed")
    return logprob


def _status(sample: UserSample) -> SampleStatus:
    try:
        status = SampleStatus(sample.status)
    except ValueError:
        raise PluginError(
            f"its status is {sample.status!r}, and there are only {', '.join(SampleStatus)}: set one of them"
        ) from None
    return SampleStatus.COMPLETED if status is SampleStatus.PENDING else status


def _plain(metadata: Any) -> dict[str, Any]:
    """As it will be read back."""
    if not isinstance(metadata, dict):
        raise PluginError(f"its metadata is a {type(metadata).__name__}: it must be a dictionary")
    try:
        text = json.dumps(metadata, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"its metadata cannot be written as JSON ({error}): keep numbers, text, lists and dictionaries"
        ) from None
    return dict(json.loads(text))


def _listed(value: Any, name: str) -> list[Any]:
    """Lists, tuples, arrays and tensors as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise PluginError(f"{name} is a {type(value).__name__}: it must be a list")
    return list(value)
