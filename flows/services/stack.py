"""`penstock up` and `penstock down`: the Prefect server, a worker and the MLflow UI of each store on this machine's
loopback.

Runs do not depend on these services: runs write to the store and to the databases of Prefect and MLflow, and the
services show those databases. The services are child processes that end with `penstock up`, even if it is killed. A
service that dies is restarted. up.json in this user's state directory says which process has started what.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from urllib.parse import urlsplit

import httpx
import psutil
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

from penstock.flows.options.argv import parse_integer, short_repr
from penstock.flows.options.flags import describe_unknown_flag, split_flags
from penstock.flows.options.paths import find_nearby_stores
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.child_process import Service, choose_port
from penstock.flows.runtime.prefect_api import (
    PREFECT_PORT,
    PROFILE,
    flow_run_environment,
    login_environment,
    prefect_server,
    profile_path,
)
from penstock.flows.services.deploy import POOL, ensure_zombie_automation
from penstock.storage.errors import OptionError, check_rules
from penstock.storage.leases import process_start_time
from penstock.storage.preemption import Preempted
from penstock.storage.secrets import redact, write_private
from penstock.storage.store import Store
from penstock.storage.tracking.mlflow.mlflow_options import tracking_uri
from penstock.storage.tracking.mlflow.mlflow_runs import ARTIFACTS, VIEW, VIEW_TAG, runs_url, update_artifact_paths
from penstock.storage.tracking.tracker import TrackedRun
from penstock.storage.web.login import HOST, create_login, login_path, page_link, service_directory, with_login

MLFLOW_PORT = 5000
STOP_TIMEOUT = 35.0  # seconds in which `penstock up` ends its services after SIGTERM
UP_FLAGS = ("--store", "--detach", "--prefect-port", "--mlflow-port")

UP_USAGE = f"""penstock up [--store URI ...] [--detach] [--prefect-port N] [--mlflow-port N]

  Starts a Prefect server, a worker for deployments, and MLflow for each store, on this machine's loopback. Prints their
  links, and ends them at Ctrl-C. Each user of a machine has one set of them, not each directory: if yours run already,
  from whichever directory, prints their links.

  --store         store whose MLflow database is shown; give it several times for several stores. Default: the store
                  around the working directory that was used last
  --detach        start them in the background; `penstock down` ends them
  --prefect-port  default {PREFECT_PORT}, or any free port if that is taken
  --mlflow-port   of the first store, default {MLFLOW_PORT}, or any free port if that is taken"""

DOWN_USAGE = """penstock down

  Ends the services that `penstock up` has started for this user, from whichever directory. Flow runs of its worker are
  ended within 15 seconds; their next start resumes them. Other runs on this machine continue."""


@dataclass(frozen=True)
class Up:
    """The record of a running `penstock up`."""

    pid: int
    started: str  # start time of the process (`process_start_time`)
    prefect_port: int
    pages: dict[str, str]  # store -> address of its runs in MLflow
    tracking: str | None  # where the worker's runs are tracked; None: each run in the database of its store


def up_main(argv: list[str]) -> int:
    """Run `penstock up`. Return the exit code: 0 after Ctrl-C, SIGTERM or `penstock down`, 1 if a service failed."""
    flags: dict[str, list[str]] = {}
    for name, values in split_flags(argv):
        rules = (
            (name not in UP_FLAGS, describe_unknown_flag(name, UP_FLAGS)),
            (bool(values) == (name == "--detach"), f"{name} {'takes no value' if values else 'needs a value'}"),
        )
        check_rules(rules)
        flags.setdefault(name, []).extend(values)
    if (running := read_up()) is not None:
        print(f"`penstock up` runs already (process {running.pid}); `penstock down` ends it")
        print_links(running)
        check_rules(
            (
                Store(path, probe=False).uri not in running.pages,
                f"it does not show --store {path}: run `penstock down`, then `penstock up` with all",
            )
            for path in flags.get("--store", [])
        )
        return 0
    if "--detach" in flags:
        return detach([word for word in argv if word != "--detach"])
    requested_prefect, requested_mlflow = (
        parse_integer(name, flags[name][-1]) if name in flags else None for name in ("--prefect-port", "--mlflow-port")
    )
    prefect_port = choose_port("prefect", requested_prefect, PREFECT_PORT)
    databases: dict[str, str] = {}  # store -> tracking URI
    mlflow_ports: dict[str, int] = {}  # store -> port of our server
    try:
        for path in flags.get("--store") or [default_store()]:
            store = Store(path, probe=False)
            database = databases[store.uri] = tracking_uri(store)
            if not database.startswith("http") and store.uri not in mlflow_ports:
                update_artifact_paths(Path(database.removeprefix("sqlite:///")), TrackedRun.experiment)
                requested = None if mlflow_ports and requested_mlflow else requested_mlflow
                mlflow_ports[store.uri] = choose_port("mlflow", requested, MLFLOW_PORT)
    except sqlite3.OperationalError as error:
        raise OptionError(f"--store {path}: its MLflow database cannot be read ({error})") from error
    with lock_up():
        return run_services(prefect_port, databases, mlflow_ports)


@contextmanager
def lock_up() -> Iterator[None]:
    """Let no other process of this user run `penstock up` during the block. Raises OptionError if one does."""
    up_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with up_path().with_name("up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError("another `penstock up` is starting: run the command again when it is ready") from error
        yield


def default_store() -> str:
    """Return the store around the working directory that was used last, or the default of --store."""
    last_used = {
        store: max((path.stat().st_mtime for path in (Path(store) / "mlflow").glob("mlflow.db*")), default=0.0)
        for store in find_nearby_stores()
    }
    if len(last_used) > 1:
        print(f"{len(last_used)} stores are here: {', '.join(last_used)}; give --store for each that is to be shown")
    return max(last_used, key=last_used.__getitem__, default=RunConfig().store)


def run_services(prefect_port: int, databases: dict[str, str], mlflow_ports: dict[str, int]) -> int:
    """Start the services, print their links, and restart services that die, until Ctrl-C or SIGTERM. Return the exit
    code: 0 after such a stop, 1 if a service did not start or died too often. `databases`: store -> its tracking URI;
    `mlflow_ports`: store -> port of our MLflow server, which shows the store's database."""
    logs = service_directory(prefect_port)
    mlflow = [mlflow_server(port, databases[store], service_directory(port)) for store, port in mlflow_ports.items()]
    tracked = {f"http://{HOST}:{mlflow_ports[s]}" if s in mlflow_ports else uri for s, uri in databases.items()}
    tracking = tracked.pop() if len(tracked) == 1 else None
    prefect, worker = prefect_server(prefect_port), prefect_worker(prefect_port, logs, tracking)
    services = [*mlflow, prefect, worker]
    try:
        print(f"starting {', '.join(dict.fromkeys(service.name for service in services))} ...", flush=True)
        for service in (*mlflow, prefect):
            service.start()
        for service in (*mlflow, prefect):
            service.wait_ready()
        worker.start()  # last: it connects to the Prefect server at once
        environment = login_environment(prefect_port)
        with temporary_settings({PREFECT_API_AUTH_STRING: environment["PREFECT_API_AUTH_STRING"]}):
            ensure_zombie_automation(environment["PREFECT_API_URL"])
        pages = {
            store: runs_page(mlflow_ports[store])
            if store in mlflow_ports
            else f"{redact(uri).rstrip('/')}/#/experiments?{VIEW}"
            for store, uri in databases.items()
        }
        up = Up(os.getpid(), process_start_time(os.getpid()), prefect_port, pages, tracking)
        write_private(up_path(), json.dumps(asdict(up)))
        print_links(up)
        while True:
            time.sleep(1.0)
            for service in services:
                if service.restart_if_ended():
                    print(f"{service.name} died; restarted it (log: {service.log})", flush=True)
    except (KeyboardInterrupt, Preempted):
        print("\nstopping ...", flush=True)
        return 0
    except RuntimeError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    finally:
        for service in reversed(services):
            service.stop()
        up_path().unlink(missing_ok=True)


def detach(argv: list[str]) -> int:
    """Start `penstock up` in the background, wait until its services are ready, and print their links. Return the exit
    code."""
    log = up_path().with_name("up.log")
    write_private(log, "")
    with log.open("ab") as out:
        command = [sys.executable, "-m", "penstock", "up", *argv]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while (up := read_up()) is None:
            if (code := process.poll()) is not None:
                print(log.read_text(encoding="utf-8", errors="replace")[-4000:], end="", file=sys.stderr)
                return code
            time.sleep(0.2)
    except BaseException:  # such as Ctrl-C
        process.terminate()
        raise
    print_links(up)
    print(f"`penstock down` ends them (log: {log})")
    return 0


def down_main(argv: list[str]) -> int:
    """Run `penstock down`. Return 0."""
    if argv:
        raise OptionError(f"penstock down takes no arguments; found {short_repr(argv[0])}")
    if (up := read_up()) is None:
        print("`penstock up` does not run")
        return 0
    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        process = psutil.Process(up.pid)
        processes = [process, *process.children(recursive=True)]
        process.terminate()
        for remaining in psutil.wait_procs(processes, timeout=STOP_TIMEOUT)[1]:
            with suppress(psutil.NoSuchProcess):
                remaining.kill()
    print(f"ended `penstock up` (process {up.pid})")
    return 0


def up_path() -> Path:
    """Return the path of the record of `penstock up`."""
    return service_directory(0).parent / "up.json"


def read_up() -> Up | None:
    """Return the record of this user's `penstock up`, or None if it does not run."""
    try:
        up = Up(**json.loads(up_path().read_text(encoding="utf-8")))
        return up if process_start_time(up.pid) == up.started else None
    except (FileNotFoundError, ValueError, TypeError):  # none, or of another release
        return None


def print_links(up: Up) -> None:
    """Print the addresses of the services of `penstock up`, and how to connect."""
    print(f"  Prefect  {page_link(f'http://{HOST}:{up.prefect_port}/runs')}")
    for store, page in up.pages.items():
        print(f"  MLflow   {page_link(page)}  {store}")
    print(f"  worker   pool {POOL!r}; logs in {service_directory(up.prefect_port)}")
    print("In a terminal, each link logs in the browser that opens it first; other browsers ask for the login.")
    print("To use this server for runs and for the `prefect` command (`penstock down` stops all services):")
    print(f"  export PREFECT_PROFILES_PATH={shlex.quote(str(profile_path(up.prefect_port)))} PREFECT_PROFILE={PROFILE}")
    port = urlsplit(up.tracking or "").port
    if port is not None and any(page.startswith(f"http://{HOST}:{port}/") for page in up.pages.values()):
        print(f"To track runs of any store in this MLflow:\n  export MLFLOW_TRACKING_URI={up.tracking}")
        print(f"Other programs need a login for it, USER:PASSWORD in {login_path(port)}")
    sys.stdout.flush()


def mlflow_server(port: int, database: str, logs: Path) -> Service:
    """Return the service of the MLflow UI for an SQLite database, with a new login."""
    create_login(port)
    artifacts = Path(database.removeprefix("sqlite:///")).absolute().parent / ARTIFACTS
    command = [sys.executable, "-P", "-m", "penstock.storage.tracking.mlflow.mlflow_server"]
    command += ["--port", str(port), "--database", database, "--artifacts", str(artifacts)]
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("MLflow", command, logs / "mlflow.log", environment, ready=f"http://{HOST}:{port}/health")


def runs_page(port: int) -> str:
    """Return the URL of the runs on our MLflow server at `port`."""
    server = f"http://{HOST}:{port}"
    query = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={TrackedRun.experiment}"
    answer = httpx.get(with_login(query), trust_env=False)  # 404: the database does not have a run yet
    experiment = answer.json()["experiment"] if answer.is_success else {}
    has_view = VIEW_TAG in [tag["key"] for tag in experiment.get("tags", [])]
    return f"{server}/{runs_url(experiment['experiment_id'])}" if has_view else f"{server}/#/experiments"


def prefect_worker(port: int, logs: Path, tracking: str | None) -> Service:
    """Return the service of a Prefect worker, which starts a process for each flow run and marks the flow run as
    crashed if that process dies. Unless they name another tracker, its runs are tracked in the MLflow at the URI
    `tracking`, whichever store they use; without it, each run in the database of its store."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    command += ["--install-policy", "never"]
    environment = {**login_environment(port), **flow_run_environment()}  # inherited by the flow runs
    environment |= {"MLFLOW_TRACKING_URI": tracking} if tracking else {}
    environment["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"  # its log file is the only place of its lines
    # After SIGTERM a worker whose server is gone waits for it forever (more than 30 s observed): kill it.
    return Service("worker", command, logs / "worker.log", environment, on_parent_death=SIGKILL)
