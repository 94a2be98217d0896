"""Run a function in a supervised subprocess: user-defined rewards, chat templates, and the parsing of prompt files.

A job that hangs or ends the process fails alone: the process is restarted, and the other jobs are sent again. The
process is a plain subprocess, because `multiprocessing` would run the user's main script again in the child.

One thread starts the process, receives results and enforces the time limits. A second thread sends the jobs, because
sending may block: a reward that hangs in C code (for example, a regular expression) holds the child's GIL, so the child
does not read and the pipe fills up.

Protocol on the pipe, `python -m penstock.stages.worker_process FD MODULE:FUNCTION pickle|json PARENT_PID`: the child
receives the settings, calls FUNCTION(settings), which returns the function that runs jobs, and sends
(None, True, None). Then it receives (job number, job) and sends (job number, True, result), or (job number, False,
error) of an InputError.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from penstock.storage.errors import InputError

MAX_CONCURRENCY = 64  # maximum number of concurrent calls of an async function in one process
_POLL_INTERVAL = 0.1  # seconds
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_SANDBOX_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG")  # no credentials


class WorkerLost(Exception):
    """The worker process hung or died before a job had a result."""

    def __init__(self, limit: float | None, exit_code: int, is_loading: bool) -> None:
        super().__init__(limit, exit_code, is_loading)
        self.limit = limit  # seconds that were exceeded; None: the process died
        self.exit_code = exit_code
        self.is_loading = is_loading  # the process had not yet prepared the function that runs jobs


class WorkerProcess:
    """Runs jobs in a subprocess: one after another, or up to MAX_CONCURRENCY at a time if the function is async.
    Thread-safe.

    Args:
        prepare: module-level function that the subprocess calls with `settings`. It returns the function that the
            subprocess calls with each job. If `prepare` raises InputError, all jobs fail with this error.
        settings: argument of `prepare`.
        start_seconds: time limit of `prepare`. If it is exceeded, or the process dies in `prepare`, all jobs fail.
        is_sandboxed: the subprocess runs untrusted code: it gets no credentials, and its results are JSON, not pickles.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Callable[[Any], Any]],
        settings: Any,
        *,
        start_seconds: float = 300.0,
        is_sandboxed: bool = False,
    ) -> None:
        self._target, self._settings = f"{prepare.__module__}:{prepare.__qualname__}", settings
        self._start_seconds, self._is_sandboxed = start_seconds, is_sandboxed
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Any, float, Future[Any]]] = {}  # job number -> job, seconds, future
        self._num_submitted = 0
        self._unsent: queue.SimpleQueue[object] = queue.SimpleQueue()  # None stops the sender
        self._last_activity = 0.0  # time of the last message from the process, or of the first job after idling
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._fatal_error: Exception | None = None  # the reason why no further job can run
        # The kernel kills the process when this thread ends (PDEATHSIG), so the thread lives as long as the process.
        self._supervisor = threading.Thread(target=self._supervise, name="penstock-worker", daemon=True)

    def start(self) -> Self:
        """Start the process, and return this object."""
        self._supervisor.start()
        return self

    @property
    def num_pending(self) -> int:
        """Number of submitted jobs without a result."""
        return len(self._pending)

    def submit(self, job: Any, seconds: float) -> Future[Any]:
        """Start a job that may take `seconds` (the longest limit of all concurrent jobs counts). Return a future of its
        result, which raises the InputError that the function raised, or WorkerLost."""
        future: Future[Any] = Future()
        with self._lock:
            if self._fatal_error is not None:
                future.set_exception(self._fatal_error)
                return future
            if not self._pending:
                self._last_activity = time.monotonic()
            self._pending[self._num_submitted] = (job, seconds, future)
            self._unsent.put((self._num_submitted, job))
            self._num_submitted += 1
        return future

    def close(self) -> None:
        """Kill the process and fail its pending jobs."""
        self._fail_all(RuntimeError("the worker process was stopped before the job was done"))
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._supervisor.join()

    # ---- the supervisor thread ---------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Run the process until a fatal error or `close`; restart it whenever it hangs or dies."""
        try:
            while self._fatal_error is None:
                process, connection = self._start()
                sender = threading.Thread(target=_send_until_none, args=(connection, self._unsent), daemon=True)
                sender.start()
                limit = self._receive_until_lost(connection)
                process.kill()
                lost = WorkerLost(limit, process.wait(), is_loading=not self._is_ready)
                self._unsent.put(None)
                sender.join()
                connection.close()
                if lost.is_loading:
                    self._fail_all(lost)
                    return
                with self._lock:  # the process ran the oldest pending job when it hung or died
                    oldest = self._pending.pop(next(iter(self._pending), -1), None)
                if oldest is not None:
                    oldest[2].set_exception(lost)
        except Exception as error:  # for example, the process cannot be started; callers must not wait forever
            self._fail_all(error)

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, child = Pipe()
        names = _SANDBOX_ENVIRONMENT if self._is_sandboxed else tuple(os.environ)
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        arguments = (child.fileno(), self._target, "json" if self._is_sandboxed else "pickle", os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.stages.worker_process", *map(str, arguments)],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if self._is_sandboxed else None,
            stderr=subprocess.DEVNULL if self._is_sandboxed else None,
            env={name: os.environ[name] for name in names if name in os.environ}
            | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        child.close()
        with self._lock:
            self._process, self._is_ready = process, False
            self._last_activity = time.monotonic()
            self._unsent = queue.SimpleQueue()
            self._unsent.put(self._settings)
            for number, (job, _, _) in self._pending.items():
                self._unsent.put((number, job))
            if self._fatal_error is not None:  # `close` was called before it could kill this process
                process.kill()
        return process, connection

    def _receive_until_lost(self, connection: Connection) -> float | None:
        """Receive results until the process hangs, dies or is closed. Return the time limit in seconds that the process
        exceeded, or None if it died."""
        while True:
            try:
                if connection.poll(_POLL_INTERVAL):
                    self._accept(json.loads(connection.recv_bytes()) if self._is_sandboxed else connection.recv())
                    continue
            except (EOFError, OSError):
                return None
            with self._lock:
                jobs = list(self._pending.values())
            limit = max((seconds for _, seconds, _ in jobs), default=0.0) if self._is_ready else self._start_seconds
            if jobs and time.monotonic() - self._last_activity > limit:
                return limit

    def _accept(self, message: tuple[int | None, bool, Any]) -> None:
        number, is_result, value = message
        if number is None and not is_result:
            self._fail_all(value)
            return
        with self._lock:
            self._last_activity = time.monotonic()
            if number is None:
                self._is_ready = True
                return
            future = self._pending.pop(number)[2]
        if is_result:
            future.set_result(value)
        else:
            future.set_exception(value)

    def _fail_all(self, error: Exception) -> None:
        """Fail all pending and all future jobs."""
        with self._lock:
            if self._fatal_error is None:
                self._fatal_error = error
            pending, self._pending = self._pending, {}
        for _, _, future in pending.values():
            future.set_exception(error)


def _send_until_none(connection: Connection, unsent: queue.SimpleQueue[object]) -> None:
    while (message := unsent.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return  # the process died: the supervisor restarts it and sends the pending jobs again


# ---- in the subprocess -----------------------------------------------------------------------------------------------


class _ParentConnection(Connection):
    """The pipe to the parent. If the parent has closed it, this process exits without a message."""

    sends_json = False

    def answer(self, number: int | None, is_result: bool, value: Any) -> None:
        with suppress(OSError, ValueError):  # stdout may be closed
            sys.stdout.flush()  # this process will be killed, and then unflushed output of the function would be lost
        try:
            if self.sends_json:
                self.send_bytes(json.dumps((number, is_result, value)).encode())
            else:
                self.send((number, is_result, value))
        except OSError:
            os._exit(0)

    def recv(self) -> Any:
        try:
            return super().recv()
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    """Run the jobs that the parent process sends, until the parent exits."""
    faulthandler.enable()  # a crash in C code then shows where it happened
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[4]):  # the parent has already ended
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    connection = _ParentConnection(int(sys.argv[1]))
    connection.sends_json = sys.argv[3] == "json"
    module, _, name = sys.argv[2].partition(":")
    prepare = getattr(importlib.import_module(module), name)
    settings = connection.recv()
    try:
        function = prepare(settings)
    except InputError as error:
        connection.answer(None, False, error)
        return
    connection.answer(None, True, None)
    if inspect.iscoroutinefunction(function):
        asyncio.run(_serve_async(connection, function))
    while True:
        number, job = connection.recv()
        try:
            result = function(job)
        except InputError as error:
            connection.answer(number, False, error)
        else:
            connection.answer(number, True, result)


async def _serve_async(connection: _ParentConnection, function: Callable[[Any], Any]) -> None:
    """Run jobs concurrently, because async functions mostly wait for a server."""
    slots = asyncio.Semaphore(MAX_CONCURRENCY)
    tasks = set()

    async def run_job(number: int, job: Any) -> None:
        async with slots:
            connection.answer(number, True, await function(job))

    with ThreadPoolExecutor(1) as receiver:
        while True:
            tasks.add(
                task := asyncio.create_task(run_job(*await asyncio.wrap_future(receiver.submit(connection.recv))))
            )
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    main()
