"""Grading samples: who does it, under which time limit, and what becomes of a sample whose grader hangs or raises.

Rewards that are certain to end within microseconds are called in place. All others, and every function of the user's, run in
grading processes while generation goes on: a grader can neither stall the event loop nor crash the driver, and what hangs is
killed. Such a sample is `failed` with its reason in `metadata["error"]`, has no reward and is not trained. A wrong request is a
RewardError or PluginError. The order: a row's `custom_rm_path`, --custom-rm-path, a row's `rm_type`, --rm-type.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from stages.rewards.check_form import is_class_reward
from stages.rewards.hub import Reward, reward_named
from stages.rewards.outcome import Outcome, Settings, custom_path_of, outcome_of, rm_type_of, row_code_of
from stages.rewards.process import GradingProcess
from storage.errors import InputError, PluginError, RewardError
from storage.sample import Sample


class RewardOptions(Protocol):
    """Fields of the configuration that say how samples are graded."""

    rm_type: str | None
    custom_rm_path: str | None
    reward_key: str | None
    reward_timeout: float
    reward_start_timeout: float
    group_rm: bool
    rm_url: str | None
    rm_model_path: str | None
    allow_row_code: str | None
    rm_evaluated_integers: bool


class Grader:
    """Grades samples. Processes start at first need and live until `close`; a context manager.

    Args:
        rm_type: built-in reward, unless a sample's metadata names another.
        custom_rm_path: function or class of the user's; it goes before any built-in reward.
        reward_key: which entry of a dictionary is the reward.
        timeout: seconds a sample.
        start_timeout: seconds until a process is ready, a model of the user's loaded.
        num_workers: grading processes; rows that name rewards of their own have as many for each.
        group_rm: the function at `custom_rm_path` grades all samples of a prompt at once.
        rm_url: server of `remote_rm`.
        rm_model_path: what the constructor of a class gets.
        arguments: attributes of the `args` that a custom function gets.
        allow_row_code: package from which rows may name functions of their own; None refuses such rows.
        evaluated_integers: of `math` and `deepscaler`: an integer label wants a number.

    Raises:
        RewardError: no such built-in reward, or `rm_url` is missing.
    """

    def __init__(
        self,
        rm_type: str | None = None,
        custom_rm_path: str | None = None,
        *,
        reward_key: str | None = None,
        timeout: float = 30.0,
        start_timeout: float = 300.0,
        num_workers: int = 2,
        group_rm: bool = False,
        rm_url: str | None = None,
        rm_model_path: str | None = None,
        arguments: dict[str, Any] | None = None,
        allow_row_code: str | None = None,
        evaluated_integers: bool = False,
    ) -> None:
        self.settings = Settings(
            rm_type,
            custom_rm_path,
            reward_key,
            timeout,
            start_timeout,
            group_rm,
            rm_url,
            rm_model_path,
            arguments or {},
            allow_row_code,
            evaluated_integers,
        )
        if rm_type is not None and custom_rm_path is None:
            check_built_in(rm_type, rm_url, reward_key)
        self.num_workers = num_workers
        self._pools: dict[tuple[str | None, str | None, bool], list[GradingProcess]] = {}  # path, built-in name, groups

    @classmethod
    def from_options(cls, options: RewardOptions, num_workers: int, arguments: dict[str, Any] | None = None) -> Grader:
        """Return the grader that a configuration describes. Raises as the constructor does."""
        return cls(
            options.rm_type,
            options.custom_rm_path,
            reward_key=options.reward_key,
            timeout=options.reward_timeout,
            start_timeout=options.reward_start_timeout,
            num_workers=num_workers,
            group_rm=options.group_rm,
            rm_url=options.rm_url,
            rm_model_path=options.rm_model_path,
            arguments=arguments,
            allow_row_code=options.allow_row_code,
            evaluated_integers=options.rm_evaluated_integers,
        )

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Begin to grade. The outcome is written into the sample by its owner (`Outcome.apply`).

        A function that grades groups gets a group of one: do not ask for that where siblings exist (`submit_group`).
        """
        return self._submit([sample])[0]

    def submit_group(self, samples: list[Sample]) -> list[Future[Outcome]]:
        """Begin to grade the samples of one prompt: at once if their reward takes groups, else each by itself."""
        if samples and self._grades_together(samples[0]):
            return self._submit(samples)
        return [self.submit(sample) for sample in samples]

    def grade(self, samples: list[Sample]) -> None:
        """Grade all of them and write the outcomes into them. Raises RewardError if the request is wrong."""
        futures = [self.submit(sample) for sample in samples]
        for sample, future in zip(samples, futures):
            future.result().apply(sample)

    def close(self) -> None:
        """End the grading processes."""
        for pool in self._pools.values():
            for process in pool:
                process.close()
        self._pools = {}

    def _submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        try:
            settings = self._settings_of(samples[0])
        except InputError as error:
            return [_known(Outcome(wrong=str(error))) for _ in samples]
        if settings is None:
            return [_known(outcome_of(sample, self.settings)) for sample in samples]
        pool = self._pools.setdefault((settings.custom_rm_path, settings.rm_type, settings.group_rm), [])
        if len(pool) < self.num_workers and all(process.num_pending for process in pool):
            pool.append(GradingProcess(settings))
        return min(pool, key=lambda process: process.num_pending).submit(samples)

    def _settings_of(self, sample: Sample) -> Settings | None:
        """Of the processes that grade this sample; None if it is graded in place. Raises InputError if nothing can grade it."""
        path = custom_path_of(sample, self.settings)
        if path is not None:
            within = self.settings.allow_row_code if row_code_of(sample.metadata, self.settings.allow_row_code) else None
            return replace(self.settings, custom_rm_path=path, rm_type=None, group_rm=self._is_group(sample), within=within)
        name = rm_type_of(sample, self.settings)
        if name is None:
            return None  # `outcome_of` says so
        reward = check_built_in(name, self.settings.rm_url, self.settings.reward_key)
        if reward.instant:
            return None
        if reward.remote:
            return replace(self.settings, rm_type=name)
        usual = self.settings.rm_type  # all that are not remote share their processes
        return replace(self.settings, rm_type=None if usual and reward_named(usual).remote else usual)

    def _is_group(self, sample: Sample) -> bool:
        """A row's own function takes one sample, also under --group-rm."""
        return self.settings.group_rm and not sample.metadata.get("custom_rm_path")

    def _grades_together(self, sample: Sample) -> bool:
        try:
            path = custom_path_of(sample, self.settings)
            if path is None:
                return False
            is_class = is_class_reward(
                path,
                group_rm=self._is_group(sample),
                rm_model_path=self.settings.rm_model_path,
                within=self.settings.allow_row_code if sample.metadata.get("custom_rm_path") else None,
                timeout=self.settings.start_timeout,
            )
        except PluginError:
            return False  # `submit` says what is wrong with it
        return is_class or self._is_group(sample)


def check_reward(
    rm_type: str | None,
    custom_rm_path: str | None,
    *,
    reward_key: str | None = None,
    group_rm: bool = False,
    rm_url: str | None = None,
    rm_model_path: str | None = None,
    start_timeout: float = 300.0,
) -> None:
    """Check that the built-in reward exists, and that the custom one loads and can be called. Raises RewardError or PluginError."""
    if rm_type is not None:
        check_built_in(rm_type, rm_url, reward_key)
    if custom_rm_path is not None:
        is_class_reward(custom_rm_path, group_rm=group_rm, rm_model_path=rm_model_path, timeout=start_timeout)


def check_reward_of(options: RewardOptions) -> None:
    """`check_reward` of what a configuration says."""
    check_reward(
        options.rm_type,
        options.custom_rm_path,
        reward_key=options.reward_key,
        group_rm=options.group_rm,
        rm_url=options.rm_url,
        rm_model_path=options.rm_model_path,
        start_timeout=options.reward_start_timeout,
    )


def check_built_in(name: str, rm_url: str | None, reward_key: str | None) -> Reward:
    """Return a built-in reward that has what it needs: `reward_key` and `rm_url`. Raises RewardError."""
    reward = reward_named(name)
    if reward.keys and reward_key not in reward.keys:
        raise RewardError(
            f"the reward {name} is a dictionary with {', '.join(reward.keys)}: name one with --reward-key (now {reward_key})"
        )
    if reward.remote and not rm_url:
        raise RewardError(f"the reward {name} asks a server: give its address with --rm-url")
    return reward


def _known(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
