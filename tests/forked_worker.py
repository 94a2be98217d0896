"""Start the processes of stages/worker_process.py as forks of a test process, which has imported everything: a start
takes milliseconds instead of a second. Tests with the fixture `fresh_workers` start them as a run does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from penstock.stages import worker_process


class ForkedWorker:
    """The part of `subprocess.Popen` that WorkerProcess uses."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **streams: int | None
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "penstock.stages.worker_process"]
        self._lock, self._code = threading.Lock(), None
        self.pid = os.fork()
        if self.pid == 0:
            _run(list(command[2:]), pass_fds[0], env)

    def kill(self) -> None:
        with self._lock:
            if self._code is None:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # `kill` must not wait for the lock that long
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _run(words: list[str], pipe: int, env: Mapping[str, str]) -> None:
    code = 1
    try:
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 65536)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        # Only what differs: rewriting the whole environment has corrupted the heap of xdist's workers, whose process
        # title (setproctitle) lies in the memory of the environment.
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})
        sys.argv = words
        worker_process.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports this fixture gets forked workers, except those that run untrusted code: a limit of the
    address space would include that of the test process."""

    def start(command: Sequence[str], **options: object) -> ForkedWorker | subprocess.Popen[bytes]:
        kind = subprocess.Popen if "json" in command else ForkedWorker
        return kind(command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_process, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


@pytest.fixture
def fresh_workers(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module that imports `forked_workers`, a test with this fixture starts its workers as a run does."""
    monkeypatch.setattr(worker_process, "subprocess", subprocess)
