"""The parent's side of a grading process: samples in, futures out; a process that hangs or dies costs one sample and is replaced.

A plain subprocess and not `multiprocessing`: that would run the user's main script again in the child. One thread starts the
process, listens and judges; another one sends, because a grader that hangs inside C code (a regular expression, say) holds the
child's interpreter lock, so that nothing more is read there and the pipe fills up.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from stages.rewards.outcome import Outcome, Settings, failed
from storage.sample import Sample

START_TIMEOUT = 120.0  # seconds until the process has imported the reward function
GRACE = 1.0  # seconds beyond the limit: an asynchronous function is stopped by its own process first
_TICK = 0.1


class GradingProcess:
    """One process that grades. Thread-safe; `submit` never blocks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Sample, Future[Outcome]]] = {}  # in the order submitted
        self._num_submitted = 0
        self._unsent: queue.SimpleQueue[object] = queue.SimpleQueue()  # None ends the sender
        self._quiet_since = 0.0  # when it last said something, or got something to do while idle
        self._ready = False
        self._broken: Exception | None = None  # why nothing can be graded here any more
        # The process is a child of this thread, and dies with it (worker.py): so the thread lives exactly as long.
        self._supervisor = threading.Thread(target=self._supervise, name="penstock-grading", daemon=True)
        self._supervisor.start()

    @property
    def num_pending(self) -> int:
        """Samples handed in and not yet answered."""
        return len(self._pending)

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Grade `sample` over there."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self._broken is not None:
                future.set_exception(self._broken)
                return future
            if not self._pending:
                self._quiet_since = time.monotonic()
            self._pending[self._num_submitted] = (sample, future)
            self._unsent.put((self._num_submitted, sample))
            self._num_submitted += 1
        return future

    def close(self) -> None:
        """End the process; what is pending fails."""
        self._break(RuntimeError("the grading process was closed"))
        self._supervisor.join()

    # ---- the supervisor's thread ----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while self._broken is None:
            process, connection = self._start()
            sender = threading.Thread(target=_send_all, args=(connection, self._unsent), daemon=True)
            sender.start()
            reason = self._listen(connection)
            process.kill()
            process.wait()
            self._unsent.put(None)
            sender.join()
            connection.close()
            if self._broken is None:
                self._give_up_oldest(reason)

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, child = Pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "stages.rewards.worker", str(child.fileno())],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        child.close()
        with self._lock:
            self._ready = False
            self._quiet_since = time.monotonic()
            self._unsent = queue.SimpleQueue()
            self._unsent.put(self.settings)
            for index, (sample, _) in self._pending.items():
                self._unsent.put((index, sample))
        return process, connection

    def _listen(self, connection: Connection) -> str:
        """Take answers until this process is of no more use; returns why."""
        while self._broken is None:
            try:
                if connection.poll(_TICK):
                    self._accept(connection.recv())
                elif self._is_overdue():
                    return f"timeout: more than {self.settings.timeout:g} s"
            except (EOFError, OSError):
                return "the grading process died"
        return "closed"

    def _accept(self, message: tuple[int | str, Outcome | str]) -> None:
        key, answer = message
        if key == "wrong":
            self._break(ValueError(answer))
            return
        with self._lock:
            self._quiet_since = time.monotonic()
            if key == "ready":
                self._ready = True
                return
            assert isinstance(key, int) and isinstance(answer, Outcome)
            _, future = self._pending.pop(key)
        future.set_result(answer)

    def _is_overdue(self) -> bool:
        limit = self.settings.timeout + GRACE if self._ready else START_TIMEOUT
        return bool(self._pending) and time.monotonic() - self._quiet_since > limit

    def _give_up_oldest(self, reason: str) -> None:
        """The oldest pending sample is the one that was being graded; the next process gets the others."""
        if not self._ready:
            self._break(RuntimeError("a grading process does not start: its own output says why"))
            return
        with self._lock:
            index = next(iter(self._pending), None)
            future = None if index is None else self._pending.pop(index)[1]
        if future is not None:
            future.set_result(failed(reason))

    def _break(self, error: Exception) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = error
            pending, self._pending = self._pending, {}
        for _, future in pending.values():
            future.set_exception(error)


def _send_all(connection: Connection, unsent: queue.SimpleQueue[object]) -> None:
    while (message := unsent.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return  # the process has died: the supervisor notices and sends what is pending to the next one
