"""Run user-defined functions that may take long, so that they can neither stall nor terminate this process.

All async functions share one event loop, which runs in a separate thread. The loop is kept as long as the process runs,
because objects that functions keep between calls (a connection, a semaphore) are bound to the loop. Each call of a
synchronous function runs in a new thread. All threads are daemons, so a hanging function does not prevent this process
from exiting. If an async function blocks the event loop, its call fails and the other calls restart in a new loop. A
function that holds the interpreter's lock (GIL) inside C code still stalls the whole process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.stages.plugins import describe_error
from penstock.storage.errors import PluginError

PATIENCE = 10.0  # seconds after which an event loop that does not respond is considered blocked
GRACE = 5.0  # seconds that running calls have to return after `stop`


class Cancelled(Exception):
    """Raised by `PluginRunner.run` if the call was cancelled because the round is over."""


class _BlockedError(PluginError):
    """Error of a call that blocked the shared event loop."""


class _LoopReplaced(Exception):
    """Error of a call whose event loop was blocked by another call; `PluginRunner.run` then repeats the call."""


@dataclass(eq=False)
class PluginRunner:
    """Runs the calls of one user-defined function, each in a new thread or, if `is_async`, in the shared event loop."""

    name: str
    is_async: bool
    _calls: set[_Call] = field(default_factory=set)
    _stopping: bool = False

    async def run(self, function: Callable[[], Any], limit_seconds: float) -> Any:
        """Call `function`, await its result if it is awaitable, and return the result. If another call blocked the
        event loop, the call is repeated."""
        while not self._stopping:
            loop = _PluginLoop.current()
            call = _Call(function, loop)
            self._calls.add(call)
            waiting = _wait_for(call.result)
            call.start(in_thread=not self.is_async)
            try:
                await asyncio.wait({waiting}, timeout=limit_seconds)
                if (
                    not call.result.done()
                    and self.is_async
                    and not await loop.responds_within(min(limit_seconds, PATIENCE))
                ):
                    loop.abandon_and_restart_calls(
                        call,
                        f"{self.name} blocks its event loop: `await` slow operations, or define it without `async`",
                    )
                if not call.result.done():
                    raise PluginError(
                        f"{self.name} takes more than {limit_seconds:g} s: make the function faster, or raise "
                        "--generate-timeout"
                    )
                error = call.result.exception()
            finally:
                self._calls.discard(call)
                call.cancel()
                waiting.cancel()
            if error is None:
                return call.result.result()
            if isinstance(error, _BlockedError | Cancelled):
                raise error
            if not isinstance(error, _LoopReplaced):  # including SystemExit, which must not end the run
                raise PluginError(f"{self.name} raises {describe_error(error)}") from error
        raise Cancelled

    async def stop(self) -> None:
        """Start no further calls, and cancel the calls that have not returned after `GRACE` seconds."""
        self._stopping = True
        if self._calls:
            await asyncio.wait({_wait_for(call.result) for call in self._calls}, timeout=GRACE)
        for call in self._calls:
            call.set_result_once(error=Cancelled())


def _wait_for(result: Future[Any]) -> asyncio.Future[Any]:
    """Return a future of this event loop that is done when `result` is. The caller reads the error of `result`; the
    callback reads the error of the returned future, because asyncio logs errors that are never read."""
    waiting = asyncio.wrap_future(result)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting


@dataclass(eq=False)
class _Call:
    """One call of a user-defined function, with a future for its result."""

    function: Callable[[], Any]
    plugin_loop: _PluginLoop
    result: Future[Any] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None  # task of an async function in the shared event loop
    abandoned: bool = False

    def start(self, *, in_thread: bool) -> None:
        if in_thread:
            threading.Thread(target=self._run_in_thread, name="penstock-plugin", daemon=True).start()
        else:
            self.plugin_loop.calls.add(self)
            self.plugin_loop.loop.call_soon_threadsafe(self._create_task, self.function)

    def set_result_once(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the result or the error of the call, unless one is set already."""
        with suppress(InvalidStateError):
            if error is None:
                self.result.set_result(value)
            else:
                self.result.set_exception(error)

    def cancel(self) -> None:
        """Cancel the call; its result is not needed any more."""
        self.abandoned = True
        self.plugin_loop.calls.discard(self)
        self.plugin_loop.loop.call_soon_threadsafe(lambda: self.task is not None and self.task.cancel())

    def _run_in_thread(self) -> None:
        try:
            value = self.function()
        except BaseException as error:
            self.set_result_once(error=error)
            return
        if inspect.isawaitable(value):  # for example, a decorated async function
            self.plugin_loop.loop.call_soon_threadsafe(self._create_task, lambda: value)
        else:
            self.set_result_once(value)

    def _create_task(self, function: Callable[[], Any]) -> None:
        if not self.abandoned:
            self.task = self.plugin_loop.loop.create_task(self._run_in_loop(function))

    async def _run_in_loop(self, function: Callable[[], Any]) -> None:
        try:
            value = function()
            self.set_result_once(await value if inspect.isawaitable(value) else value)
        except BaseException as error:
            self.set_result_once(
                error=RuntimeError("the call was cancelled") if isinstance(error, asyncio.CancelledError) else error
            )


class _PluginLoop:
    """An event loop in a daemon thread, shared by the calls of all async user-defined functions."""

    _shared: _PluginLoop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls: set[_Call] = set()

    @classmethod
    def current(cls) -> _PluginLoop:
        """Return the shared loop for new calls; start a loop if none is running."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
                run = cls._shared.loop.run_forever
                threading.Thread(target=run, name="penstock-plugins", daemon=True).start()
            return cls._shared

    async def responds_within(self, limit_seconds: float) -> bool:
        """Return whether the event loop runs a callback within the limit, that is, whether no call blocks it."""
        response: Future[None] = Future()
        self.loop.call_soon_threadsafe(response.set_result, None)
        await asyncio.wait({asyncio.wrap_future(response)}, timeout=limit_seconds)
        return response.done()

    def abandon_and_restart_calls(self, overdue: _Call, reason: str) -> None:
        """Stop using this event loop. The call that blocks the loop (`overdue`, if the blocking call is unknown) fails
        with `reason`; all other calls restart in a new loop."""
        with self._lock:
            if _PluginLoop._shared is self:
                _PluginLoop._shared = None
        running = asyncio.current_task(self.loop)
        calls = list(self.calls)
        blocking = next((call for call in calls if running is not None and call.task is running), overdue)
        for call in calls:
            call.set_result_once(error=_BlockedError(reason) if call is blocking else _LoopReplaced())
