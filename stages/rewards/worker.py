"""A grading process: `python -m stages.rewards.worker FD`. The parent's side, and all decisions about it, are in process.py.

It receives the settings and answers `("ready", "")` or `("wrong", error)`; then it receives `(index, samples)` any number of
times and answers `(index, outcomes)` for each. It ends with its parent, whatever a grader is doing.
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
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from stages.rewards.forms import Call, find_form
from stages.rewards.hub import reward_named
from stages.rewards.outcome import Outcome, Settings, failed, outcome_of, outcomes_from, raised
from storage.errors import InputError, PluginError
from storage.sample import Sample

ASYNC_AT_ONCE = 64  # coroutines of one process in flight
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
Job = tuple[int, list[Sample]]


def main() -> None:
    """Grade until the parent goes away."""
    if sys.platform == "linux":  # elsewhere `_receive` alone notices; it cannot while C code holds the interpreter lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    settings: Settings = connection.recv()
    try:
        name, call, is_async = _grader(settings)
    except InputError as error:
        connection.send(("wrong", error))
        return
    connection.send(("ready", ""))
    if call is None:
        _serve(connection, lambda samples: [outcome_of(sample, settings) for sample in samples])
    elif is_async:
        asyncio.run(_serve_async(connection, settings, name, call))
    else:
        _serve(connection, lambda samples: _called(samples, settings, name, call))


def _grader(settings: Settings) -> tuple[str, Call | None, bool]:
    """Name, how to call it, and whether that is awaited; nothing to call if built-in functions grade. Raises InputError."""
    if settings.custom_rm_path:
        form = find_form(
            settings.custom_rm_path, group_rm=settings.group_rm, rm_model_path=settings.rm_model_path, within=settings.within
        )
        return form.name, form.ready(settings), form.is_async
    if settings.rm_type is None or not reward_named(settings.rm_type).remote:
        return "", None, False
    function = reward_named(settings.rm_type).function
    arguments = SimpleNamespace(rm_url=settings.rm_url, reward_timeout=settings.timeout)

    async def ask(samples: list[Sample]) -> list[Any]:
        return [await function(arguments, sample) for sample in samples]

    return settings.rm_type, ask, True


def _called(samples: list[Sample], settings: Settings, name: str, call: Call) -> list[Outcome]:
    try:
        values = call(samples)
    except (Exception, SystemExit) as error:
        return [raised(error, name)] * len(samples)
    return outcomes_from(values, len(samples), settings.reward_key, name)


def _serve(connection: Connection, grade: Callable[[list[Sample]], list[Outcome]]) -> None:
    """One job after the other; the parent ends this process if one takes too long."""
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    _receive(connection, jobs.put)
    while True:
        index, samples = jobs.get()
        connection.send((index, grade(samples)))


async def _serve_async(connection: Connection, settings: Settings, name: str, call: Call) -> None:
    """Many at a time: such functions mostly wait for a server."""
    loop = asyncio.get_running_loop()
    at_once = asyncio.Semaphore(ASYNC_AT_ONCE)

    async def grade(index: int, samples: list[Sample]) -> None:
        limit = settings.timeout * len(samples)
        async with at_once:
            try:
                values = await asyncio.wait_for(_without_exit(call, samples), limit)
                outcomes = outcomes_from(values, len(samples), settings.reward_key, name)
            except TimeoutError:
                outcomes = [failed(f"timeout: more than {limit:g} s in {name}")] * len(samples)
            except Exception as error:
                outcomes = [raised(error, name)] * len(samples)
        connection.send((index, outcomes))

    _receive(connection, lambda job: asyncio.run_coroutine_threadsafe(grade(*job), loop))
    await asyncio.Event().wait()


async def _without_exit(call: Call, samples: list[Sample]) -> Any:
    """What `call` gives. SystemExit would end the event loop, and every other sample in flight with it."""
    try:
        return await call(samples)
    except SystemExit as error:
        raise PluginError(f"SystemExit: {error.code!r}") from error


def _receive(connection: Connection, accept: Callable[[Job], object]) -> None:
    def run() -> None:
        while True:
            try:
                accept(connection.recv())
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    main()
