"""A child process that serves others: started, waited for, kept alive, ended together with this process.

What the services are (a Prefect server, a worker, MLflow) is said in flows/services.py and flows/prefect_api.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engines.ports import free_port, is_free, is_reserved_here, reserve
from storage.errors import OptionError

HOST = "127.0.0.1"
START_TIMEOUT = 120.0
STOP_TIMEOUT = 15.0
MAX_RESTARTS = 20  # of one service within RESTART_WINDOW seconds: whatever kills it more often than that is not an accident
RESTART_WINDOW = 600.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Service:
    """One child process. `ready` is an address that answers once the service does; a service without one is ready at once.

    The kernel ends the child when the *thread* that started it ends: start it from one that lives as long as the process.
    """

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: str | None = None
    on_parent_death: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None
    _restarts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))

    def start(self) -> None:
        """Start the process; its output goes to the log file (of this start alone; a restart appends)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab" if self._restarts else "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to us alone, and we stop them in order
                preexec_fn=functools.partial(_end_with_parent, self.on_parent_death),
            )

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the service answers.

        Raises:
            RuntimeError: it ended or did not answer in time; the message holds the end of its log.
        """
        deadline = time.monotonic() + timeout
        while self.ready and not answers(self.ready):
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not answer at {self.ready} within {timeout:.0f} s:\n{self.log_tail()}")
            time.sleep(0.2)
        self.check()

    def check(self) -> None:
        """Raise RuntimeError if the process has ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.name} ended with status {self.process.returncode}; the end of {self.log}:\n{self.log_tail()}"
            )

    def keep(self) -> bool:
        """Start the process again if it has ended, at the same port with the same files. Returns whether it had ended.

        Raises:
            RuntimeError: it has ended more than MAX_RESTARTS times within RESTART_WINDOW seconds.
        """
        assert self.process is not None
        if self.process.poll() is None:
            return False
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW:
            self.check()
        recent = sum(now - restart < RESTART_WINDOW for restart in self._restarts)
        time.sleep(min(0.5 * 2**recent, 15.0) if recent else 0.0)  # the first time at once: most deaths are single ones
        self._restarts.append(now)
        self.start()
        return True

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """End the process and its children: asked first, killed if they do not listen."""
        if self.process is None:
            return
        try:
            parent = psutil.Process(self.process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
        for process in alive:
            _signal(process, signal.SIGKILL)
        self.process.wait()


def answers(address: str, timeout: float = 2.0) -> bool:
    """Whether an HTTP server answers at `address`; a refusal (4xx) is an answer too."""
    loopback = urllib.parse.urlsplit(address).hostname in (HOST, "localhost", "::1")
    proxies = urllib.request.ProxyHandler({} if loopback else None)  # no proxy reaches our loopback
    try:
        with urllib.request.build_opener(proxies).open(address, timeout=timeout):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (urllib.error.URLError, OSError):
        return False


def choose_port(name: str, given: int | None, usual: int) -> int:
    """The port to use: the given one, else (or if 0 is given) a free one. No other run will choose it while this process lives.

    Raises:
        OptionError: the given port is taken.
    """
    if given:
        if not (reserve([given]) or (is_reserved_here(given) and is_free(given))):
            raise OptionError(
                f"port {given} on {HOST} is taken: give --{name}-port another one, or leave it out and a free one is found"
            )
        return given
    if given is None and reserve([usual]):
        return usual
    return free_port()


def log_directory(port: int) -> Path:
    """Where the services beside a Prefect server at `port` log."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "penstock" / "services" / str(port)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has ended by itself


def _end_with_parent(number: signal.Signals) -> None:
    """In the child: ask the kernel for a signal when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
