"""A service in a child process: start it, wait until it is ready, restart it, end it with this process.

flows/services/stack.py and flows/runtime/prefect_api.py define the services (a Prefect server, a worker, MLflow).
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.engines.network import is_free, is_reserved_here, reserve_free_port, reserve_ports
from penstock.storage.errors import OptionError
from penstock.storage.web.login import HOST, LOOPBACK

START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 15.0  # seconds
MAX_RESTARTS = 20  # of one service within RESTART_WINDOW seconds
RESTART_WINDOW = 600.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Service:
    """A service in a child process. It is ready when the URL `ready` answers or, without a URL, as soon as it runs.

    The kernel ends the child when the *thread* that started it ends: start it from a thread that lives as long as the
    process.
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
        """Start the process. Its output goes to the log file; a restart appends to the file."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab" if self._restarts else "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C does not reach the child: `stop` ends it
                preexec_fn=functools.partial(end_with_parent, self.on_parent_death),
            )

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the service answers. Raises RuntimeError with the tail of the log if it ended, or did not answer
        in time."""
        deadline = time.monotonic() + timeout
        while self.ready and not http_answers(self.ready):
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} did not answer at {self.ready} within {timeout:.0f} s:\n{self.log_tail()}"
                )
            time.sleep(0.2)
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raise RuntimeError if the process has ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.name} ended with status {self.process.returncode}; the end of {self.log}:\n{self.log_tail()}"
            )

    def restart_if_ended(self) -> bool:
        """Restart the process if it has ended, with the same port and files. Return whether it had ended. Raises
        RuntimeError if it ended more than MAX_RESTARTS times within RESTART_WINDOW seconds."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW:
            self.raise_if_ended()
        recent = sum(now - restart < RESTART_WINDOW for restart in self._restarts)
        time.sleep(min(0.5 * 2**recent, 15.0) if recent else 0.0)  # no delay before the first restart
        self._restarts.append(now)
        self.start()
        return True

    def log_tail(self, num_lines: int = 15) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """End the process and its children with SIGTERM, and with SIGKILL those still alive after STOP_TIMEOUT
        seconds."""
        if self.process is None:
            return
        try:
            parent = psutil.Process(self.process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def http_answers(address: str) -> bool:
    """Return whether an HTTP server answers at `address` with a status below 500 (4xx counts as an answer)."""
    loopback = urllib.parse.urlsplit(address).hostname in LOOPBACK
    proxies = urllib.request.ProxyHandler({} if loopback else None)  # proxies cannot reach our loopback
    try:
        with urllib.request.build_opener(proxies).open(address, timeout=2.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (urllib.error.URLError, OSError):
        return False


def choose_port(name: str, requested: int | None, default: int) -> int:
    """Reserve a port while this process lives, and return it: the requested one; with None the default one or, if that
    is taken, any free port; with 0 any free port. `name` is the service in the flag --NAME-port."""
    if requested:
        if not (reserve_ports([requested]) or (is_reserved_here(requested) and is_free(requested))):
            raise OptionError(
                f"port {requested} on {HOST} is taken: give another --{name}-port, or leave it out to use a free port"
            )
        return requested
    if requested is None and reserve_ports([default]):
        return default
    return reserve_free_port()


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send signal `number` to this process when its parent dies. Runs in the child, before exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
