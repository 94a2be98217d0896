"""Generation by a function of the user's: `--custom-generate-function-path`.

    async def generate(args, sample, sampling_params) -> sample          one sample in, it or a list of samples out
    async def generate(args, sample, sampling_params, evaluation)
    async def generate(args, samples, evaluation=False) -> samples       all samples of a prompt that are to be generated

With `async` or without; a parameter named `engine`, in any of them, gets the `EngineHandle`, which is `args.engine` too. What comes
back is checked (user_sample.py). A mistake costs its sample alone, with a sentence in `metadata["error"]`: an exception, a hang, a
mask of the wrong length. What the engines are to blame for ends the round, as everywhere.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any
from urllib.parse import urlsplit

from engines.sglang.client import EngineClient
from stages.plugins import check_signature, load_function, name_of
from stages.rewards.outcome import failed, outcome_from
from stages.rollout.config import RolloutConfig
from stages.rollout.engine_handle import EngineHandle
from stages.rollout.generate import sampling_of, sampling_params
from stages.rollout.round import Group, Round, copied
from stages.rollout.tokenizer import PromptTokenizer
from stages.rollout.user_code import NoResult, Stopped, UserCode
from stages.rollout.user_sample import UserSample, taken
from storage.errors import PluginError
from storage.sample import Sample, Status

BY_NAME = ("evaluation", "engine")  # parameters that a function has if it wants them


@dataclass(frozen=True)
class GenerateFunction:
    """A user's function, found and checked, but not yet run."""

    name: str  # for messages
    function: Callable[..., Any]
    takes_list: bool
    sampling: str | None  # its parameter for the sampling parameters
    wanted: frozenset[str]  # of BY_NAME

    @property
    def is_async(self) -> bool:
        """Whether it is awaited."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(getattr(self.function, "__call__", None))  # noqa: B004

    @property
    def continues_partial(self) -> bool:
        """Whether it can go on with a sample that was stopped in the middle; else such a sample begins anew."""
        return bool(getattr(self.function, "continues_partial", False))


def find_generate_function(path: str) -> GenerateFunction:
    """The function at `path`. Raises PluginError if it does not load, or is none of the forms above."""
    function = load_function(path, usual_name="generate", usual=lambda found: found.__name__ == "custom_generate")
    name = name_of(function, path)
    if inspect.isclass(function):
        raise PluginError(f"{name} is a class: name a function")
    parameters = inspect.signature(function).parameters.values()
    given = [one for one in parameters if one.name not in BY_NAME and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if len(given) < 2:
        raise PluginError(
            f"{name} has the signature {inspect.signature(function)}, but is called with (args, sample, sampling_params) or "
            "(args, samples), and with `evaluation` and `engine` if it has parameters of these names"
        )
    second, third = given[1], given[2] if len(given) > 2 else None
    wants_sampling = third is not None and (third.default is third.empty or "param" in third.name)
    found = GenerateFunction(
        name=name,
        function=function,
        takes_list=second.name == "samples" or (second.name != "sample" and not wants_sampling),
        sampling=third.name if third is not None and wants_sampling else None,
        wanted=frozenset(one.name for one in parameters) & frozenset(BY_NAME),
    )
    named = dict.fromkeys([*found.wanted, *([found.sampling] if found.sampling else [])])
    check_signature(partial(function, **named), name, [one.name for one in given[:2]])
    return found


def check_generate_function(path: str) -> None:
    """Preflight. Raises PluginError if the function at `path` does not load or cannot be called as it will be."""
    find_generate_function(path)


class CustomGeneration:
    """Fills in the samples of a group by the user's function; an async context manager, in the event loop that the client belongs to.

    Args:
        config: names the function, and is its `args`.
        client: of the engines.
        tokenizer: of the policy.
        round: what is generated.

    Raises:
        PluginError: the function does not load or fit.
    """

    def __init__(self, config: RolloutConfig, client: EngineClient, tokenizer: PromptTokenizer, round: Round) -> None:
        assert config.custom_generate_function_path is not None
        self.config = config
        self.round = round
        self.tokenizer = tokenizer
        self.handle = EngineHandle(client, tokenizer, config, round)
        self.function = find_generate_function(config.custom_generate_function_path)
        self.name = self.function.name
        self._code = UserCode(self.name, is_async=self.function.is_async)
        self._args = SimpleNamespace(**config.model_dump(), engine=self.handle, **_router_of(client))

    async def __aenter__(self) -> CustomGeneration:
        self.handle.loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.handle.close)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return self.handle.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the engines had computed before."""
        return self.handle.num_cached_tokens

    async def __call__(self, samples: Group) -> Group:
        """The samples, each followed by its siblings; those that are not pending stay as they are.

        Raises:
            PluginError: there is no room for a response to this prompt.
            RuntimeError, ConnectionError, TimeoutError: of the engines.
        """
        waiting = [sample for sample in samples if sample.status is Status.PENDING]
        if self.function.takes_list:
            made = await self._generate(waiting)
        else:
            made = [group for (group,) in await asyncio.gather(*(self._generate([sample]) for sample in waiting))]
        done = {sample.sample_id: group for sample, group in zip(waiting, made)}
        return [part for sample in samples for part in done.get(sample.sample_id, [sample])]

    async def abort(self) -> None:
        """End what is under way: engines first, then the functions, which may be waiting for something else."""
        await self.handle.client.abort()
        await self._code.stop()

    async def _generate(self, given: Group) -> list[Group]:
        """What one call makes of each of these samples."""
        options: dict[str, Any] = {"evaluation": self.round.kind == "eval", "engine": self.handle}
        options = {name: options[name] for name in self.function.wanted}
        if self.function.sampling:
            listed = self.function.takes_list
            options[self.function.sampling] = sampling_params(self.config) if listed else sampling_of(self.config, given[0])

        views: list[UserSample] = []

        def call() -> Any:
            views[:] = [self._view(sample) for sample in given]
            return self.function.function(self._args, list(views) if self.function.takes_list else views[0], **options)

        try:
            returned = await self._code.run(call, self.config.generate_timeout * len(given))
            parts = self._parts(given, returned)
        except Stopped:
            return [[_aborted(sample)] for sample in given]
        except NoResult as error:  # perhaps because of what it was told when the round was over
            if any(view.aborted for view in views):
                return [[_aborted(sample)] for sample in given]
            parts = [str(error)] * len(given)
        finally:
            for sample in given:
                self.handle.end(sample.trajectory_id)
        if self.handle.fault is not None:
            raise self.handle.fault
        return [
            [_failed(sample, its)] if isinstance(its, str) else self._siblings(sample, its) for sample, its in zip(given, parts)
        ]

    def _view(self, sample: Sample) -> UserSample:
        """What the function gets."""
        view = UserSample.of(sample, sample.metadata.get("num_prompt_tokens"))
        view.metadata.pop("num_prompt_tokens", None)
        if any(view.loss_mask) and not self.function.continues_partial:
            view.restart(view.prompt, view.token_ids[: view.prompt_length])
        return view

    def _parts(self, given: Group, returned: Any) -> list[Group | str]:
        """What was returned for each sample, or a sentence about it."""
        several = returned if isinstance(returned, list | tuple) else [returned]
        strange = [part for part in several if not isinstance(part, Sample)]
        if strange or not several or (self.function.takes_list and several is not returned):
            wanted = "the list of samples" if self.function.takes_list else "the sample, or a list of samples"
            found = type(strange[0] if strange else returned).__name__ if several else "an empty list"
            return [f"{self.name} returned {found}: return {wanted}"] * len(given)
        if not self.function.takes_list:
            return [list(several)]
        return [
            [part for part in several if part.trajectory_id == sample.trajectory_id]
            or f"{self.name} returned nothing for this sample"
            for sample in given
        ]

    def _siblings(self, given: Sample, parts: Group) -> Group:
        """The samples of one trajectory. If one of them was stopped the whole of it was."""
        stopped = any(part.status == Status.ABORTED or getattr(part, "aborted", False) for part in parts)
        if stopped and (len(parts) > 1 or not self.function.continues_partial):
            return [_aborted(given)]
        made = []
        for index, part in enumerate(parts):
            sample_id = f"{given.sample_id}.{index}" if index else given.sample_id
            try:
                made.append(self._finished(given, part, sample_id))
            except ValueError as error:
                made.append(replace(_failed(given, f"{self.name}: {error}"), sample_id=sample_id))
        return made

    def _finished(self, given: Sample, part: Sample, sample_id: str) -> Sample:
        """What goes on from here. Raises PluginError if it cannot be trained on."""
        sample = replace(
            taken(part),
            sample_id=sample_id,
            group_id=given.group_id,
            trajectory_id=given.trajectory_id,
            rollout_id=given.rollout_id,
            label=given.label,
        )
        if sample.status is Status.FAILED:
            sample.metadata.setdefault("error", f"{self.name} says that the sample has failed")
            return sample
        if getattr(part, "aborted", False) or sample.status is Status.ABORTED:
            sample.status = Status.ABORTED
            if part.prompt_length != sample.prompt_length:
                sample.metadata["num_prompt_tokens"] = part.prompt_length
            return sample
        response = sample.token_ids[part.prompt_length :]
        if not response:
            raise PluginError(
                "it has no response tokens: write them with engine.generate, or set `tokens` and `rollout_log_probs`"
            )
        self._check_policy(part)
        if not sample.response:
            sample.response = self.tokenizer.decode([response], skip_special_tokens=self.config.rollout_skip_special_tokens)[0]
        if sample.reward is not None:  # it has graded it itself
            outcome_from(sample.reward, self.config.reward_key, self.name).apply(sample)
        return sample

    def _check_policy(self, part: Sample) -> None:
        """Of requests that the function has sent itself. Raises RuntimeError, as `add_response` does."""
        for version in getattr(part, "weight_versions", ()):
            if version != self.round.weight_version:
                raise RuntimeError(f"{self.name} was answered by weights {version!r}, expected {self.round.weight_version!r}")


def _router_of(client: EngineClient) -> dict[str, Any]:
    """slime's names for where a function sends requests of its own: the router, or an engine."""
    address = urlsplit((client.router and client.router()) or next(iter(client.urls), ""))
    return {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}


def _aborted(sample: Sample) -> Sample:
    return replace(copied(sample), status=Status.ABORTED)


def _failed(sample: Sample, reason: str) -> Sample:
    sample = copied(sample)
    failed(reason).apply(sample)
    return sample
