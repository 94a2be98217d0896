"""Connect to a configured Prefect API or start our own server, and survive outages of either.

The state of a run is in the store, so a run needs Prefect only when a flow run starts and when its end is reported. In
between, task runs and log lines are queued in this process. The client (3.8) itself retries a request for about a
minute and sends an event again after a reconnection. This file adds three things: our own server is restarted with the
same port and database when it dies, the end of a run waits until the API answers again (`wait_for_api`), and a process
does not wait for minutes at exit if the API does not answer.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from httpx import HTTPError, HTTPStatusError
from prefect._internal.concurrency import services
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_INTERNAL_LEVEL,
    temporary_settings,
)

from penstock.flows.runtime.child_process import Service, choose_port, http_answers
from penstock.flows.runtime.environment import QUIET
from penstock.storage.errors import OptionError
from penstock.storage.secrets import write_private
from penstock.storage.web.login import HOST, create_login, login_path, origins, service_directory

LAUNCHER = Path(__file__).parents[1] / "services" / "prefect_server.py"
PROFILE = "penstock"  # name of the Prefect profile that contains the login of our own server
PREFECT_PORT = 4200  # default port; if it is taken, any free port is used
PATIENCE = 120.0  # seconds that the end of a run waits for an unavailable API
EXIT_PATIENCE = 5.0  # seconds that the process waits at exit for an unavailable API
START_TRIES = 3  # attempts to start our own server, until it answers for the first time
CLIENT_RETRIES = 7  # per request: 2 + 4 + ... + 128 s with jitter; the default of 5 ends after about 60 s
HEARTBEAT_SECONDS = 30  # the shortest interval that Prefect allows (default 180)
_UNTIL_EXIT = ExitStack()  # Prefect settings of this process, until it exits
_UNTIL_LEFT = ExitStack()  # Prefect settings of the current flow, until `restore_client_settings`
OWN_SERVER = threading.Event()  # this process has started the Prefect server, which ends with it
_SERVER_FAILED = threading.Event()  # our own server is not restarted any more: do not wait for it


@functools.cache
def ensure_prefect_api() -> str:
    """Return the address of the configured Prefect API (PREFECT_API_URL or a profile), or start our own server.

    Prefect's temporary server is not used: it outlives a killed process, is not restarted when it dies, and has no web
    pages. Our own server ends with this process, at exit, after Prefect has sent the last log lines.
    """
    ours: dict[Any, Any] = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS,
        PREFECT_CLIENT_MAX_RETRIES: CLIENT_RETRIES,
        # Otherwise Prefect would log a page of text for every event that it sends again.
        PREFECT_LOGGING_INTERNAL_LEVEL: "CRITICAL",
    }
    ours = {setting: value for setting, value in ours.items() if setting.name not in os.environ}
    address: str = PREFECT_API_URL.value() or ""
    if not address:
        port = choose_port("prefect", None, PREFECT_PORT)
        start_with_restart_thread(prefect_server(port))
        OWN_SERVER.set()
        address = f"http://{HOST}:{port}/api"
        ours |= {PREFECT_API_URL: address, PREFECT_API_AUTH_STRING: login_path(port).read_text()}
    else:
        check_login(address)
    _UNTIL_EXIT.enter_context(temporary_settings(ours))
    return address


def flow_run_environment() -> dict[str, str]:
    """Return the environment variables of flow runs that a worker starts. In other processes `ensure_prefect_api` and
    the command line make these settings."""
    libraries = {name: value for name, value in QUIET.items() if not name.startswith("PREFECT_")}
    return {
        **libraries,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
    }


def prefect_server(port: int) -> Service:
    """Return the service of our Prefect server at `port`, with Prefect's default database. Its new login is also in a
    Prefect profile."""
    command = [sys.executable, "-P", str(LAUNCHER), "--host", HOST, "--port", str(port)]
    login = create_login(port)
    settings = {"PREFECT_API_URL": f"http://{HOST}:{port}/api", "PREFECT_API_AUTH_STRING": login}
    lines = [f'active = "{PROFILE}"', "", f"[profiles.{PROFILE}]", *(f'{key} = "{settings[key]}"' for key in settings)]
    write_private(profile_path(port), "\n".join(lines) + "\n")
    environment = {
        **settings,  # the server's background services are API clients
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins(port)),
        # by default the web page calls port 4200, even with another --port
        "PREFECT_SERVER_UI_API_URL": settings["PREFECT_API_URL"],
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The default is in memory: after a restart the server does not know which run has a deployment's concurrency
        # slot, and cancels that run.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    return Service(
        "Prefect",
        command,
        service_directory(port) / "prefect.log",
        environment,
        ready=f"http://{HOST}:{port}/api/health",
    )


def login_environment(port: int) -> dict[str, str]:
    """Return the environment variables of a client of our server at `port`: API address and login."""
    return {"PREFECT_API_URL": f"http://{HOST}:{port}/api", "PREFECT_API_AUTH_STRING": login_path(port).read_text()}


def profile_path(port: int) -> Path:
    """Return the path of the Prefect profile `penstock`: address and login of our server at `port`."""
    return service_directory(port) / "profiles.toml"


def check_login(address: str) -> None:
    """Raise OptionError if the API answers 401 or 403. Return if it does not answer: `wait_for_api` waits for it."""
    if not http_answers(f"{address}/health"):
        return
    try:
        with (
            temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            client.api_version()
    except HTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise OptionError(
                f"the Prefect API at {address} rejects the login of this process ({error.response.status_code}): run "
                "the export line that `penstock up` prints (PREFECT_PROFILES_PATH), or set PREFECT_API_AUTH_STRING"
            ) from None
    except HTTPError:
        return  # the API stopped answering: `wait_for_api` waits for it


def wait_for_api(note: Callable[[str], object] | None = None, patience_seconds: float | None = None) -> bool:
    """Wait until the Prefect API answers, at most `patience_seconds`. Return whether it answers. Call it before
    anything that needs the API (an artifact, the end of a flow run), so that a run ends as soon as the API is back."""
    address = PREFECT_API_URL.value()
    if not address:
        return True  # Prefect starts its own server
    limit_wait_for_api_at_exit()
    fails_at_once = PREFECT_CLIENT_MAX_RETRIES.value() == 0  # the client does not retry requests
    start = time.monotonic()
    deadline = start + (PATIENCE if patience_seconds is None else patience_seconds) * (not fails_at_once)
    waited = False
    while not http_answers(f"{address}/health"):
        if not waited and note and deadline > start:
            note(
                f"the Prefect API at {address} does not answer; waiting up to {deadline - start:.0f} s "
                "(all results are committed to the store)"
            )
        waited = True
        if time.monotonic() > deadline or _SERVER_FAILED.is_set():
            if not fails_at_once:
                # Requests after this one fail at once instead of being retried.
                _UNTIL_LEFT.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
            return False
        time.sleep(0.5)
    if waited and note:
        note(f"the Prefect API is back after {time.monotonic() - start:.0f} s")
    return True


def restore_client_settings() -> None:
    """Restore Prefect's client settings after a flow. If the API does not answer, drop queued log lines and events."""
    _UNTIL_LEFT.close()
    address = PREFECT_API_URL.value()
    if address and not http_answers(f"{address}/health"):
        _cancel_queues(_prefect_queues())


@functools.cache
def limit_wait_for_api_at_exit() -> None:
    """Make this process wait at most EXIT_PATIENCE seconds at exit if the API does not answer.

    While the interpreter shuts down, Prefect sends its queued log lines and events, and retries every batch of lines
    for minutes and every event for ten seconds.
    """
    health = f"{PREFECT_API_URL.value()}/health"

    def watch() -> None:
        queues, last = _prefect_queues(), time.monotonic()
        while time.monotonic() - last < EXIT_PATIENCE:
            time.sleep(0.5)
            # Read the queues before the exit: a queue that is being drained no longer refers to its task. The exit is
            # detected with this flag, because an exit hook would run too late: after the hooks of queues that were
            # created later, and those hooks wait for the API.
            if not getattr(threading, "_SHUTTING_DOWN", False):
                queues, last = _prefect_queues(), time.monotonic()
            elif http_answers(health):
                last = time.monotonic()
        _cancel_queues(queues)

    # Start the thread now: a process that is exiting cannot start one.
    threading.Thread(target=watch, name="prefect-exit-guard", daemon=True).start()


def _prefect_queues() -> list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]:
    """Return Prefect's active queues of log lines and events as (event loop, sending task)."""
    # Prefect has no public call that discards a queue: `drain` waits until it is sent, and the next log line creates a
    # new one.
    pairs = [(service._loop, service._task) for service in list(services._active_services)]
    return [(loop, task) for loop, task in pairs if loop is not None and task is not None]


def _cancel_queues(queues: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]) -> None:
    for loop, task in queues:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)


def wait_ready_with_restarts(server: Service) -> None:
    """Wait until a started server answers. If it dies first, restart it, for at most START_TRIES starts in total."""
    for tries_left in reversed(range(START_TRIES)):
        try:
            return server.wait_ready()
        except RuntimeError:
            if not tries_left or not server.restart_if_ended():  # it has not ended: it runs, but does not answer
                raise


def start_with_restart_thread(server: Service) -> None:
    """Start the server in a thread that also restarts it after a crash, and wait until it answers. The thread lives as
    long as this process, because the kernel ends a child process with the thread that started it."""
    errors: list[Exception] = []
    ready = threading.Event()

    def watch() -> None:
        try:
            server.start()
            wait_ready_with_restarts(server)
        except Exception as error:
            errors.append(error)
            return
        finally:
            ready.set()
        assert server.process is not None
        while True:
            server.process.wait()
            try:
                server.restart_if_ended()
            except RuntimeError as error:
                _SERVER_FAILED.set()
                with server.log.open("a", encoding="utf-8") as log:
                    log.write(f"penstock: the Prefect server died too often; the run continues without it: {error}\n")
                return

    threading.Thread(target=watch, name="prefect-server-watcher", daemon=True).start()
    ready.wait()
    if errors:
        raise errors[0]
