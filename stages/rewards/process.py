"""Start and supervise a grading process. If the process hangs or dies, its current job fails and the process is
restarted.

A job is one sample, or all samples of a prompt if the reward grades them in one call; the time limit of a job is
proportional to its number of samples.

The process is a plain subprocess, because `multiprocessing` would run the user's main script again in the child. One
thread starts the process, receives results and enforces the time limit. A second thread sends the jobs, because sending
may block: a reward that hangs in C code (for example, a regular expression) holds the child's GIL, so the child does
not read and the pipe fills up.
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

from penstock.stages.rewards.outcome import Outcome, failed_outcome
from penstock.stages.rewards.settings import RewardSettings
from penstock.storage.errors import InputError, PluginError
from penstock.storage.samples.sample import Sample

GRACE_PERIOD = 1.0  # seconds after the time limit during which the grading process can cancel an async call itself
_POLL_INTERVAL = 0.1  # seconds


class GradingProcess:
    """Grades samples in a supervised subprocess. Thread-safe; `submit` does not block."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[list[Sample], list[Future[Outcome]]]] = {}  # job number -> samples, futures
        self._num_submitted = 0
        self._unsent: queue.SimpleQueue[object] = queue.SimpleQueue()  # None stops the sender
        self._last_activity = 0.0  # time of the last message from the process, or of the first job after idling
        self._ready = False
        self._name = settings.custom_rm_path or settings.rm_type or "the row's reward"  # for error messages
        self._fatal_error: Exception | None = None  # why no further job can be graded
        # The kernel kills the process when this thread ends (worker.py), so the thread lives as long as the process.
        self._supervisor = threading.Thread(target=self._supervise, name="penstock-grading", daemon=True)
        self._supervisor.start()

    @property
    def num_pending(self) -> int:
        """Number of submitted jobs without a result."""
        return len(self._pending)

    def submit(self, samples: list[Sample]) -> list[Future[Outcome]]:
        """Submit `samples` as one job, and return one future outcome per sample."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        # Do not send routed_experts and teacher_logprobs: they are large, and rewards do not read them.
        samples = [replace(sample, routed_experts=None, teacher_logprobs=None) for sample in samples]
        with self._lock:
            if self._fatal_error is not None:
                for future in futures:
                    future.set_exception(self._fatal_error)
                return futures
            if not self._pending:
                self._last_activity = time.monotonic()
            self._pending[self._num_submitted] = (samples, futures)
            self._unsent.put((self._num_submitted, samples))
            self._num_submitted += 1
        return futures

    def close(self) -> None:
        """Stop the grading process and fail its pending jobs."""
        self._fail_all(RuntimeError("the grading process was stopped before the sample was graded"))
        self._supervisor.join()

    # ---- the supervisor thread ---------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Run the grading process until a fatal error or `close`; restart it whenever it hangs or dies."""
        try:
            while self._fatal_error is None:
                process, connection = self._start()
                sender = threading.Thread(target=_send_until_none, args=(connection, self._unsent), daemon=True)
                sender.start()
                reason = self._receive_until_failure(connection)
                process.kill()
                process.wait()
                self._unsent.put(None)
                sender.join()
                connection.close()
                if self._fatal_error is None:
                    self._fail_oldest(reason)
        except Exception as error:  # for example, the process cannot be started; callers must not wait forever
            self._fail_all(error)

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, child = Pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.stages.rewards.worker", str(child.fileno())],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        child.close()
        with self._lock:
            self._ready = False
            self._last_activity = time.monotonic()
            self._unsent = queue.SimpleQueue()
            self._unsent.put(self.settings)
            for index, (samples, _) in self._pending.items():
                self._unsent.put((index, samples))
        return process, connection

    def _receive_until_failure(self, connection: Connection) -> str:
        """Receive results until the grading process hangs, dies or is closed; return the reason as an error message."""
        while self._fatal_error is None:
            try:
                if connection.poll(_POLL_INTERVAL):
                    self._handle_message(connection.recv())
                    continue
            except (EOFError, OSError):
                return (
                    f"the grading process died: it exited while {'running' if self._ready else 'loading'} {self._name}"
                )
            limit, grace = (
                (self._longest_job_limit_seconds(), GRACE_PERIOD) if self._ready else (self.settings.start_timeout, 0.0)
            )
            if self._pending and time.monotonic() - self._last_activity > limit + grace:
                return f"timeout: more than {limit:g} s in {self._name}"
        return "closed"

    def _handle_message(self, message: tuple[int | str, list[Outcome] | str | InputError]) -> None:
        key, result = message
        if isinstance(result, InputError):
            self._fail_all(result)
            return
        with self._lock:
            self._last_activity = time.monotonic()
            if key == "ready":
                self._ready = True
                return
            assert isinstance(key, int) and isinstance(result, list)
            _, futures = self._pending.pop(key)
        for future, outcome in zip(futures, result, strict=True):
            future.set_result(outcome)

    def _longest_job_limit_seconds(self) -> float:
        """Return the longest time limit of all pending jobs, in seconds (async jobs run concurrently)."""
        with self._lock:
            return self.settings.timeout * max((len(samples) for samples, _ in self._pending.values()), default=1)

    def _fail_oldest(self, reason: str) -> None:
        """Fail the oldest pending job, which the process was grading when it hung or died; the other jobs are sent to
        the restarted process.

        If the process never became ready, it is not restarted, and all jobs fail.
        """
        if not self._ready:
            self._fail_all(
                PluginError(
                    f"the grading process of {self._name} did not start: {reason}. The reward must load within "
                    f"--reward-start-timeout {self.settings.start_timeout:g} s and must not exit: see the "
                    "reward's output in the log above"
                )
            )
            return
        with self._lock:
            index = next(iter(self._pending), None)
            futures = [] if index is None else self._pending.pop(index)[1]
        for future in futures:
            future.set_result(failed_outcome(reason))

    def _fail_all(self, error: Exception) -> None:
        """Fail all pending and all future jobs with `error`."""
        with self._lock:
            if self._fatal_error is None:
                self._fatal_error = error
            pending, self._pending = self._pending, {}
        for _, futures in pending.values():
            for future in futures:
                future.set_exception(error)


def _send_until_none(connection: Connection, unsent: queue.SimpleQueue[object]) -> None:
    while (message := unsent.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return  # the process died: the supervisor restarts it and sends the pending jobs again
