"""Runs functions of the user's that may wait for long, so that they can neither stall nor end this process.

Asynchronous ones share one event loop in a thread of its own, for life: what they keep between calls (a connection, a semaphore) belongs to
it. Each of the others has a thread. All threads are daemons: what hangs keeps nobody from exiting. If a function blocks the loop,
it has failed, and the others begin anew in another loop. What holds the interpreter's lock inside C code still stalls everything.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

PATIENCE = 10.0  # seconds within which a loop must answer; one that does not is blocked
GRACE = 5.0  # seconds that functions have to return when nothing more is wanted of them


class NoResult(Exception):
    """A call has failed; one sentence that names the function."""


class Stopped(Exception):
    """A call was given up because nothing more is wanted of it."""


class _Moved(Exception):
    """The loop of a call is blocked by another one: it is to begin anew."""


class UserCode:
    """Calls of one function.

    Args:
        name: of it, for messages.
        is_async: it has `async`: it runs in the loop and not in a thread of its own.
    """

    def __init__(self, name: str, *, is_async: bool) -> None:
        self.name = name
        self.is_async = is_async
        self._calls: set[_Call] = set()
        self._stopping = False

    async def run(self, function: Callable[[], Any], limit: float) -> Any:
        """What it returns; an awaitable is awaited. `function` is called again if another one has blocked its loop.

        Raises:
            NoResult: it raises, or takes more than `limit` seconds.
            Stopped: `stop` was called.
        """
        while not self._stopping:
            loop = _PluginLoop.current()
            call = _Call(function, loop)
            self._calls.add(call)
            waiting = asyncio.wrap_future(call.result)
            call.start(in_thread=not self.is_async)
            try:
                await asyncio.wait({waiting}, timeout=limit)
                if not call.result.done() and self.is_async and not await loop.answers(min(limit, PATIENCE)):
                    loop.give_up(call, f"{self.name} blocks its event loop: `await` what takes long, or leave out `async`")
                if not call.result.done():
                    raise NoResult(f"{self.name} takes more than {limit:g} s: make it faster, or raise --generate-timeout")
                error = call.result.exception()
            finally:
                self._calls.discard(call)
                call.abandon()
                waiting.cancel()
            if error is None:
                return call.result.result()
            if isinstance(error, NoResult | Stopped):
                raise error
            if not isinstance(error, _Moved):  # also SystemExit: the function of a sample does not end the run
                raise NoResult(f"{self.name} raises {type(error).__name__}: {error}") from error
        raise Stopped

    async def stop(self) -> None:
        """Begin nothing more; what has not returned after `GRACE` seconds is given up."""
        self._stopping = True
        if self._calls:
            await asyncio.wait({asyncio.wrap_future(call.result) for call in self._calls}, timeout=GRACE)
        for call in self._calls:
            call.settle(error=Stopped())


class _Call:
    """One call, and what came of it."""

    def __init__(self, function: Callable[[], Any], home: _PluginLoop) -> None:
        self.function = function
        self.home = home
        self.result: Future[Any] = Future()
        self.task: asyncio.Task[None] | None = None  # in the plug-in loop
        self._abandoned = False

    def start(self, *, in_thread: bool) -> None:
        if in_thread:
            threading.Thread(target=self._in_thread, name="penstock-plugin", daemon=True).start()
        else:
            self.home.calls.add(self)
            self.home.loop.call_soon_threadsafe(self._begin, self.function)

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """What comes first counts."""
        with suppress(InvalidStateError):
            if error is None:
                self.result.set_result(value)
            else:
                self.result.set_exception(error)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._abandoned = True
        self.home.calls.discard(self)
        self.home.loop.call_soon_threadsafe(self._cancel)

    def _in_thread(self) -> None:
        try:
            value = self.function()
        except BaseException as error:
            self.settle(error=error)
            return
        if inspect.isawaitable(value):  # of a function that hides its `async`, behind a decorator say
            self.home.loop.call_soon_threadsafe(self._begin, lambda: value)
        else:
            self.settle(value)

    def _begin(self, function: Callable[[], Any]) -> None:
        if not self._abandoned:
            self.task = self.home.loop.create_task(self._in_loop(function))

    async def _in_loop(self, function: Callable[[], Any]) -> None:
        try:
            value = function()
            self.settle(await value if inspect.isawaitable(value) else value)
        except BaseException as error:
            self.settle(error=RuntimeError("it was cancelled") if isinstance(error, asyncio.CancelledError) else error)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _PluginLoop:
    """An event loop in a daemon thread."""

    _shared: _PluginLoop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls: set[_Call] = set()
        threading.Thread(target=self.loop.run_forever, name="penstock-plugins", daemon=True).start()

    @classmethod
    def current(cls) -> _PluginLoop:
        """The one that new calls go to."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    async def answers(self, limit: float) -> bool:
        """Whether it runs on within `limit` seconds."""
        sign: Future[None] = Future()
        self.loop.call_soon_threadsafe(sign.set_result, None)
        await asyncio.wait({asyncio.wrap_future(sign)}, timeout=limit)
        return sign.done()

    def give_up(self, overdue: _Call, reason: str) -> None:
        """Use it no more. The call that runs right now is the one that blocks it (else `overdue` is); all others are to begin anew."""
        with self._lock:
            if _PluginLoop._shared is self:
                _PluginLoop._shared = None
        running = asyncio.current_task(self.loop)
        calls = list(self.calls)
        guilty = next((call for call in calls if running is not None and call.task is running), overdue)
        for call in calls:
            call.settle(error=NoResult(reason) if call is guilty else _Moved())
