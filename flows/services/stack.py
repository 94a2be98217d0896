"""`make up`: the Prefect server, a worker and the MLflow UI on this machine's loopback, until Ctrl-C.

Runs do not depend on these services: runs write to the store and to the databases of Prefect and MLflow, and the
services show those databases. The three services are child processes that end with this process, even if it is killed.
A service that dies is restarted.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

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
from penstock.storage.errors import StoreError
from penstock.storage.store import Store
from penstock.storage.tracking.mlflow.mlflow_options import tracking_uri
from penstock.storage.tracking.mlflow.mlflow_overview import VIEW_TAG, runs_url
from penstock.storage.tracking.mlflow.mlflow_runs import ARTIFACTS, VIEW, update_artifact_paths
from penstock.storage.tracking.tracker import TrackedRun
from penstock.storage.web.login import HOST, create_login, login_path, page_link, service_directory, with_login

MLFLOW_PORT = 5000
STORES = ("penstock-store", "penstock-demo/store")  # default stores of the flows and of the demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m penstock.flows.services.stack up`. Return the exit code: 0 after Ctrl-C, 1 if a service failed,
    2 if an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.flows.services.stack", description="Prefect server, worker and MLflow UI on loopback."
    )
    parser.add_argument("action", choices=["up"])
    parser.add_argument(
        "--store", help=f"store whose MLflow database is shown (default: last used of {', '.join(STORES)})"
    )
    parser.add_argument("--prefect-port", type=int, help=f"default {PREFECT_PORT}, or any free port if that is taken")
    parser.add_argument("--mlflow-port", type=int, help=f"default {MLFLOW_PORT}, or any free port if that is taken")
    options = parser.parse_args(argv)
    databases = {store: Path(store) / "mlflow" / "mlflow.db" for store in STORES}
    existing = [store for store in STORES if databases[store].exists()]
    newest = max(existing, key=lambda store: databases[store].stat().st_mtime, default=STORES[0])
    try:
        prefect_port = choose_port("prefect", options.prefect_port, PREFECT_PORT)
        mlflow_port = choose_port("mlflow", options.mlflow_port, MLFLOW_PORT)
        database = tracking_uri(Store(options.store or newest, probe=False))
        if not database.startswith("http"):
            update_artifact_paths(Path(database.removeprefix("sqlite:///")), TrackedRun.experiment)
    except (ValueError, StoreError, sqlite3.OperationalError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return run_services(prefect_port=prefect_port, mlflow_port=mlflow_port, database=database)


def run_services(*, prefect_port: int, mlflow_port: int, database: str) -> int:
    """Start the services, print their links, and restart services that die, until Ctrl-C.

    Returns:
        the exit code: 0 after Ctrl-C, 1 if a service did not start or died too often.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = service_directory(prefect_port)
    mlflow = [] if database.startswith("http") else [mlflow_server(mlflow_port, database, logs)]
    tracking = f"http://{HOST}:{mlflow_port}" if mlflow else database
    prefect, worker = prefect_server(prefect_port), prefect_worker(prefect_port, logs, tracking)
    services = [*mlflow, prefect, worker]
    try:
        print(f"starting {', '.join(service.name for service in services)} ...", flush=True)
        for service in (*mlflow, prefect):
            service.start()
        for service in (*mlflow, prefect):
            service.wait_ready()
        worker.start()  # last: it connects to the Prefect server at once
        mlflow_page = runs_page(mlflow_port) if mlflow else f"{database.rstrip('/')}/#/experiments?{VIEW}"
        create_automation_and_print_links(prefect_port, mlflow_page, logs)
        if mlflow:  # a run on this Prefect server then links to its MLflow page
            print(f"To track runs of any store in this MLflow:\n  export MLFLOW_TRACKING_URI={tracking}")
            print(f"Other programs must log in to MLflow with USER:PASSWORD from {login_path(mlflow_port)}", flush=True)
        while True:
            time.sleep(1.0)
            for service in services:
                if service.restart_if_ended():
                    print(f"{service.name} died; restarted it (log: {service.log})", flush=True)
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return 0
    except RuntimeError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    finally:
        for service in reversed(services):
            service.stop()


def create_automation_and_print_links(prefect_port: int, mlflow_page: str, logs: Path) -> None:
    """Create the automation that marks dead flow runs as crashed; print the services' addresses and how to connect."""
    environment, profile = login_environment(prefect_port), profile_path(prefect_port)
    with temporary_settings({PREFECT_API_AUTH_STRING: environment["PREFECT_API_AUTH_STRING"]}):
        ensure_zombie_automation(environment["PREFECT_API_URL"])
    print(f"  Prefect  {page_link(f'http://{HOST}:{prefect_port}/runs')}")
    print(f"  MLflow   {page_link(mlflow_page)}")
    print(f"  worker   pool {POOL!r}; logs in {logs}")
    print("In a terminal, each link logs in the browser that opens it first; other browsers ask for the login.")
    print("To use this server for runs and for the `prefect` command (Ctrl-C here stops all services):")
    print(f"  export PREFECT_PROFILES_PATH={shlex.quote(str(profile))} PREFECT_PROFILE={PROFILE}", flush=True)


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


def prefect_worker(port: int, logs: Path, tracking: str) -> Service:
    """Return the service of a Prefect worker, which starts a process for each flow run and marks the flow run as
    crashed if that process dies. Its runs are tracked in the MLflow at the URI `tracking`, whichever store they use,
    unless they name another one."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    command += ["--install-policy", "never"]
    environment = {**login_environment(port), **flow_run_environment(), "MLFLOW_TRACKING_URI": tracking}  # inherited
    # After SIGTERM a worker whose server is gone waits for it forever (more than 30 s observed): kill it.
    return Service("worker", command, logs / "worker.log", environment, on_parent_death=signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
