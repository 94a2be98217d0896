"""Generate responses with a user-defined function (`--custom-generate-function-path`), in one of these forms:

    async def generate(args, sample, sampling_params) -> sample       returns the given sample, or a list of samples
    async def generate(args, sample, sampling_params, evaluation)
    async def generate(args, samples, evaluation=False) -> samples    gets all pending samples of a prompt

`async` is optional. In every form, a parameter named `engine` gets the `EngineHandle`, which is also `args.engine`.
Return values are checked (user_sample.py). If the function raises, exceeds its timeout or returns an invalid value,
only the samples of that call fail, with the reason in `metadata["error"]`. If an engine fails, the round fails.

    async def generate(args, sample, sampling_params, engine):
        for _ in range(args.max_turns):
            text = await engine.generate(sample, stop=["</call>"])     # the model's tokens: trained on, with log-probs
            if "</call>" not in text or not engine.append(sample, answer(text)):    # the tool's tokens: not trained on
                break
        return sample
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any

from penstock.engines.generation import EngineClient, TokenCounts
from penstock.stages.images import SampleImages
from penstock.stages.plugins import DEFAULT_NAMES, check_signature, describe_path, load_function, with_function_name
from penstock.stages.rewards.outcome import Outcome, parse_reward
from penstock.stages.rollout.agents.conversation import AgentSession, Conversation
from penstock.stages.rollout.agents.endpoint import OpenAIEndpoint
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import EngineCalls, sampling_params_for
from penstock.stages.rollout.plugins.plugin_runner import Cancelled, PluginRunner
from penstock.stages.rollout.plugins.user_sample import ANSWERS, EngineAnswer, UserSample, checked_sample
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound, copy_sample
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status

OPTIONAL = ("evaluation", "engine")  # passed as keyword arguments if the function has parameters of these names


@dataclass(frozen=True)
class GenerateFunction:
    """A user-defined generate function whose signature has been checked."""

    name: str  # for error messages
    function: Callable[..., Any]
    takes_list: bool  # the function gets all pending samples of a prompt, instead of one sample
    sampling: str | None  # name of the function's parameter for the sampling parameters; None: no such parameter
    optional: frozenset[str]  # parameters of the function that are named in OPTIONAL
    continues_partial: bool  # whether the function can continue an aborted sample, which otherwise restarts


def load_generate_function(path: str) -> GenerateFunction:
    """Load the user-defined generate function that `path` names. Raises PluginError."""
    path = with_function_name(path, DEFAULT_NAMES["custom_generate_function_path"])
    function, name = load_function(path), describe_path(path)
    if inspect.isclass(function):
        raise PluginError(f"{name} is a class: name a function with --custom-generate-function-path")
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
        continues_partial=bool(getattr(function, "continues_partial", False)),
    )
    by_name = dict.fromkeys([*loaded.optional, *([loaded.sampling] if loaded.sampling else [])])
    check_signature(partial(function, **by_name), name, [parameter.name for parameter in positional[:2]])
    return loaded


class CustomGeneration:
    """Generates the samples of a group with a user-defined generate function. Use it as an async context manager, in
    the event loop of `client`. Raises PluginError."""

    def __init__(
        self,
        config: RolloutConfig,
        client: EngineClient,
        tokenizer: PromptTokenizer,
        round: RolloutRound,
        images: SampleImages | None = None,
    ) -> None:
        assert config.custom_generate_function_path is not None
        self.config = config
        self.round = round
        self.tokenizer = tokenizer
        self.handle = EngineHandle(client, tokenizer, config, round, images)
        self.function = load_generate_function(config.custom_generate_function_path)
        self.name = self.function.name
        functions = (self.function.function, getattr(self.function.function, "__call__", None))  # noqa: B004
        self._runner = PluginRunner(self.name, is_async=any(map(inspect.iscoroutinefunction, functions)))
        self._args = SimpleNamespace(**config.plugin_arguments() | {"engine": self.handle})
        self._args.sglang_router_ip, self._args.sglang_router_port = self.handle.address

    async def __aenter__(self) -> CustomGeneration:
        self.handle.loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.handle.close)

    @property
    def counts(self) -> TokenCounts:
        """Token counts of all requests."""
        return self.handle.counts

    async def __call__(self, samples: Group) -> Group:
        """Return the group's samples with their responses. A sample is followed by any further samples that the
        function returned for it; samples that are not pending are unchanged."""
        pending = [sample for sample in samples if sample.status is Status.PENDING]
        if self.function.takes_list:
            results = await self._generate(pending)
        else:
            results = [group for (group,) in await asyncio.gather(*(self._generate([sample]) for sample in pending))]
        by_id = {sample.sample_id: group for sample, group in zip(pending, results)}
        return [part for sample in samples for part in by_id.get(sample.sample_id, [sample])]

    async def abort(self) -> None:
        """Abort the requests to the engines, then cancel the calls of the function that are still running."""
        await self.handle.client.abort()
        await self._runner.stop()

    async def _generate(self, origins: Group) -> list[Group]:
        """Call the function once with the samples `origins`, and return a list of generated samples for each."""
        options: dict[str, Any] = {"evaluation": self.round.kind == "eval", "engine": self.handle}
        options = {name: options[name] for name in self.function.optional}
        if self.function.sampling:
            options[self.function.sampling] = (
                self.config.sampling_params()
                if self.function.takes_list
                else sampling_params_for(self.config, origins[0])
            )

        views: list[UserSample] = []
        answers: list[EngineAnswer] = []

        def call() -> Any:
            ANSWERS.set(answers)
            views[:] = [UserSample.of(sample, sample.metadata.get("num_prompt_tokens")) for sample in origins]
            for view in views:
                view.metadata.pop("num_prompt_tokens", None)
                if any(view.loss_mask) and not self.function.continues_partial:  # it cannot continue the response
                    view.restart(view.prompt, view.token_ids[: view.prompt_length])
            return self.function.function(self._args, list(views) if self.function.takes_list else views[0], **options)

        try:
            returned = await self._runner.run(call, self.config.generate_timeout * len(origins))
            parts = self._split_by_origin(origins, returned)
        except (Cancelled, PluginError) as error:  # if the round aborted a request, the abort caused the failure
            if isinstance(error, Cancelled) or any(view.aborted for view in views):
                return [[replace(copy_sample(sample), status=Status.ABORTED)] for sample in origins]
            parts = [str(error)] * len(origins)
        finally:
            for sample in origins:
                self.handle.end(sample.trajectory_id)
        if self.handle.fault is not None:
            raise self.handle.fault
        return [
            [_failed_copy(sample, part)] if isinstance(part, str) else self._to_plain_samples(sample, part, answers)
            for sample, part in zip(origins, parts)
        ]

    def _split_by_origin(self, origins: Group, returned: Any) -> list[Group | str]:
        """Return, for every sample of `origins`, the samples that the function returned for it, or an error text."""
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
            or f"{self.name} returned no sample with trajectory_id {sample.trajectory_id!r}: return one or more for it"
            for sample in origins
        ]

    def _to_plain_samples(self, origin: Sample, parts: Group, answers: list[EngineAnswer]) -> Group:
        """Check and return the samples `parts` that the function returned for `origin`. If any part was aborted, return
        only `origin` with status aborted; a single aborted part is returned with its tokens if the function can
        continue it. `answers`: the engines' answers to requests that the function has sent itself."""
        aborted = any(part.status == Status.ABORTED or getattr(part, "aborted", False) for part in parts)
        if aborted and (len(parts) > 1 or not self.function.continues_partial):
            return [replace(copy_sample(origin), status=Status.ABORTED)]
        samples = []
        for index, part in enumerate(parts):
            sample_id = f"{origin.sample_id}.{index}" if index else origin.sample_id
            try:
                if isinstance(part, UserSample):
                    part.take_answers(answers)
                samples.append(self._to_plain_sample(origin, part, sample_id))
            except ValueError as error:
                samples.append(replace(_failed_copy(origin, f"{self.name}: {error}"), sample_id=sample_id))
        return samples

    def _to_plain_sample(self, origin: Sample, part: Sample, sample_id: str) -> Sample:
        """Check a sample that the function returned for `origin`; return it as a plain Sample with id `sample_id`, and
        group, trajectory, round and label of `origin`."""
        sample = replace(
            checked_sample(part),
            sample_id=sample_id,
            group_id=origin.group_id,
            trajectory_id=origin.trajectory_id,
            rollout_id=origin.rollout_id,
            label=origin.label,
        )
        if sample.status is Status.FAILED:
            sample.metadata.setdefault("error", f"{self.name} returned the sample with status failed")
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
        for version in getattr(part, "weight_versions", ()):  # of requests sent without EngineHandle
            if self.round.policy_version_of(version) is None:
                raise RuntimeError(
                    f"{self.name} got a response generated with weight version {version!r}, but expected "
                    f"{self.round.weight_version!r}: send requests to the engines of this run "
                    "(args.sglang_router_ip), or use engine.generate"
                )
        if not sample.response:
            sample.response = self.tokenizer.decode(
                [response], skip_special_tokens=self.config.rollout_skip_special_tokens
            )[0]
        if sample.reward is not None:  # the function has graded the sample itself
            parse_reward(sample.reward, self.config.reward_key, self.name).apply(sample)
        return sample


def _failed_copy(sample: Sample, reason: str) -> Sample:
    sample = copy_sample(sample)
    Outcome(error=reason).apply(sample)
    return sample


class EngineHandle(EngineCalls):
    """Gives user-defined generate functions access to the engines of one round."""

    _endpoint: OpenAIEndpoint | None = None
    _lock = threading.Lock()

    def conversation(self, sample: UserSample, **options: Any) -> Conversation:
        """Return a chat that takes and returns messages, and records their tokens in `sample`. `options`: `tools` and
        `template_options` of `Conversation`."""
        return Conversation(self, sample, **options)

    def openai(self, sample: UserSample) -> AgentSession:
        """Return a session (URL and API key) for one execution of an agent that uses an OpenAI client. The session
        records the agent's requests as samples (agents/conversation.py)."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = OpenAIEndpoint(self, self.config.agent_endpoint_port)
        return self._endpoint.session(sample)

    def end(self, trajectory_id: str) -> None:
        """Close the agent sessions of this trajectory; further requests are refused."""
        if self._endpoint is not None:
            self._endpoint.end(trajectory_id)

    def close(self) -> None:
        """Stop the OpenAI-compatible endpoint, if it is running."""
        if self._endpoint is not None:
            self._endpoint.close()
