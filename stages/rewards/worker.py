"""A grading process: `python -m stages.rewards.worker FD`. The parent's side, and all decisions about it, are in process.py.

It receives the settings and answers `("ready", "")` or `("wrong", sentence)`; then it receives `(index, sample)` any number of
times and answers `(index, Outcome)` for each. It ends with its parent, whatever a grader is doing.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from stages.rewards.outcome import Settings, failed, outcome_of
from storage.plugins import load_function
from storage.sample import Sample

ASYNC_AT_ONCE = 64  # coroutines of one process in flight
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def main() -> None:
    """Grade until the parent goes away."""
    if sys.platform == "linux":  # elsewhere `_receive` alone notices; it cannot while C code holds the interpreter lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    settings: Settings = connection.recv()
    try:
        function = _custom(settings) if settings.custom_rm_path else None
    except ValueError as error:
        connection.send(("wrong", str(error)))
        return
    connection.send(("ready", ""))
    if function is not None and _is_async(function):
        asyncio.run(_serve_async(connection, settings, function))
    else:
        _serve(connection, settings, function)


def _custom(settings: Settings) -> Callable[[Sample], Any]:
    assert settings.custom_rm_path is not None
    function = load_function(settings.custom_rm_path)
    arguments = SimpleNamespace(**settings.arguments)
    if _is_async(function):

        async def call_async(sample: Sample) -> Any:
            return await function(arguments, sample)

        return call_async
    return lambda sample: function(arguments, sample)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _serve(connection: Connection, settings: Settings, function: Callable[[Sample], Any] | None) -> None:
    """One sample after the other; the parent ends this process if one takes too long."""
    jobs: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()
    _receive(connection, jobs.put)
    while True:
        index, sample = jobs.get()
        connection.send((index, outcome_of(sample, settings, function)))


async def _serve_async(connection: Connection, settings: Settings, function: Callable[[Sample], Any]) -> None:
    """Many at a time: such functions mostly wait for a server."""
    loop = asyncio.get_running_loop()
    at_once = asyncio.Semaphore(ASYNC_AT_ONCE)

    async def grade(index: int, sample: Sample) -> None:
        async with at_once:
            try:
                value = await asyncio.wait_for(function(sample), settings.timeout)
                outcome = outcome_of(sample, settings, lambda _: value)
            except TimeoutError:
                outcome = failed(f"timeout: more than {settings.timeout:g} s")
            except Exception as error:
                outcome = failed(f"{type(error).__name__}: {error}")
        connection.send((index, outcome))

    _receive(connection, lambda job: asyncio.run_coroutine_threadsafe(grade(*job), loop))
    await asyncio.Event().wait()


def _receive(connection: Connection, accept: Callable[[tuple[int, Sample]], object]) -> None:
    def run() -> None:
        while True:
            try:
                accept(connection.recv())
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    main()
