"""`make up`: the Prefect server, a worker and the MLflow UI on this machine's loopback, until Ctrl-C.

Nothing depends on them: runs without them keep their records in the store, in Prefect's own database and in MLflow's, and these
servers show the same files. All three are children of this process and end with it, also when it is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from storage.store import Store, StoreError
from storage.tracking import tracking_uri

HOST = "127.0.0.1"
POOL = "penstock"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # what people expect; another free port is taken if one is busy and was not asked for
START_TIMEOUT = 120.0
STOP_TIMEOUT = 15.0
STORES = ("penstock-store", "penstock-demo/store")  # where the flows and the demo put their runs
_PR_SET_PDEATHSIG = 1
_UNTIL_EXIT = ExitStack()


@dataclass
class Service:
    """One child process. `ready` is an address that answers once the service does; a service without one is ready at once."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: str | None = None
    on_parent_death: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its output goes to the log file."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
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
        while self.ready and not _answers(self.ready):
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


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.services up`. Returns the exit code: 0 after Ctrl-C, 1 if a service failed, 2 if the request was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.services", description="Prefect server, worker and MLflow UI on loopback."
    )
    parser.add_argument("action", choices=["up"])
    parser.add_argument("--store", help=f"whose MLflow database to show (default: the newest of {', '.join(STORES)})")
    parser.add_argument("--prefect-port", type=int, help=f"default {PREFECT_PORT}, or any free port")
    parser.add_argument("--mlflow-port", type=int, help=f"default {MLFLOW_PORT}, or any free port")
    options = parser.parse_args(argv)
    try:
        ports = {name: choose_port(name, given, usual) for name, given, usual in (
            ("prefect", options.prefect_port, PREFECT_PORT), ("mlflow", options.mlflow_port, MLFLOW_PORT))}  # fmt: skip
        database = tracking_uri(Store(options.store or newest_store(), probe=False))
    except (ValueError, StoreError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return up(prefect_port=ports["prefect"], mlflow_port=ports["mlflow"], database=database)


def up(*, prefect_port: int, mlflow_port: int, database: str) -> int:
    """Start the services, print their links, and wait for Ctrl-C or for one of them to end."""
    signal.signal(signal.SIGTERM, _interrupt)
    logs = log_directory(prefect_port)
    links = {"Prefect": f"http://{HOST}:{prefect_port}", "MLflow": mlflow_link(database, mlflow_port)}
    services = [prefect_server(prefect_port, logs), prefect_worker(prefect_port, logs)]
    if not database.startswith("http"):
        services.insert(0, mlflow_server(mlflow_port, database, logs))
    try:
        print(f"starting {', '.join(service.name for service in services)} ...", flush=True)
        for service in services[:-1]:
            service.start()
        for service in services[:-1]:
            service.wait_ready()
        services[-1].start()  # the worker looks for its server at once
        for title, link in links.items():
            print(f"  {title:<8} {link}")
        print(f"  worker   pool {POOL!r}; logs in {logs}")
        print(f"To send runs there: export PREFECT_API_URL={links['Prefect']}/api    Ctrl-C stops everything.", flush=True)
        while True:
            time.sleep(1.0)
            for service in services:
                service.check()
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return 0
    except RuntimeError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    finally:
        for service in reversed(services):
            service.stop()


@functools.cache
def ensure_prefect_api() -> str:
    """Address of the configured Prefect API (PREFECT_API_URL or a profile), or of a server of our own until this process ends.

    Prefect would start one by itself, but that one outlives a killed process; ours ends with it, and shows its pages too. Nobody stops
    it earlier: at its exit this process still sends the last log lines there.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if configured := PREFECT_API_URL.value():
        return configured
    port = choose_port("prefect", None, PREFECT_PORT)
    server = prefect_server(port, log_directory(port))
    server.start()
    server.wait_ready()
    address = f"http://{HOST}:{port}/api"
    _UNTIL_EXIT.enter_context(temporary_settings({PREFECT_API_URL: address}))
    return address


def log_directory(port: int) -> Path:
    """Where the services beside a Prefect server at `port` log."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "penstock" / "services" / str(port)


def mlflow_server(port: int, database: str, logs: Path) -> Service:
    """The MLflow UI over an SQLite file."""
    artifacts = Path(database.removeprefix("sqlite:///")).parent / "artifacts"
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(artifacts)]
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("MLflow", command, logs / "mlflow.log", environment, ready=f"http://{HOST}:{port}/health")


def mlflow_link(database: str, port: int) -> str:
    """Where to look: MLflow opens on its page for language-model traces unless told that this is training."""
    server = database.rstrip("/") if database.startswith("http") else f"http://{HOST}:{port}"
    return f"{server}/#/experiments?workflowType=machine_learning"


def prefect_server(port: int, logs: Path) -> Service:
    """The Prefect server, over the database that runs without a server use too."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    environment = {
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",  # the page would otherwise ask port 4200, whatever --port says
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    return Service("Prefect", command, logs / "prefect.log", environment, ready=f"http://{HOST}:{port}/api/health")


def prefect_worker(port: int, logs: Path) -> Service:
    """A worker that runs flows as processes on this machine, and marks the runs of dead ones as crashed."""
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--install-policy",
        "never",
    ]
    environment = {"PREFECT_API_URL": f"http://{HOST}:{port}/api"}
    # After SIGTERM a worker whose server has gone too waits for it without end (seen: more than 30 s).
    return Service("worker", command, logs / "worker.log", environment, on_parent_death=signal.SIGKILL)


def choose_port(name: str, given: int | None, usual: int) -> int:
    """The port to use: the given one, else (or if 0 is given) a free one.

    Raises:
        ValueError: the given port is taken.
    """
    if given:
        if not _free(given):
            raise ValueError(
                f"port {given} on {HOST} is taken: give --{name}-port another one, or leave it out and a free one is found"
            )
        return given
    if given is None and _free(usual):
        return usual
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def newest_store() -> str:
    """Of the usual places, the one whose MLflow database changed last."""
    databases = {store: Path(store) / "mlflow" / "mlflow.db" for store in STORES}
    found = [store for store in STORES if databases[store].exists()]
    return max(found, key=lambda store: databases[store].stat().st_mtime, default=STORES[0])


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _answers(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches our loopback
    try:
        with opener.open(address, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has ended by itself


def _end_with_parent(number: signal.Signals) -> None:
    """In the child: ask the kernel for a signal when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
