"""Grade samples: dispatch them to grading processes, and handle time limits and failures.

Built-in rewards that take microseconds are called in the driver process. All other rewards, including all user-defined
ones, run in supervised subprocesses (stages/worker_process.py) while generation continues: a reward can neither block
the event loop nor crash the driver, and a reward that hangs is killed. A job of such a process is one sample, or all
samples of a prompt if the reward grades them in one call; its time limit is proportional to the number of samples.

A sample whose grading fails gets the reason in `metadata["error"]`, has no reward, and is not trained on. An error that
affects all samples, such as an unknown reward, fails the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from penstock.stages.rewards.custom_reward import (
    RewardCall,
    await_all,
    await_rewards_in_turn,
    inspect_custom_reward,
    load_custom_reward,
)
from penstock.stages.rewards.hub import (
    RewardSettings,
    builtin_reward_name,
    get_builtin_reward,
    get_checked_builtin_reward,
    row_reward_path,
)
from penstock.stages.rewards.outcome import Outcome, grade_builtin, outcome_of_exception, parse_rewards
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.worker_process import WorkerLost, WorkerProcess
from penstock.storage.errors import InputError, PluginError
from penstock.storage.samples.sample import Sample

GRACE_PERIOD = 1.0  # seconds after the time limit during which the grading process can cancel an async call itself


class Grader(AbstractContextManager["Grader", None]):
    """Grades samples. Grading processes start when they are first needed, at most `num_workers` for each reward, and
    run until `close`. A row of the data may name another reward than the run's. A Grader is a context manager. The
    constructor raises RewardError if the built-in reward is unknown, or if a flag that it needs is missing."""

    def __init__(self, settings: RewardSettings, num_workers: int = 2) -> None:
        if settings.rm_type is not None and settings.custom_rm_path is None:
            get_checked_builtin_reward(settings.rm_type, settings.rm_url, settings.reward_key)
        self.settings = settings
        self.num_workers = num_workers
        # (custom_rm_path, rm_type, group_rm) -> grading processes
        self._pools: dict[tuple[str | None, str | None, bool], list[WorkerProcess]] = {}

    @classmethod
    def from_options(cls, options: RolloutConfig, num_workers: int, arguments: dict[str, Any] | None = None) -> Grader:
        """Return a grader for the rollout configuration `options`. `arguments`: attributes of the `args` that
        user-defined rewards get. Raises RewardError like the constructor."""
        settings = RewardSettings(
            rm_type=options.rm_type,
            custom_rm_path=options.custom_rm_path,
            reward_key=options.reward_key,
            timeout=options.reward_timeout,
            start_timeout=options.reward_start_timeout,
            group_rm=options.group_rm,
            rm_url=options.rm_url,
            rm_model_path=options.rm_model_path,
            arguments=arguments or {},
            allow_row_code=options.allow_row_code,
            evaluated_integers=options.rm_evaluated_integers,
        )
        return cls(settings, num_workers)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Start grading a sample, and return a future with the outcome, which the caller applies to the sample
        (`Outcome.apply`). A reward function that takes groups (--group-rm) gets a group of only this sample."""
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
            for worker in pool:
                worker.close()
        self._pools = {}

    def _submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        try:
            settings = self._settings_of_grading_process(samples[0])
        except InputError as error:
            for future in futures:
                future.set_result(Outcome(request_error=str(error)))
            return futures
        if settings is None:
            for sample, future in zip(samples, futures):
                future.set_result(grade_builtin(sample, self.settings))
            return futures
        pool = self._pools.setdefault((settings.custom_rm_path, settings.rm_type, settings.group_rm), [])
        if len(pool) < self.num_workers and all(worker.num_pending for worker in pool):
            pool.append(WorkerProcess(prepare_grading, settings, start_seconds=settings.start_timeout).start())
        _submit_job(min(pool, key=lambda worker: worker.num_pending), settings, samples, futures)
        return futures

    def _settings_of_grading_process(self, sample: Sample) -> RewardSettings | None:
        """Return the settings of the grading processes for this sample, or None to grade it in the current process.
        Raises InputError."""
        path_of_row = row_reward_path(sample.metadata, self.settings.allow_row_code)
        if path := path_of_row or self.settings.custom_rm_path:
            return replace(
                self.settings,
                custom_rm_path=path,
                rm_type=None,
                group_rm=self.settings.group_rm and not path_of_row,  # a row's function takes single samples
                required_package=self.settings.allow_row_code if path_of_row else None,
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
            reward = inspect_custom_reward(
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
    the path of the user-defined reward, with the name of its function; None without one."""
    if options.rm_type is not None:
        get_checked_builtin_reward(options.rm_type, options.rm_url, options.reward_key)
    if options.custom_rm_path is None:
        return None
    return inspect_custom_reward(
        options.custom_rm_path,
        group_rm=options.group_rm,
        rm_model_path=options.rm_model_path,
        timeout=options.reward_start_timeout,
    ).path


# ---- grading processes -----------------------------------------------------------------------------------------------


def _submit_job(
    worker: WorkerProcess, settings: RewardSettings, samples: list[Sample], futures: list[Future[Outcome]]
) -> None:
    """Submit `samples` as one job to a grading process with `settings`, without blocking; set one future per sample."""
    for future in futures:
        future.set_running_or_notify_cancel()  # so a caller cannot cancel it: the job also grades other samples
    # Do not send these fields: they are large, and rewards do not read them.
    unread: dict[str, Any] = dict.fromkeys(
        ("routed_experts", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    )
    samples = [replace(sample, **unread) for sample in samples]

    def set_outcomes(job: Future[list[Outcome]]) -> None:
        error = job.exception()
        outcome = _outcome_of_lost_process(error, settings) if isinstance(error, WorkerLost) else error
        for index, future in enumerate(futures):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome or job.result()[index])

    worker.submit(samples, settings.timeout * len(samples) + GRACE_PERIOD).add_done_callback(set_outcomes)


def _outcome_of_lost_process(lost: WorkerLost, settings: RewardSettings) -> Outcome | PluginError:
    """Return the outcome of the job that the lost process was running; if the process had not started, return the
    error that fails all jobs."""
    name = settings.custom_rm_path or settings.rm_type or "the row's reward"
    if lost.limit is not None:
        limit = lost.limit - (0 if lost.is_loading else GRACE_PERIOD)
        reason = f"timeout: more than {limit:g} s in {name}"
    else:
        doing = "loading" if lost.is_loading else "running"
        reason = f"the grading process died: it exited while {doing} {name}"
    if not lost.is_loading:
        return Outcome(error=reason)
    return PluginError(
        f"the grading process of {name} did not start: {reason}. The reward must load within "
        f"--reward-start-timeout {settings.start_timeout:g} s and must not exit: see the reward's output in the "
        "log above"
    )


def prepare_grading(settings: RewardSettings) -> Callable[[list[Sample]], Any]:
    """Load the reward, in a grading process, and return the function that grades the samples of a job."""
    call: RewardCall
    if settings.custom_rm_path:
        reward = load_custom_reward(
            settings.custom_rm_path,
            group_rm=settings.group_rm,
            rm_model_path=settings.rm_model_path,
            required_package=settings.required_package,
        )
        call_reward, name, is_async = reward.build_reward_call(settings), reward.name, reward.is_async
        call = lambda samples: call_reward([UserSample.of(sample) for sample in samples])
    elif settings.rm_type is not None and get_builtin_reward(settings.rm_type).remote:
        function, name, is_async = get_builtin_reward(settings.rm_type).function, settings.rm_type, True
        args = SimpleNamespace(rm_url=settings.rm_url, reward_timeout=settings.timeout)
        call = lambda samples: await_rewards_in_turn(function, args, samples)
    else:
        return lambda samples: [grade_builtin(sample, settings) for sample in samples]
    runner = asyncio.Runner()  # one event loop for all synchronous calls: a client that the reward keeps belongs to it

    def grade_in_turn(samples: list[Sample]) -> list[Outcome]:
        try:
            values = runner.run(await_all(call(samples)))
        except (Exception, SystemExit) as error:
            return [outcome_of_exception(error, name)] * len(samples)
        return parse_rewards(values, len(samples), settings.reward_key, name)

    async def grade_concurrently(samples: list[Sample]) -> list[Outcome]:
        limit = settings.timeout * len(samples)
        try:
            async with asyncio.timeout(limit):
                values = await await_all(call(samples))
            return parse_rewards(values, len(samples), settings.reward_key, name)
        except TimeoutError:
            return [Outcome(error=f"timeout: more than {limit:g} s in {name}")] * len(samples)
        except (Exception, SystemExit) as error:  # SystemExit would stop the event loop and thereby all other jobs
            return [outcome_of_exception(error, name)] * len(samples)

    return grade_concurrently if is_async else grade_in_turn
