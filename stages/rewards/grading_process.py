"""Grade samples in a supervised subprocess (stages/worker_process.py). If the process hangs or dies, its current job
fails and the process is restarted.

A job is one sample, or all samples of a prompt if the reward grades them in one call; the time limit of a job is
proportional to its number of samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from penstock.stages.rewards.custom_reward import RewardCall, await_all, await_rewards_in_turn, load_custom_reward
from penstock.stages.rewards.hub import RewardSettings, get_builtin_reward
from penstock.stages.rewards.outcome import Outcome, failed_outcome, grade_builtin, outcome_of_exception, parse_rewards
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.worker_process import WorkerLost, WorkerProcess
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample

GRACE_PERIOD = 1.0  # seconds after the time limit during which the grading process can cancel an async call itself


class GradingProcess:
    """Grades samples in a supervised subprocess. Thread-safe; `submit` does not block."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.worker = WorkerProcess(prepare_grading, settings, start_seconds=settings.start_timeout)

    def submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        """Submit `samples` as one job, and return one future outcome per sample."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        for future in futures:
            future.set_running_or_notify_cancel()  # a caller that cancels it must not stop the grading of others
        # Do not send routed_experts and teacher_logprobs: they are large, and rewards do not read them.
        samples = [replace(sample, routed_experts=None, teacher_logprobs=None) for sample in samples]
        job = self.worker.submit(samples, self.settings.timeout * len(samples) + GRACE_PERIOD)
        job.add_done_callback(partial(self._set_outcomes, futures))
        return futures

    def _set_outcomes(self, futures: list[Future[Outcome]], job: Future[list[Outcome]]) -> None:
        error = job.exception()
        outcome = self._outcome_of_lost_process(error) if isinstance(error, WorkerLost) else error
        for index, future in enumerate(futures):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome or job.result()[index])

    def _outcome_of_lost_process(self, lost: WorkerLost) -> Outcome | PluginError:
        """Return the outcome of the job that the process was running; if it has not started, the error of all jobs."""
        settings = self.settings
        name = settings.custom_rm_path or settings.rm_type or "the row's reward"
        if lost.limit is not None:
            limit = lost.limit - (0 if lost.is_loading else GRACE_PERIOD)
            reason = f"timeout: more than {limit:g} s in {name}"
        else:
            doing = "loading" if lost.is_loading else "running"
            reason = f"the grading process died: it exited while {doing} {name}"
        if not lost.is_loading:
            return failed_outcome(reason)
        return PluginError(
            f"the grading process of {name} did not start: {reason}. The reward must load within "
            f"--reward-start-timeout {settings.start_timeout:g} s and must not exit: see the reward's output in the "
            "log above"
        )


def prepare_grading(settings: RewardSettings) -> Callable[[list[Sample]], Any]:
    """Load the reward, in a grading process, and return the function that grades the samples of a job. Raises
    InputError."""
    call: RewardCall
    if settings.custom_rm_path:
        reward = load_custom_reward(
            settings.custom_rm_path,
            group_rm=settings.group_rm,
            rm_model_path=settings.rm_model_path,
            required_package=settings.required_package,
        )
        call_reward, name = reward.build_reward_call(settings), reward.name
        call = lambda samples: call_reward([UserSample.of(sample) for sample in samples])
        return (_grade_async if reward.is_async else _grade_in_turn)(call, name, settings)
    if settings.rm_type is None or not get_builtin_reward(settings.rm_type).remote:
        return lambda samples: [grade_builtin(sample, settings) for sample in samples]
    args = SimpleNamespace(rm_url=settings.rm_url, reward_timeout=settings.timeout)
    call = partial(await_rewards_in_turn, get_builtin_reward(settings.rm_type).function, args)
    return _grade_async(call, settings.rm_type, settings)


def _grade_in_turn(call: RewardCall, name: str, settings: RewardSettings) -> Callable[[list[Sample]], Any]:
    runner = asyncio.Runner()  # one event loop for all calls: a client that the reward keeps belongs to its loop

    def grade(samples: list[Sample]) -> list[Outcome]:
        try:
            values = runner.run(await_all(call(samples)))
        except (Exception, SystemExit) as error:
            return [outcome_of_exception(error, name)] * len(samples)
        return parse_rewards(values, len(samples), settings.reward_key, name)

    return grade


def _grade_async(call: RewardCall, name: str, settings: RewardSettings) -> Callable[[list[Sample]], Any]:
    async def call_without_exit(samples: list[Sample]) -> object:
        try:
            return await await_all(call(samples))
        except SystemExit as error:  # would stop the event loop and thereby all other jobs
            raise PluginError(f"SystemExit: {error.code!r}") from error

    async def grade(samples: list[Sample]) -> list[Outcome]:
        limit = settings.timeout * len(samples)
        try:
            values = await asyncio.wait_for(call_without_exit(samples), limit)
            return parse_rewards(values, len(samples), settings.reward_key, name)
        except TimeoutError:
            return [failed_outcome(f"timeout: more than {limit:g} s in {name}")] * len(samples)
        except Exception as error:
            return [outcome_of_exception(error, name)] * len(samples)

    return grade
