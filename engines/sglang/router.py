"""Run SGLang's request router in front of the engines: start it as a child process of the driver, restart it when it
dies, and update its list of engines.

Only generation requests go through the router; weight updates, version checks and aborts are sent directly to the
engines. The router's own health checks, circuit breaker and retries are disabled, because `supervisor.py` and
`client.py` already do this, and two mechanisms would interfere.
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
from typing import Any

from penstock.engines.generation import EngineGone
from penstock.engines.network import reserve_free_port
from penstock.engines.serving import endpoints
from penstock.engines.serving.server import KEY_VARIABLE, read_log_tail
from penstock.engines.sglang import control
from penstock.engines.sglang.passthrough import router_flags, to_command_line
from penstock.storage.secrets import register_secret

LAUNCHER = Path(__file__).with_name("launch_router.py")
TICK = 0.5  # seconds between checks of the router's list of engines
SHORT_TICK = 0.05  # seconds between these checks while the router's list of engines differs from the live engines
CALL_TIMEOUT = 5.0  # timeout of one call to the router in seconds; a call takes milliseconds
REGISTER_AGAIN = 5.0  # seconds after which an engine that the router does not list is registered again
DEFAULTS = {  # router flags that the configured flags override
    # The router chooses the engine by the routing key that the client sends with every request: equal keys (requests of
    # one session) go to the same engine, a new key goes to the engine with the least load.
    "policy": "manual",
    "assignment_mode": "min_load",
    "disable_health_check": True,
    "disable_circuit_breaker": True,
    "disable_retries": True,
    "request_timeout_secs": 14_400,
    "log_level": "warn",
}
RESPONSE_TIMEOUT = 30.0  # seconds after which a router that does not start or does not answer is restarted
logger = logging.getLogger(__name__)


class SGLangRouter:
    """Run SGLang's router while a `with` block lasts. The block begins before the router is ready."""

    def __init__(self, args: dict[str, Any], log_dir: str | None = None, max_restarts: int = 3) -> None:
        self.args = args
        self.log_dir = Path(log_dir or tempfile.gettempdir())
        self.max_restarts = max_restarts
        self.pid = 0
        self._lock = threading.Lock()  # guards `_engines` and `_address`
        self._engines: list[str] = []
        self._address: str | None = None
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._changed = threading.Event()
        # API key of the router itself; the router sends each engine that engine's own key.
        self._key = register_secret(str(args.get("api_key") or secrets.token_hex(32)))
        self._registered: dict[str, float] = {}  # engine's URL -> time of its last registration with the router
        # The router process dies when the thread that started it ends (launch_router.py), so one thread runs it.
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def __enter__(self) -> SGLangRouter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._changed.set()
        self._thread.join()

    def set_backends(self, urls: list[str]) -> None:
        """See `RequestRouter`; the router is updated asynchronously."""
        with self._lock:
            if set(self._engines) - set(urls) or not self._engines:
                self._address = None  # until the router has removed dead engines or registered the first engine
            self._engines = list(urls)
        self._changed.set()

    def address(self) -> str | None:
        """Return the router's URL; None while the router is down or still routes requests to dead engines."""
        if self._failure is not None:
            raise self._failure
        return self._address

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the router in a thread, restarting it up to `max_restarts` times, until `__exit__` is called."""
        try:
            for num_restarts in range(self.max_restarts + 1):
                reason = self._run_process_until_exit()
                if self._stopped.is_set():
                    return
                logger.warning(
                    "the router failed (%d of %d restarts used): the router %s", num_restarts, self.max_restarts, reason
                )
            failure = f"the router failed after all {self.max_restarts} restarts: the router {reason}"
            self._failure = RuntimeError(failure)  # raised by `address`
        except Exception as error:
            self._failure = error

    def _run_process_until_exit(self) -> str:
        """Run one router process until it dies, hangs or is stopped. Return why it ended, with the tail of its log."""
        port = reserve_free_port()
        # By default the router serves its metrics on port 29000 of all interfaces, where a second router on this
        # machine would find the port in use.
        metrics = {"prometheus_host": "127.0.0.1", "prometheus_port": reserve_free_port()}
        configured = {name: value for name, value in self.args.items() if name != "api_key"}
        args = {"host": "127.0.0.1", "port": port, **metrics, **DEFAULTS, **configured}
        url = f"http://127.0.0.1:{port}"
        endpoints.set_api_key(url, self._key)
        self._registered = {}
        self.log_dir.mkdir(parents=True, exist_ok=True)
        handle, log = tempfile.mkstemp(prefix="router-", suffix=".log", dir=self.log_dir)
        # With proxy variables the router would send requests, with API keys, to engines on other nodes through a proxy.
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with open(handle, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", str(LAUNCHER), *to_command_line(args, router_flags())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "PENSTOCK_ROUTER_PARENT": str(os.getpid()), KEY_VARIABLE: self._key},
            )
        self.pid = process.pid
        answered = time.monotonic()
        try:
            while (
                process.poll() is None and not self._stopped.is_set() and time.monotonic() - answered < RESPONSE_TIMEOUT
            ):
                self._changed.clear()
                try:
                    in_sync = self._update_engine_list(url)
                    answered = time.monotonic()
                except (EngineGone, RuntimeError) as error:
                    logger.debug("could not update the router's list of engines, retrying: %s", error)
                    in_sync = False
                self._changed.wait(TICK if in_sync else SHORT_TICK)
            code = process.poll()
            outcome = "does not answer" if code is None else f"died (exit code {code})"
            return f"{outcome}; tail of {log}:\n{read_log_tail(Path(log), 10)}"
        finally:
            self._address = None
            process.kill()
            process.wait()

    def _update_engine_list(self, router_url: str) -> bool:
        """Register the live engines with the router at `router_url`, and remove all other engines from its list.
        Return whether the router already listed exactly the live engines."""
        engines = self._engines
        workers = control.call_server(router_url, "/workers", timeout=CALL_TIMEOUT)["workers"]
        # With the router's health checks off, "healthy" means registered.
        ready = {worker["url"] for worker in workers if worker["is_healthy"]}
        dead = [worker["id"] for worker in workers if worker["url"] not in engines]
        for worker_id in dead:
            control.call_server(router_url, f"/workers/{worker_id}", timeout=CALL_TIMEOUT, method="DELETE")
        for engine in set(engines) - ready:
            if time.monotonic() - self._registered.get(engine, -REGISTER_AGAIN) >= REGISTER_AGAIN:
                worker = {"url": engine, "disable_health_check": True}
                if key := endpoints.known_api_keys([engine]).get(engine):
                    worker["api_key"] = key
                control.call_server(router_url, "/workers", worker, timeout=CALL_TIMEOUT)
                self._registered[engine] = time.monotonic()
        in_sync = ready == set(engines) and not dead
        with self._lock:
            if in_sync and engines and engines is self._engines:  # the live engines have not changed during this call
                self._address = router_url
        return in_sync
