"""The Prefect API that this process reports to: a configured one, or a server of our own; and what happens while it is away.

The store is the truth, so a run needs Prefect only at two moments: when a flow run begins and when its end is reported. In between, task
runs and log lines are queued in this process. What the client (3.8) does by itself: a request is tried again for about a minute, an event
is sent again after a reconnection. What is added here: a server of our own that dies is started again at its port with its database, the
end of a run waits until the API is back (`wait_for_api`), and a process does not wait minutes at its exit for a server that is gone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.environment import QUIET
from flows.prefect_server import own_origins
from flows.service import HOST, Service, answers, choose_port, log_directory
from storage.errors import OptionError
from storage.secrets import write_private

LAUNCHER = Path(__file__).with_name("prefect_server.py")
PROFILE = "penstock"  # name of the Prefect profile with the login of our own server
PREFECT_PORT = 4200  # what people expect; another free port is taken if it is busy and was not asked for
PATIENCE = 120.0  # seconds that the end of a run waits for an API that is away
EXIT_PATIENCE = 5.0  # and that the exit of its process does, with log lines still to send
START_TRIES = 3  # of our own server before it has answered for the first time
CLIENT_RETRIES = 7  # of a request: 2 + 4 + ... + 128 s with jitter; the client's own 5 give up after about 60 s, logs and all
HEARTBEAT_SECONDS = 30  # a flow run's sign of life, the shortest that Prefect allows (180 if nobody says)
_UNTIL_EXIT = ExitStack()
_UNTIL_LEFT = ExitStack()
_GIVEN_UP = threading.Event()  # our own server cannot be kept alive: nobody waits for it any more


@functools.cache
def ensure_prefect_api() -> str:
    """Address of the configured Prefect API (PREFECT_API_URL or a profile), or of a server of our own until this process ends.

    Prefect would start one by itself, but that one outlives a killed process and is not replaced when it dies; ours ends with this process,
    shows its pages too, and is watched. Nobody stops it earlier: at its exit this process still sends the last log lines there.

    Raises:
        OptionError: the configured API refuses this process's login.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_INTERNAL_LEVEL,
        temporary_settings,
    )

    ours: dict[Any, Any] = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS,
        PREFECT_CLIENT_MAX_RETRIES: CLIENT_RETRIES,
        PREFECT_LOGGING_INTERNAL_LEVEL: "CRITICAL",  # it prints a page of text for every event that has to be sent again
    }
    ours = {setting: value for setting, value in ours.items() if setting.name not in os.environ}
    address = PREFECT_API_URL.value()
    if not address:
        port = choose_port("prefect", None, PREFECT_PORT)
        _start_watched(prefect_server(port))
        address = f"http://{HOST}:{port}/api"
        ours |= {PREFECT_API_URL: address, PREFECT_API_AUTH_STRING: login_of(port)}
    else:
        _check_login(address)
    _UNTIL_EXIT.enter_context(temporary_settings(ours))
    return address


def run_environment() -> dict[str, str]:
    """What a flow run that a worker starts needs in its environment; `ensure_prefect_api` and the command line say the same to others."""
    libraries = {name: value for name, value in QUIET.items() if not name.startswith("PREFECT_")}
    return {
        **libraries,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
    }


def prefect_server(port: int) -> Service:
    """The Prefect server, over the database that runs without a server use too. It answers this user's processes and its own page alone."""
    command = [sys.executable, "-P", str(LAUNCHER), "--host", HOST, "--port", str(port)]
    login = login_of(port)
    environment = {
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_API_AUTH_STRING": login,  # its own services are clients too
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(own_origins(port)),
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",  # the page would otherwise ask port 4200, whatever --port says
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # In memory (the default) a restart forgets who holds a deployment's only slot, and Prefect then cancels the run that holds it.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    return Service("Prefect", command, log_directory(port) / "prefect.log", environment, ready=f"http://{HOST}:{port}/api/health")


def login_environment(port: int) -> dict[str, str]:
    """Return what a client of our server at `port` needs in its environment."""
    return {"PREFECT_API_URL": f"http://{HOST}:{port}/api", "PREFECT_API_AUTH_STRING": login_of(port)}


def profile_path(port: int) -> Path:
    """Return the file with the Prefect profile `penstock`, which holds address and login of our server at `port`."""
    return log_directory(port) / "profiles.toml"


def login_of(port: int) -> str:
    """Return the secret of our server at `port`: that of its profile, or a new one. The profile is readable by this user alone.

    It outlives the server, so a browser and a shell that know it need not be told again.
    """
    path = profile_path(port)
    with suppress(FileNotFoundError, tomllib.TOMLDecodeError, KeyError):
        found = os.stat(path)
        if found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return str(tomllib.loads(path.read_text())["profiles"][PROFILE]["PREFECT_API_AUTH_STRING"])
    login = f"penstock:{secrets.token_hex(32)}"
    settings = {"PREFECT_API_URL": f"http://{HOST}:{port}/api", "PREFECT_API_AUTH_STRING": login}
    lines = [f'active = "{PROFILE}"', "", f"[profiles.{PROFILE}]", *(f'{name} = "{value}"' for name, value in settings.items())]
    write_private(path, "\n".join(lines) + "\n")
    return login


def with_password_hint(page: str) -> str:
    """Return the address of a page of Prefect's, with where its password is if our server shows it."""
    port = urlsplit(page).port
    known = bool(port) and urlsplit(page).hostname == HOST and profile_path(port or 0).exists()
    return f"{page}  (password: PREFECT_API_AUTH_STRING in {profile_path(port or 0)})" if known else page


def _check_login(address: str) -> None:
    """Refuse an API that answers 401 or 403 to this process; one that does not answer is waited for later."""
    from httpx import HTTPError, HTTPStatusError
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    if not answers(f"{address}/health"):
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
                f"the Prefect API at {address} refuses this login ({error.response.status_code}): export the line that `make up` prints "
                "(PREFECT_PROFILES_PATH), or set PREFECT_API_AUTH_STRING"
            ) from None
    except HTTPError:
        return  # gone again since


def wait_for_api(note: Callable[[str], object] | None = None, patience: float | None = None) -> bool:
    """Wait until the Prefect API answers, at most `patience` seconds; say so if it does not answer at once. Whether it answers.

    Called before what needs the API (an artifact, the end of a flow run), so that a run ends as soon as the API is back.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    address = PREFECT_API_URL.value()
    if not address:
        return True  # Prefect starts one of its own
    _guard_exit()
    start = time.monotonic()
    deadline = start + (PATIENCE if patience is None else patience) * (not _without_retries())
    told = False
    while not answers(f"{address}/health"):
        if not told and note and deadline > start:
            note(
                f"the Prefect API at {address} is away; waiting for it up to {deadline - start:.0f} s (the run itself is safe in the store)"
            )
        told = True
        if time.monotonic() > deadline or _GIVEN_UP.is_set():
            if not _without_retries():
                _UNTIL_LEFT.enter_context(
                    temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
                )  # waiting is over for the client too
            return False
        time.sleep(0.5)
    if told and note:
        note(f"the Prefect API is back after {time.monotonic() - start:.0f} s")
    return True


def summary_artifact(markdown: str, note: Callable[[str], object] | None = None) -> bool:
    """Show a table on the flow run's page. Whether it could be; a page that cannot be written never fails a run."""
    from httpx import HTTPError
    from prefect.artifacts import create_markdown_artifact

    if not wait_for_api(note):
        return False
    try:
        create_markdown_artifact(markdown, key="summary", description="What came of the run")
    except HTTPError as error:  # gone again since, or it refuses
        if note:
            note(f"the summary is not on the Prefect page ({type(error).__name__}: {error})")
        return False
    return True


def leave() -> None:
    """Called when a flow is over: if the API does not answer, drop the log lines and events that still wait for it."""
    from prefect.settings import PREFECT_API_URL

    _UNTIL_LEFT.close()
    address = PREFECT_API_URL.value()
    if address and not answers(f"{address}/health"):
        _drop(_queues())


@functools.cache
def _guard_exit() -> None:
    """At its exit this process waits for a server that is gone only a few seconds.

    Prefect sends what is queued while the interpreter shuts down, and tries minutes for every batch of lines and ten seconds for every event.
    """
    from prefect.settings import PREFECT_API_URL

    health = f"{PREFECT_API_URL.value()}/health"

    def watch() -> None:
        queues, last = _queues(), time.monotonic()
        while time.monotonic() - last < EXIT_PATIENCE:
            time.sleep(0.5)
            # Asked for while the process lives: a queue that is being emptied at the exit no longer knows its task. The flag is the one that
            # stops Prefect's own hooks; a hook of ours would come after those of queues that were made later, and those wait.
            if not getattr(threading, "_SHUTTING_DOWN", False):
                queues, last = _queues(), time.monotonic()
            elif answers(health):
                last = time.monotonic()
        _drop(queues)

    # It begins now: a process that ends cannot start a thread.
    threading.Thread(target=watch, name="prefect-exit-guard", daemon=True).start()


def _queues() -> list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]:
    # No public call ends these queues without sending: `drain` waits for them, and a second one is made at the next log line.
    from prefect._internal.concurrency import services

    found = [(service._loop, service._task) for service in list(services._active_services)]
    return [(loop, task) for loop, task in found if loop is not None and task is not None]


def _drop(queues: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]) -> None:
    for loop, task in queues:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)


def _without_retries() -> bool:
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    return PREFECT_CLIENT_MAX_RETRIES.value() == 0


def _wait_first_ready(server: Service) -> None:
    """Wait until the server answers for the first time; one that dies before is started again, START_TRIES times in all."""
    for tries_left in reversed(range(START_TRIES)):
        try:
            return server.wait_ready()
        except RuntimeError:
            if not tries_left or not server.keep():  # or it runs and does not answer
                raise


def _start_watched(server: Service) -> None:
    """Start the server from the thread that watches it: the kernel ends a child with the thread that started it."""
    started: list[Exception] = []
    ready = threading.Event()

    def watch() -> None:
        try:
            server.start()
            _wait_first_ready(server)
        except Exception as error:
            started.append(error)
            return
        finally:
            ready.set()
        assert server.process is not None
        while True:
            server.process.wait()
            try:
                server.keep()
            except RuntimeError as error:
                _GIVEN_UP.set()
                with server.log.open("a", encoding="utf-8") as log:
                    log.write(f"penstock: given up, the run goes on without: {error}\n")
                return

    threading.Thread(target=watch, name="prefect-server-watcher", daemon=True).start()
    ready.wait()
    if started:
        raise started[0]
