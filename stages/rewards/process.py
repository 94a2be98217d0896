"""The parent's side of a grading process: samples in, futures out; a process that hangs or dies costs one job and is replaced.

A job is one sample, or the samples of one prompt where they are graded together; it then has as many times the time of one.

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
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from stages.rewards.outcome import Outcome, Settings, failed
from storage.errors import InputError, PluginError
from storage.sample import Sample

GRACE = 1.0  # seconds beyond the limit: an asynchronous function is stopped by its own process first
_TICK = 0.1


class GradingProcess:
    """One process that grades. Thread-safe; `submit` never blocks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[list[Sample], list[Future[Outcome]]]] = {}  # jobs in the order submitted
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
        """Jobs handed in and not yet answered."""
        return len(self._pending)

    def submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        """Grade `samples` over there, as one job."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        samples = [replace(sample, routed_experts=None) for sample in samples]  # megabytes, and nothing to grade
        with self._lock:
            if self._broken is not None:
                for future in futures:
                    future.set_exception(self._broken)
                return futures
            if not self._pending:
                self._quiet_since = time.monotonic()
            self._pending[self._num_submitted] = (samples, futures)
            self._unsent.put((self._num_submitted, samples))
            self._num_submitted += 1
        return futures

    def close(self) -> None:
        """End the process; what is pending fails."""
        self._break(RuntimeError("the grading process was closed"))
        self._supervisor.join()

    # ---- the supervisor's thread ----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._keep_process()
        except Exception as error:  # no process could be started, say: whoever waits for a grade must learn of it
            self._break(error)

    def _keep_process(self) -> None:
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
            for index, (samples, _) in self._pending.items():
                self._unsent.put((index, samples))
        return process, connection

    def _listen(self, connection: Connection) -> str:
        """Take answers until this process is of no more use; returns why."""
        while self._broken is None:
            try:
                if connection.poll(_TICK):
                    self._accept(connection.recv())
                elif self._is_overdue():
                    limit = self._limit() if self._ready else self.settings.start_timeout
                    return f"timeout: more than {limit:g} s in {self._name}"
            except (EOFError, OSError):
                return f"the grading process died: it was {'running' if self._ready else 'loading'} {self._name}"
        return "closed"

    def _accept(self, message: tuple[int | str, list[Outcome] | str | InputError]) -> None:
        key, answer = message
        if isinstance(answer, InputError):
            self._break(answer)
            return
        with self._lock:
            self._quiet_since = time.monotonic()
            if key == "ready":
                self._ready = True
                return
            assert isinstance(key, int) and isinstance(answer, list)
            _, futures = self._pending.pop(key)
        for future, outcome in zip(futures, answer, strict=True):
            future.set_result(outcome)

    @property
    def _name(self) -> str:
        return self.settings.custom_rm_path or self.settings.rm_type or "the row's reward"

    def _limit(self) -> float:
        """Seconds that a job may take: of the largest one that waits, since those of asynchronous functions run side by side."""
        with self._lock:
            return self.settings.timeout * max((len(samples) for samples, _ in self._pending.values()), default=1)

    def _is_overdue(self) -> bool:
        limit = self._limit() + GRACE if self._ready else self.settings.start_timeout
        return bool(self._pending) and time.monotonic() - self._quiet_since > limit

    def _give_up_oldest(self, reason: str) -> None:
        """The oldest pending job is the one that was being graded; the next process gets the others."""
        if not self._ready:
            self._break(
                PluginError(
                    f"the grading process of {self._name} is not ready: {reason}; it may take --reward-start-timeout "
                    f"{self.settings.start_timeout:g} s and must not exit: its output says more"
                )
            )
            return
        with self._lock:
            index = next(iter(self._pending), None)
            futures = [] if index is None else self._pending.pop(index)[1]
        for future in futures:
            future.set_result(failed(reason))

    def _break(self, error: Exception) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = error
            pending, self._pending = self._pending, {}
        for _, futures in pending.values():
            for future in futures:
                future.set_exception(error)


def _send_all(connection: Connection, unsent: queue.SimpleQueue[object]) -> None:
    while (message := unsent.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return  # the process has died: the supervisor notices and sends what is pending to the next one
