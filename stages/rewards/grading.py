"""Grade samples: dispatch them to grading processes, and handle time limits and failures.

Built-in rewards that take microseconds are called in the driver process. All other rewards, including all user-defined
ones, run in grading processes while generation continues: a reward can neither block the event loop nor crash the
driver, and a reward that hangs is killed. A sample whose grading fails gets the reason in `metadata["error"]`, has no
reward, and is not trained on. An error that affects all samples, such as an unknown reward, fails the run.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from penstock.stages.rewards.custom_reward import check_custom_reward
from penstock.stages.rewards.grading_process import GradingProcess
from penstock.stages.rewards.hub import (
    RewardSettings,
    builtin_reward_name,
    custom_reward_path,
    get_builtin_reward,
    get_checked_builtin_reward,
)
from penstock.stages.rewards.outcome import Outcome, grade_builtin
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import InputError
from penstock.storage.samples.sample import Sample


class Grader:
    """Grades samples. Grading processes start when first needed and run until `close`. A Grader is a context manager.
    Raises RewardError.

    Args:
        settings: settings of grading.
        num_workers: maximum number of grading processes per reward; rows may name additional rewards.
    """

    def __init__(self, settings: RewardSettings, num_workers: int = 2) -> None:
        if settings.rm_type is not None and settings.custom_rm_path is None:
            get_checked_builtin_reward(settings.rm_type, settings.rm_url, settings.reward_key)
        self.settings = settings
        self.num_workers = num_workers
        # (custom_rm_path, rm_type, group_rm) -> grading processes
        self._pools: dict[tuple[str | None, str | None, bool], list[GradingProcess]] = {}

    @classmethod
    def from_options(cls, options: RolloutConfig, num_workers: int, arguments: dict[str, Any] | None = None) -> Grader:
        """Return a grader for the rollout configuration `options`. `arguments`: attributes of the `args` that
        user-defined rewards get. Raises RewardError like the constructor."""
        return cls(RewardSettings.from_options(options, arguments), num_workers)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Start grading a sample, and return a future with the outcome, which the caller applies to the sample
        (`Outcome.apply`).

        A reward function that takes groups (--group-rm) gets a group of only this sample; use `submit_group` to grade
        all samples of a prompt together.
        """
        return self._submit([sample])[0]

    def submit_group(self, samples: list[Sample]) -> list[Future[Outcome]]:
        """Start grading the samples of one prompt, and return one future outcome per sample. A reward that takes groups
        grades all samples in one call."""
        if samples and self._takes_whole_group(samples[0]):
            return self._submit(samples)
        return [self.submit(sample) for sample in samples]

    def grade(self, samples: list[Sample]) -> None:
        """Grade samples, wait for the outcomes, and apply them to the samples. Raises RewardError if the reward
        settings are wrong."""
        futures = [self.submit(sample) for sample in samples]
        for sample, future in zip(samples, futures):
            future.result().apply(sample)

    def close(self) -> None:
        """Stop the grading processes."""
        for pool in self._pools.values():
            for process in pool:
                process.worker.close()
        self._pools = {}

    def _submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        try:
            settings = self._settings_of_grading_process(samples[0])
        except InputError as error:
            return [_completed_future(Outcome(request_error=str(error))) for _ in samples]
        if settings is None:
            return [_completed_future(grade_builtin(sample, self.settings)) for sample in samples]
        pool = self._pools.setdefault((settings.custom_rm_path, settings.rm_type, settings.group_rm), [])
        if len(pool) < self.num_workers and all(process.worker.num_pending for process in pool):
            pool.append(GradingProcess(settings))
        return min(pool, key=lambda process: process.worker.num_pending).submit(samples)

    def _settings_of_grading_process(self, sample: Sample) -> RewardSettings | None:
        """Return the settings of the grading processes for this sample, or None to grade it in the current process.
        Raises InputError."""
        path = custom_reward_path(sample, self.settings)
        if path is not None:
            is_of_row = bool(sample.metadata.get("custom_rm_path"))  # a function that takes single samples
            return replace(
                self.settings,
                custom_rm_path=path,
                rm_type=None,
                group_rm=self.settings.group_rm and not is_of_row,
                required_package=self.settings.allow_row_code if is_of_row else None,
            )
        name = builtin_reward_name(sample.metadata, self.settings.rm_type)
        reward = get_checked_builtin_reward(name, self.settings.rm_url, self.settings.reward_key)
        if reward.in_process:
            return None
        if reward.remote:
            return replace(self.settings, rm_type=name)
        default = self.settings.rm_type  # all built-in rewards that are not remote share processes
        return replace(self.settings, rm_type=None if default and get_builtin_reward(default).remote else default)

    def _takes_whole_group(self, sample: Sample) -> bool:
        try:
            settings = self._settings_of_grading_process(sample)
            if settings is None or settings.custom_rm_path is None:
                return False
            reward = check_custom_reward(
                settings.custom_rm_path,
                group_rm=settings.group_rm,
                rm_model_path=settings.rm_model_path,
                required_package=settings.required_package,
                timeout=settings.start_timeout,
            )
        except InputError:
            return False  # `submit` reports the error
        return reward.is_class or settings.group_rm


def check_reward_options(options: RolloutConfig) -> str | None:
    """Check that the built-in reward exists, or that the user-defined reward loads and has the right signature. Return
    the path of the user-defined reward, with the name of its function. Raises RewardError or PluginError."""
    if options.rm_type is not None:
        get_checked_builtin_reward(options.rm_type, options.rm_url, options.reward_key)
    if options.custom_rm_path is None:
        return None
    return check_custom_reward(
        options.custom_rm_path,
        group_rm=options.group_rm,
        rm_model_path=options.rm_model_path,
        timeout=options.reward_start_timeout,
    ).path


def _completed_future(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
