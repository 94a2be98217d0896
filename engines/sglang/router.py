"""SGLang's router in front of the engines: a process beside the driver, watched, started anew when it dies, told which engines live.

Which engines live is the supervisor's knowledge (supervisor.py); requests come from client.py. Only generation goes through the router:
weights, versions and aborts go straight to the engines. Its own health checks, circuit breaker and retries are off, for the supervisor
and the client do the same with more knowledge, and two judges would contradict each other.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from engines.ports import free_port
from engines.sglang import control
from engines.sglang.args import command_line, router_flags
from engines.sglang.server import KEY_VARIABLE, last_lines
from storage.secrets import protect

LAUNCHER = Path(__file__).with_name("launch_router.py")
TICK = 0.5  # seconds between looks at the router's list of engines
SHORT_TICK = 0.05  # the same while the list is not yet as it should be
CALL = 5.0  # seconds for one look; it answers in milliseconds
ASK_AGAIN = 5.0  # seconds after which an engine that the router was told of, and does not know, is named again
DEFAULTS = {  # the user's flags go before these
    # The key that the client sends with every request decides: one session, one engine; a new key goes to the least busy one.
    "policy": "manual",
    "assignment_mode": "min_load",
    "disable_health_check": True,
    "disable_circuit_breaker": True,
    "disable_retries": True,
    "request_timeout_secs": 14_400,
    "log_level": "warn",
}
logger = logging.getLogger(__name__)


class Router:
    """A context manager; entering starts it without waiting.

    Args:
        args: the router's own flags with underscored names.
        log_dir: where its log goes; the system's temporary directory by default.
        max_restarts: how often it may be started anew.
        patience: seconds that it may be silent, starting included, before it is started anew.
    """

    def __init__(self, args: dict[str, Any], log_dir: str | None = None, max_restarts: int = 3, patience: float = 30) -> None:
        self.args = args
        self.log_dir = Path(log_dir or tempfile.gettempdir())
        self.max_restarts = max_restarts
        self.patience = patience
        self.pid = 0
        self._lock = threading.Lock()  # of the next two
        self._engines: list[str] = []
        self._address: str | None = None
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._changed = threading.Event()
        self._key = protect(
            str(args.get("api_key") or secrets.token_hex(32))
        )  # the router asks for it, and sends each engine its own
        self._asked: dict[str, float] = {}  # engine -> when the router was told of it
        # The router dies with the thread that has started it (see launch_router.py), so that is one which lasts.
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def __enter__(self) -> Router:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join()

    def lead_to(self, engines: list[str]) -> None:
        """From now on requests go to the engines at these addresses. Returns at once."""
        with self._lock:
            if set(self._engines) - set(engines) or not self._engines:
                self._address = None  # until those gone are gone there too, or all of the first ones known
            self._engines = list(engines)
        self._changed.set()

    def address(self) -> str | None:
        """Where it listens; None while it is away, or leads to engines that do not live.

        Raises:
            RuntimeError: it has died too often; with the last lines of its log.
        """
        if self._failure is not None:
            raise self._failure
        return self._address

    # ---- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for num_restarts in range(self.max_restarts + 1):
                end = self._one_life()
                if self._ended.is_set():
                    return
                logger.warning("the router %s (%d of %d restarts so far)", end, num_restarts, self.max_restarts)
            raise RuntimeError(
                f"the router has been started {self.max_restarts + 1} times, which is all that is allowed; it {end}"
            )
        except Exception as error:
            self._failure = error  # raised by `address`

    def _one_life(self) -> str:
        """Start it and keep its list right until it dies, is silent or is to end. Returns how it ended."""
        port, log = free_port(), self._new_log()
        url = f"http://127.0.0.1:{port}"
        control.use_key(url, self._key)
        self._asked = {}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", str(LAUNCHER), *self._words(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PENSTOCK_ROUTER_PARENT": str(os.getpid()), KEY_VARIABLE: self._key},
            )
        self.pid = process.pid
        heard = time.monotonic()
        try:
            while process.poll() is None and not self._ended.is_set() and time.monotonic() - heard < self.patience:
                self._changed.clear()
                try:
                    right = self._set_right(url)
                    heard = time.monotonic()
                except (control.ServerGone, RuntimeError) as error:
                    logger.debug("the router: %s", error)
                    right = False
                self._changed.wait(TICK if right else SHORT_TICK)
            how = "is silent" if process.poll() is None else f"ended with code {process.returncode}"
            return f"{how}. The end of its log, {log}:\n{last_lines(log, 10)}"
        finally:
            self._address = None
            process.kill()
            process.wait()

    def _set_right(self, url: str) -> bool:
        """Let the router know the engines that live, and no others. Returns whether it does."""
        engines = self._engines
        workers = control.call(url, "/workers", timeout=CALL)["workers"]
        ready = {
            worker["url"] for worker in workers if worker["is_healthy"]
        }  # registered, and no more: its health checks are off
        gone = [worker["id"] for worker in workers if worker["url"] not in engines]
        for worker in gone:
            control.call(url, f"/workers/{worker}", timeout=CALL, method="DELETE")
        for engine in set(engines) - ready:
            if time.monotonic() - self._asked.get(engine, -ASK_AGAIN) >= ASK_AGAIN:
                worker = {"url": engine, "disable_health_check": True}
                if key := control.keys_of([engine]).get(engine):
                    worker["api_key"] = key
                control.call(url, "/workers", worker, timeout=CALL)
                self._asked[engine] = time.monotonic()
        right = ready == set(engines) and not gone
        with self._lock:
            if right and engines and engines is self._engines:  # and not others meanwhile
                self._address = url
        return right

    def _words(self, port: int) -> list[str]:
        # Its metrics would be open to everybody on port 29000, and a second router on this machine would find the port taken.
        ours = {"host": "127.0.0.1", "port": port, "prometheus_host": "127.0.0.1", "prometheus_port": free_port()}
        given = {name: value for name, value in self.args.items() if name != "api_key"}
        return command_line({**ours, **DEFAULTS, **given}, router_flags())

    def _new_log(self) -> Path:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix="router-", suffix=".log", dir=self.log_dir)
        os.close(handle)
        return Path(path)
