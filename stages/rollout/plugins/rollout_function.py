"""Call a user-defined rollout function (`--rollout-function-path`), which generates a whole round:

    def generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput, or a list of groups

`async` is optional. `data_source.get_samples(n)` returns n groups of pending samples, and `add_samples(groups)` hands
groups back for later rounds. The function returns --rollout-batch-size groups that it got in this round. Samples
without a reward are graded afterwards. A group that the function neither returns nor hands back is dropped.

`args` has the rollout's options, `args.engine` (EngineHandle), and `args.rollout`, the parts of the built-in
rollout, which adapters (stages/plugins.py) call.

With `evaluation=True` or --eval-function-path, the function generates an evaluation and returns a RolloutFnEvalOutput,
the dictionary in one, or groups. It is called once for each data set, whose name and path are `args.eval_prompt_data`.
It gets all prompts from `data_source.get_samples(n)` with n = len(data_source.dataset), and must return all of them, so
that evaluations can be compared prompt by prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from penstock.stages.plugins import (
    BUILT_IN_EVALUATION,
    DEFAULT_NAMES,
    describe_path,
    load_checked_function,
    with_function_name,
)
from penstock.stages.rewards.outcome import parse_reward
from penstock.stages.rollout.collect import CollectedGroups, sorted_by_id
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import GroupRunner
from penstock.stages.rollout.plugins.custom_generation import EngineHandle, load_generate_function
from penstock.stages.rollout.plugins.filters import load_group_filter
from penstock.stages.rollout.plugins.hooks import (
    Hooks,
    load_log_function,
    load_train_data_function,
    numbers_of,
    to_finite_numbers,
)
from penstock.stages.rollout.plugins.plugin_runner import PluginRunner
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.prompts.data_source import (
    Group,
    PromptIntake,
    copy_sample,
    group_by_group_id,
    is_unfinished,
    load_buffer_filter,
    load_data_source,
    without_responses,
)
from penstock.storage.errors import PluginError, check_rules
from penstock.storage.samples.sample import Sample, Status

NOT_RETURNED = "not returned by the rollout function"  # drop reason
T = TypeVar("T")


Collect = Callable[[Callable[[int], Sequence[Group]]], Coroutine[Any, Any, CollectedGroups]]


def load_rollout_function(path: str, option: str = "rollout_function_path") -> Callable[..., Any]:
    """Load the function of a rollout or an evaluation that `path` names. Raises PluginError."""
    return load_checked_function(path, DEFAULT_NAMES[option], ("args", "rollout_id", "data_source"))


@dataclass(eq=False, repr=False)
class FunctionSource:
    """The data source of a rollout function. It remembers which groups the function got and handed back. Other
    attributes (`dataset`, `args`, ...) are those of the run's data source."""

    _intake: PromptIntake
    _lock: threading.Lock = field(default_factory=threading.Lock)
    issued: dict[str, Group] = field(default_factory=dict)  # group id -> samples as they were before the call
    handed_back: dict[str, list[Any]] = field(default_factory=dict)  # group id -> samples

    def take(self, num_groups: int) -> list[Group]:
        """Return the next groups, and remember copies of them."""
        with self._lock:
            groups = self._intake.next_groups(num_groups)
            self.issued |= {group[0].group_id: [copy_sample(sample) for sample in group] for group in groups}
        return groups

    def get_samples(self, num_samples: int) -> list[list[UserSample]]:
        """Return `num_samples` groups, one per prompt."""
        return [[UserSample.of(sample) for sample in group] for group in self.take(num_samples)]

    def add_samples(self, samples: list[Any]) -> None:
        """Hand groups back for later rounds."""
        self.handed_back |= {group[0].group_id: group for group in group_by_group_id(samples)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._intake.source, name)


@dataclass(eq=False, repr=False)  # without `repr`, `args` stay short when a user-defined function prints them
class RolloutTools:
    """Parts of the built-in rollout that a rollout function may call (`args.rollout`), from any thread or loop."""

    config: RolloutConfig
    runner: GroupRunner
    collect: Collect
    source: FunctionSource
    data_set: str | None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    collected: list[CollectedGroups] = field(default_factory=list)  # results of all `generate_rollout` calls

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: a copy of the `args` of a user-defined function belongs to the same round."""
        return self

    def generate_rollout(self, source: FunctionSource) -> list[list[UserSample]]:
        """Generate groups from `source` with the built-in rollout, and return the groups that it keeps."""
        collected = asyncio.run(self._await_in_loop(self.collect(source.take)))
        self.collected.append(collected)
        return [[UserSample.of(sample) for sample in group] for group in collected.kept]

    async def generate_group(
        self, group: list[UserSample], sampling: dict[str, Any], *, grade: bool
    ) -> list[UserSample]:
        """Return samples of a group with responses and, if `grade`, with rewards. Raises PluginError."""
        own = self.config.sampling_params()
        if changed := [name for name, value in own.items() if sampling.get(name, value) != value]:
            raise PluginError(
                f"the sampling parameter {changed[0]} is {sampling[changed[0]]!r}, but the run's is "
                f"{own[changed[0]]!r}: set the option instead, or use args.engine.generate"
            )
        samples = [checked_sample(sample) for sample in group]
        for sample, view in zip(samples, group):
            sample.status = Status(view.status)
        done = await self._await_in_loop(self.runner.run_samples(samples, grade=grade))
        return [UserSample.of(sample) for sample in done]

    async def _await_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if asyncio.get_running_loop() is self.loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))


class RolloutFunctionCall:
    """One call of a rollout function, or of an evaluation on `data_set`. Create it in the event loop of the client."""

    def __init__(
        self,
        config: RolloutConfig,
        runner: GroupRunner,
        intake: PromptIntake,
        collect: Collect,
        handle: EngineHandle,
        data_set: str | None,
    ) -> None:
        assert config.rollout_function_path is not None
        self.config, self.runner, self.handle = config, runner, handle
        self.function = load_rollout_function(config.rollout_function_path)
        self.name = describe_path(
            with_function_name(config.rollout_function_path, DEFAULT_NAMES["rollout_function_path"])
        )
        self.source = FunctionSource(intake)
        self.data_set = data_set
        self.tools = RolloutTools(config, runner, collect, self.source, data_set)
        self.rewards: dict[int, float] = {}  # id() of a returned sample -> reward that an evaluation returned beside it

    async def run(self, num_groups: int) -> CollectedGroups:
        """Call the function, and return its groups, the buffered and the dropped groups. Raises PluginError."""
        args = SimpleNamespace(**self.config.plugin_arguments() | {"engine": self.handle, "rollout": self.tools})
        args.sglang_router_ip, args.sglang_router_port = self.handle.address
        is_eval = self.data_set is not None
        if is_eval:
            args.eval_prompt_data = [self.data_set, self.config.prompt_data[0]]
        options = {"evaluation": is_eval} if "evaluation" in inspect.signature(self.function).parameters else {}
        runner = PluginRunner(self.name, is_async=inspect.iscoroutinefunction(self.function))
        returned = await runner.run(
            lambda: self.function(args, self.runner.round.rollout_id, self.source, **options),
            self.config.rollout_timeout,
        )
        if self.handle.fault is not None:
            raise self.handle.fault
        metrics = numbers_of(getattr(returned, "metrics", None) or {}, self.name)
        kept = [self._to_plain_group(group) for group in self._groups_of(returned, num_groups)]
        await asyncio.gather(*(self.runner.grade(group) for group in kept))
        self.runner.count_generated([sample for group in kept for sample in group])
        buffered, dropped = self._unused({group[0].group_id for group in kept})
        return CollectedGroups(sorted_by_id(kept), buffered, dropped, num_batches=1, metrics=metrics)

    def _groups_of(self, returned: Any, num_groups: int) -> list[list[Any]]:
        """Return the groups that the function returned. Raises PluginError if they are not groups of the round."""
        returned_samples = getattr(returned, "samples", returned)
        if self.data_set is not None:
            returned_samples, self.rewards = samples_of_evaluation(returned, self.data_set, self.name)
        samples = _flatten(returned_samples)
        strange = next((type(sample).__name__ for sample in samples if not isinstance(sample, Sample)), "")
        groups = [] if strange else group_by_group_id(samples)
        ids = [group[0].group_id for group in groups]
        unknown = next((group_id for group_id in ids if group_id not in self.source.issued), None)
        rules = [
            (strange, f"{self.name} returned {strange}: return a list of groups of samples"),
            (
                unknown is not None,
                f"{self.name} returned a sample with group_id {unknown!r}, which data_source.get_samples did not "
                "return in this round: return these samples, or copies of them by copy.deepcopy",
            ),
            (
                len(groups) != num_groups and self.data_set is None,
                f"{self.name} returned {len(groups)} groups: return --rollout-batch-size ({num_groups}) groups, and "
                "hand others back with data_source.add_samples",
            ),
            (
                len(groups) != num_groups,
                f"{self.name} returned {len(groups)} of the {num_groups} prompts of the data set {self.data_set}: "
                "return all of them, because evaluations are compared prompt by prompt",
            ),
        ]
        check_rules(rules, PluginError)
        return groups

    def _to_plain_group(self, parts: list[Any]) -> Group:
        """Check the samples that the function returned for one group. Return plain samples with the ids that the
        samples had before the call. Raises PluginError."""
        origins = {sample.trajectory_id: sample for sample in self.source.issued[parts[0].group_id]}
        if missing := sorted(origins.keys() ^ {part.trajectory_id for part in parts}):
            raise PluginError(
                f"{self.name} returned group {parts[0].group_id!r} with other samples than it has ({missing[0]!r} is "
                "missing or unknown): return all samples of a group"
            )
        group: Group = []
        numbers = dict.fromkeys(origins, 0)
        for part in parts:
            origin, number = origins[part.trajectory_id], numbers[part.trajectory_id]
            numbers[part.trajectory_id] += 1
            try:
                sample = self._to_plain_sample(origin, part)
            except ValueError as error:
                raise PluginError(f"{self.name}, sample {origin.sample_id}: {error}") from error
            sample.sample_id = f"{origin.sample_id}.{number}" if number else origin.sample_id
            group.append(sample)
        return group

    def _to_plain_sample(self, origin: Sample, part: Sample) -> Sample:
        sample = replace(
            checked_sample(part, origin.prompt_length),
            group_id=origin.group_id,
            trajectory_id=origin.trajectory_id,
            rollout_id=origin.rollout_id,
        )
        if sample.status is Status.FAILED:
            sample.metadata.setdefault("error", f"{self.name} returned the sample with status failed")
            return sample
        versions = getattr(part, "weight_versions", ())
        other = [version for version in versions if self.runner.round.policy_version_of(version) is None]
        rules = [
            (
                part.status in (Status.PENDING, Status.ABORTED),
                f"its status is {part.status!s}: return only finished samples, and hand other groups back with "
                "data_source.add_samples",
            ),
            (
                len(sample.token_ids) == origin.prompt_length,
                "it has no response tokens: set `tokens`, `rollout_log_probs` and `loss_mask`",
            ),
            (
                other,
                f"the response was generated by weights {', '.join(map(repr, other))}, expected "
                f"{self.runner.round.weight_version!r}: send requests to the engines of this run "
                "(args.sglang_router_ip)",
            ),
        ]
        check_rules(rules, PluginError)
        if sample.reward is not None:
            components = sample.rewards
            parse_reward(sample.reward, self.config.reward_key, self.name).apply(sample)
            sample.rewards = sample.rewards or components  # a number as the reward has no components
        if id(part) in self.rewards:
            sample.reward = self.rewards[id(part)]
        return sample

    def _unused(self, kept: set[str]) -> tuple[list[Group], list[tuple[Group, str]]]:
        """Return the issued groups that are not kept: the groups for later rounds, and the dropped groups, each with
        its reason."""
        back = {group[0].group_id: group for collected in self.tools.collected for group in collected.buffered}
        reasons = {group[0].group_id: text for collected in self.tools.collected for group, text in collected.dropped}
        buffered, dropped = [], []
        for group_id in sorted(self.source.issued.keys() - kept):
            issued, parts = self.source.issued[group_id], self.source.handed_back.get(group_id)
            if group_id in back:
                buffered.append(back[group_id])
            elif parts is None:
                dropped.append((issued, reasons.get(group_id, NOT_RETURNED)))
            elif is_unfinished(parts) and not self.config.partial_rollout:
                buffered.append(without_responses(issued))
            else:  # a group that was handed back with its responses
                try:
                    samples = [checked_sample(part) for part in parts]
                except ValueError as error:
                    raise PluginError(f"{self.name} hands back group {group_id!r}: {error}") from error
                for sample, part in zip(samples, parts):
                    sample.status = Status(part.status)
                buffered.append(samples)
        return buffered, dropped


def _flatten(value: Any) -> list[Any]:
    """Return the elements of nested lists in one list."""
    if isinstance(value, list | tuple):
        return [item for part in value for item in _flatten(part)]
    return [value]


# ---- evaluations -----------------------------------------------------------------------------------------------------


def find_evaluation_function(config: RolloutConfig) -> str | None:
    """Return the path of the function that generates evaluations: --eval-function-path, by default
    --rollout-function-path if the function has the parameter `evaluation`; None: the built-in evaluation. Raises
    PluginError."""
    path = config.eval_function_path or config.rollout_function_path
    if path in (None, BUILT_IN_EVALUATION):
        return None
    function = load_rollout_function(path, "eval_function_path")
    is_for_evaluations = config.eval_function_path or "evaluation" in inspect.signature(function).parameters
    return path if is_for_evaluations else None


def samples_of_evaluation(returned: Any, data_set: str, name: str) -> tuple[Any, dict[int, float]]:
    """Return the samples (possibly in nested lists) that a function returned from an evaluation, and the rewards that
    it returned in a separate list, as id() of the sample -> reward. Raises PluginError."""
    data = getattr(returned, "data", returned)
    if not isinstance(data, Mapping):
        return getattr(returned, "samples", returned), {}
    entry: Any = data.get(data_set)
    rules = [
        (
            set(data) != {data_set},
            f"{name} returned results of {', '.join(map(str, data)) or 'no data set'} from the evaluation on "
            f"{data_set}: return only the results of the data set in args.eval_prompt_data; the function is called "
            "once for each data set",
        ),
        (
            not isinstance(entry, Mapping) or "samples" not in entry,
            f'{name} returned no "samples" for {data_set}, but the evaluation records them: add the list of samples',
        ),
    ]
    check_rules(rules, PluginError)
    samples, rewards = entry["samples"], entry.get("rewards")
    if rewards is None:
        return samples, {}
    if len(rewards) != len(samples) or not all(isinstance(sample, Sample) for sample in samples):
        raise PluginError(
            f'{name} returned {len(rewards)} "rewards" for {len(samples)} "samples": return one reward for each '
            "sample of a flat list, or no rewards"
        )
    reward_of_id = {id(sample): reward for sample, reward in zip(samples, rewards)}
    numbers, wrong = to_finite_numbers(reward_of_id)
    if wrong:
        raise PluginError(f'{name} returned {reward_of_id[wrong[0]]!r:.80} in "rewards": return finite numbers')
    return samples, numbers


def check_rollout_functions(config: RolloutConfig, *, evaluation: bool) -> None:
    """Check that all user-defined functions of a rollout load and have the right signature; for an evaluation, only
    those that it calls. Raises PluginError."""
    if config.custom_generate_function_path:
        load_generate_function(config.custom_generate_function_path)
    load_log_function(config, is_eval=True)
    find_evaluation_function(config)
    if evaluation:
        return
    if config.rollout_function_path:
        load_rollout_function(config.rollout_function_path)
    load_log_function(config, is_eval=False)
    load_group_filter(config)
    if config.data_source_path:
        load_data_source(config.data_source_path)
    if config.buffer_filter_path:
        load_buffer_filter(config.buffer_filter_path)
    load_train_data_function(config)
    Hooks(config)
