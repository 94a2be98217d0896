"""Generate responses with a user-defined function (`--custom-generate-function-path`). It has one of the forms

    async def generate(args, sample, sampling_params) -> sample       gets one sample; returns it, or a list of samples
    async def generate(args, sample, sampling_params, evaluation)
    async def generate(args, samples, evaluation=False) -> samples    gets all pending samples of a prompt

with or without `async`. In every form, a parameter named `engine` gets the `EngineHandle`, which is also `args.engine`.
Return values are checked (user_sample.py). An exception, a timeout or an invalid return value fails only the sample
that it concerns, with the reason in `metadata["error"]`. Engine failures end the round.
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

from penstock.engines.generation import EngineClient
from penstock.stages.plugins import check_signature, describe_function, load_function
from penstock.stages.rewards.outcome import failed, parse_reward
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import sampling_params_for
from penstock.stages.rollout.plugins.engine_handle import EngineHandle
from penstock.stages.rollout.plugins.plugin_runner import Cancelled, PluginRunner
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound, copy_sample
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status

OPTIONAL = ("evaluation", "engine")  # arguments that are passed by name if the function has parameters of these names


@dataclass(frozen=True)
class GenerateFunction:
    """A user-defined generate function whose signature has been checked."""

    name: str  # for messages
    function: Callable[..., Any]
    takes_list: bool  # it gets all pending samples of a prompt, not one sample
    sampling: str | None  # name of the parameter that gets the sampling parameters; None: it has no such parameter
    optional: frozenset[str]  # names in OPTIONAL that the function has as parameters

    @property
    def is_async(self) -> bool:
        """Whether the function is async."""
        call = getattr(self.function, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @property
    def continues_partial(self) -> bool:
        """Whether the function can continue an aborted sample (it sets `continues_partial`); otherwise such a sample
        restarts."""
        return bool(getattr(self.function, "continues_partial", False))


def find_generate_function(path: str) -> GenerateFunction:
    """Load the generate function that `path` names.

    Raises:
        PluginError: the function does not load, or has none of the forms in the module docstring.
    """
    function = load_function(
        path, default_name="generate", is_candidate=lambda value: value.__name__ == "custom_generate"
    )
    name = describe_function(function, path)
    if inspect.isclass(function):
        raise PluginError(f"{name} is a class: name a function")
    parameters = inspect.signature(function).parameters.values()
    positional = [
        parameter
        for parameter in parameters
        if parameter.name not in OPTIONAL and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(positional) < 2:
        raise PluginError(
            f"{name} has the signature {inspect.signature(function)}, but is called with (args, sample, "
            "sampling_params) or (args, samples), and with `evaluation` and `engine` if it has parameters of these "
            "names: change its parameters"
        )
    second, third = positional[1], positional[2] if len(positional) > 2 else None
    wants_sampling = third is not None and (third.default is third.empty or "param" in third.name)
    loaded = GenerateFunction(
        name=name,
        function=function,
        takes_list=second.name == "samples" or (second.name != "sample" and not wants_sampling),
        sampling=third.name if third is not None and wants_sampling else None,
        optional=frozenset(parameter.name for parameter in parameters) & frozenset(OPTIONAL),
    )
    by_name = dict.fromkeys([*loaded.optional, *([loaded.sampling] if loaded.sampling else [])])
    check_signature(partial(function, **by_name), name, [parameter.name for parameter in positional[:2]])
    return loaded


class CustomGeneration:
    """Generates the samples of a group with the user-defined function. An async context manager, to be entered in the
    event loop of `client`.

    Args:
        config: names the function; its options are the function's `args`.
        client: client of the engines.
        tokenizer: tokenizer of the policy.
        round: the round that is generated.

    Raises:
        PluginError: the function does not load, or has none of the supported forms.
    """

    def __init__(
        self, config: RolloutConfig, client: EngineClient, tokenizer: PromptTokenizer, round: RolloutRound
    ) -> None:
        assert config.custom_generate_function_path is not None
        self.config = config
        self.round = round
        self.tokenizer = tokenizer
        self.handle = EngineHandle(client, tokenizer, config, round)
        self.function = find_generate_function(config.custom_generate_function_path)
        self.name = self.function.name
        self._runner = PluginRunner(self.name, is_async=self.function.is_async)
        # `args.sglang_router_ip` and `_port`, as in slime: where the function may send requests (router or an engine)
        address = urlsplit((client.router and client.router()) or next(iter(client.urls), ""))
        self._args = SimpleNamespace(
            **config.model_dump(),
            engine=self.handle,
            sglang_router_ip=address.hostname,
            sglang_router_port=address.port,
        )

    async def __aenter__(self) -> CustomGeneration:
        self.handle.loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.handle.close)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests."""
        return self.handle.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were in the engines' prefix cache."""
        return self.handle.num_cached_tokens

    async def __call__(self, samples: Group) -> Group:
        """Return the generated samples. Each is followed by the further samples that the function returned for it;
        samples that are not pending are unchanged.

        Raises:
            ValueError: the prompt leaves no room for a response.
            RuntimeError, ConnectionError, TimeoutError: the engines failed.
        """
        pending = [sample for sample in samples if sample.status is Status.PENDING]
        if self.function.takes_list:
            results = await self._generate(pending)
        else:
            results = [group for (group,) in await asyncio.gather(*(self._generate([sample]) for sample in pending))]
        by_id = {sample.sample_id: group for sample, group in zip(pending, results)}
        return [part for sample in samples for part in by_id.get(sample.sample_id, [sample])]

    async def abort(self) -> None:
        """Abort the requests to the engines, then cancel the calls of the function that still run."""
        await self.handle.client.abort()
        await self._runner.stop()

    async def _generate(self, origins: Group) -> list[Group]:
        """Call the function once for the samples `origins`; return, for each of them, the list of generated samples."""
        options: dict[str, Any] = {"evaluation": self.round.kind == "eval", "engine": self.handle}
        options = {name: options[name] for name in self.function.optional}
        if self.function.sampling:
            options[self.function.sampling] = (
                self.config.sampling_params()
                if self.function.takes_list
                else sampling_params_for(self.config, origins[0])
            )

        views: list[UserSample] = []

        def call() -> Any:
            views[:] = [self._sample_for_function(sample) for sample in origins]
            return self.function.function(self._args, list(views) if self.function.takes_list else views[0], **options)

        try:
            returned = await self._runner.run(call, self.config.generate_timeout * len(origins))
            parts = self._split_by_origin(origins, returned)
        except Cancelled:
            return [[_aborted_copy(sample)] for sample in origins]
        except PluginError as error:  # if the round aborted a request, that is the cause of the failure
            if any(view.aborted for view in views):
                return [[_aborted_copy(sample)] for sample in origins]
            parts = [str(error)] * len(origins)
        finally:
            for sample in origins:
                self.handle.end(sample.trajectory_id)
        if self.handle.fault is not None:
            raise self.handle.fault
        return [
            [_failed_copy(sample, part)] if isinstance(part, str) else self._checked_trajectory(sample, part)
            for sample, part in zip(origins, parts)
        ]

    def _sample_for_function(self, sample: Sample) -> UserSample:
        """Return the copy of a sample that is passed to the function."""
        view = UserSample.of(sample, sample.metadata.get("num_prompt_tokens"))
        view.metadata.pop("num_prompt_tokens", None)
        if any(view.loss_mask) and not self.function.continues_partial:
            view.restart(view.prompt, view.token_ids[: view.prompt_length])
        return view

    def _split_by_origin(self, origins: Group, returned: Any) -> list[Group | str]:
        """Return, for every sample of `origins`, the samples that the function returned for it, or an error message."""
        listed = returned if isinstance(returned, list | tuple) else [returned]
        others = [part for part in listed if not isinstance(part, Sample)]
        if others or not listed or (self.function.takes_list and listed is not returned):
            wanted = "the list of samples" if self.function.takes_list else "the sample, or a list of samples"
            kind = type(others[0] if others else returned).__name__ if listed else "an empty list"
            return [f"{self.name} returned {kind}: return {wanted}"] * len(origins)
        if not self.function.takes_list:
            return [list(listed)]
        return [
            [part for part in listed if part.trajectory_id == sample.trajectory_id]
            or f"{self.name} returned nothing for this sample"
            for sample in origins
        ]

    def _checked_trajectory(self, origin: Sample, parts: Group) -> Group:
        """Return the checked samples of one trajectory. If one of them was aborted, return only `origin`, as aborted;
        an aborted single sample keeps its tokens if the function continues partial samples."""
        aborted = any(part.status == Status.ABORTED or getattr(part, "aborted", False) for part in parts)
        if aborted and (len(parts) > 1 or not self.function.continues_partial):
            return [_aborted_copy(origin)]
        samples = []
        for index, part in enumerate(parts):
            sample_id = f"{origin.sample_id}.{index}" if index else origin.sample_id
            try:
                samples.append(self._checked_part(origin, part, sample_id))
            except ValueError as error:
                samples.append(replace(_failed_copy(origin, f"{self.name}: {error}"), sample_id=sample_id))
        return samples

    def _checked_part(self, origin: Sample, part: Sample, sample_id: str) -> Sample:
        """Check a returned sample and return it with the ids of `origin`.

        Raises:
            PluginError: the sample cannot be trained on.
            RuntimeError: another weight version than the round's generated it.
        """
        sample = replace(
            checked_sample(part),
            sample_id=sample_id,
            group_id=origin.group_id,
            trajectory_id=origin.trajectory_id,
            rollout_id=origin.rollout_id,
            label=origin.label,
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
                "the returned sample has no response tokens: generate them with engine.generate, or set `tokens` and "
                "`rollout_log_probs`"
            )
        for version in getattr(part, "weight_versions", ()):  # reported for requests that the function sent itself
            if version != self.round.weight_version:
                raise RuntimeError(
                    f"{self.name} got a response of weights {version!r}, expected {self.round.weight_version!r}: send "
                    "requests to the engines of this run (args.sglang_router_ip), or use engine.generate"
                )
        if not sample.response:
            sample.response = self.tokenizer.decode(
                [response], skip_special_tokens=self.config.rollout_skip_special_tokens
            )[0]
        if sample.reward is not None:  # the function has graded the sample itself
            parse_reward(sample.reward, self.config.reward_key, self.name).apply(sample)
        return sample


def _aborted_copy(sample: Sample) -> Sample:
    return replace(copy_sample(sample), status=Status.ABORTED)


def _failed_copy(sample: Sample, reason: str) -> Sample:
    sample = copy_sample(sample)
    failed(reason).apply(sample)
    return sample
