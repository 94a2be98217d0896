"""Entry point of a grading process, `python -m penstock.stages.rewards.worker FD`, which process.py starts.

Protocol on the pipe FD: the worker receives the RewardSettings and sends `("ready", "")` or `("invalid", error)`; then,
for each job, it receives `(job number, samples)` and sends `(job number, outcomes)`. The worker exits when its parent
exits.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from penstock.stages.rewards.custom_reward import RewardCall, await_all, await_rewards_in_turn, load_custom_reward
from penstock.stages.rewards.hub import get_builtin_reward
from penstock.stages.rewards.outcome import Outcome, failed_outcome, grade_builtin, outcome_of_exception, parse_rewards
from penstock.stages.rewards.settings import RewardSettings
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.storage.errors import InputError, PluginError
from penstock.storage.samples.sample import Sample

MAX_CONCURRENCY = 64  # maximum number of concurrent calls of an async reward in one process
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
Job = tuple[int, list[Sample]]  # job number, samples


class ParentConnection(Connection):
    """The pipe to the parent. If the parent has closed it, this process exits without a message."""

    def send(self, obj: object) -> None:
        try:
            super().send(obj)
        except OSError:
            os._exit(0)

    def recv(self) -> Any:
        try:
            return super().recv()
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    """Grade the samples that the parent process sends, until the parent exits."""
    if sys.platform == "linux":  # elsewhere `_start_receiver` detects the parent's exit, unless C code holds the GIL
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    connection = ParentConnection(int(sys.argv[1]))
    settings: RewardSettings = connection.recv()
    try:
        name, call, is_async = _load_reward(settings)
    except InputError as error:
        connection.send(("invalid", error))
        return
    connection.send(("ready", ""))
    if is_async and call is not None:
        asyncio.run(_serve_async(connection, settings, name, call))
    else:
        _serve(connection, settings, name, call)


def _load_reward(settings: RewardSettings) -> tuple[str, RewardCall | None, bool]:
    """Return the reward's name, the function to call (None: grade with `grade_builtin`), and whether the function is
    async.

    Raises:
        InputError: the reward does not load.
    """
    if settings.custom_rm_path:
        reward = load_custom_reward(
            settings.custom_rm_path,
            group_rm=settings.group_rm,
            rm_model_path=settings.rm_model_path,
            required_package=settings.required_package,
        )
        call = reward.build_reward_call(settings)
        return reward.name, lambda samples: call([UserSample.of(sample) for sample in samples]), reward.is_async
    if settings.rm_type is None or not get_builtin_reward(settings.rm_type).remote:
        return "", None, False
    args = SimpleNamespace(rm_url=settings.rm_url, reward_timeout=settings.timeout)
    return settings.rm_type, partial(await_rewards_in_turn, get_builtin_reward(settings.rm_type).function, args), True


def _serve(connection: Connection, settings: RewardSettings, name: str, call: RewardCall | None) -> None:
    """Grade jobs one after another, until this process is killed: at a job's time limit, or when the parent exits."""
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    _start_receiver(connection, jobs.put)
    runner = asyncio.Runner()  # one event loop for all calls: a client that the reward keeps belongs to its loop
    while True:
        index, samples = jobs.get()
        if call is None:
            outcomes = [grade_builtin(sample, settings) for sample in samples]
        else:
            try:
                values = runner.run(await_all(call(samples)))
            except (Exception, SystemExit) as error:
                outcomes = [outcome_of_exception(error, name)] * len(samples)
            else:
                outcomes = parse_rewards(values, len(samples), settings.reward_key, name)
        connection.send((index, outcomes))


async def _serve_async(connection: Connection, settings: RewardSettings, name: str, call: RewardCall) -> None:
    """Grade jobs concurrently, because async rewards mostly wait for a server."""
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(MAX_CONCURRENCY)

    async def call_without_exit(samples: list[Sample]) -> object:
        try:
            return await await_all(call(samples))
        except SystemExit as error:  # would stop the event loop and thereby all other jobs
            raise PluginError(f"SystemExit: {error.code!r}") from error

    async def grade(index: int, samples: list[Sample]) -> None:
        limit = settings.timeout * len(samples)
        outcomes: list[Outcome]
        async with slots:
            try:
                values = await asyncio.wait_for(call_without_exit(samples), limit)
                outcomes = parse_rewards(values, len(samples), settings.reward_key, name)
            except TimeoutError:
                outcomes = [failed_outcome(f"timeout: more than {limit:g} s in {name}")] * len(samples)
            except Exception as error:
                outcomes = [outcome_of_exception(error, name)] * len(samples)
        connection.send((index, outcomes))

    _start_receiver(connection, lambda job: asyncio.run_coroutine_threadsafe(grade(*job), loop))
    await asyncio.Event().wait()


def _start_receiver(connection: Connection, accept: Callable[[Job], object]) -> None:
    """Start a thread that passes every received job to `accept`; this process exits when the parent has exited."""

    def run() -> None:
        while True:
            accept(connection.recv())

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    main()
