"""`make up`: the Prefect server, a worker and the MLflow UI on this machine's loopback, until Ctrl-C.

Nothing depends on them: runs without them keep their records in the store, in Prefect's own database and in MLflow's, and these
servers show the same files. All three are children of this process and end with it, also when it is killed; one that dies is started again.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from flows.prefect_api import PREFECT_PORT, PROFILE, login_environment, login_of, prefect_server, profile_path, run_environment
from flows.prefect_server import LOOPBACK, own_origins
from flows.service import HOST, Service, choose_port, log_directory
from storage.errors import StoreError
from storage.store import Store
from storage.tracking import tracking_uri

POOL = "penstock"
MLFLOW_PORT = 5000
STORES = ("penstock-store", "penstock-demo/store")  # where the flows and the demo put their runs


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
    """Start the services, print their links, and keep them alive until Ctrl-C or until one of them dies again and again."""
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    from flows.deploy import ensure_zombie_automation

    signal.signal(signal.SIGTERM, _interrupt)
    logs = log_directory(prefect_port)
    links = {"Prefect": f"http://{HOST}:{prefect_port}", "MLflow": mlflow_link(database, mlflow_port)}
    services = [prefect_server(prefect_port), prefect_worker(prefect_port, logs)]
    if not database.startswith("http"):
        services.insert(0, mlflow_server(mlflow_port, database, logs))
    try:
        print(f"starting {', '.join(service.name for service in services)} ...", flush=True)
        for service in services[:-1]:
            service.start()
        for service in services[:-1]:
            service.wait_ready()
        services[-1].start()  # the worker looks for its server at once
        with temporary_settings({PREFECT_API_AUTH_STRING: login_of(prefect_port)}):
            ensure_zombie_automation(f"{links['Prefect']}/api")
        for title, link in links.items():
            print(f"  {title:<8} {link}")
        print(f"  worker   pool {POOL!r}; logs in {logs}")
        profile = profile_path(prefect_port)
        print(f"The Prefect page asks for a password: PREFECT_API_AUTH_STRING in {profile}")
        print("To send runs there, and for the `prefect` command (Ctrl-C stops everything):")
        print(f"  export PREFECT_PROFILES_PATH={shlex.quote(str(profile))} PREFECT_PROFILE={PROFILE}", flush=True)
        while True:
            time.sleep(1.0)
            for service in services:
                if service.keep():
                    print(f"{service.name} had ended and is started again; its log is {service.log}", flush=True)
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return 0
    except RuntimeError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    finally:
        for service in reversed(services):
            service.stop()


def mlflow_server(port: int, database: str, logs: Path) -> Service:
    """The MLflow UI over an SQLite file. MLflow's own checks refuse a foreign Host, and changes that a page of another origin asks for."""
    artifacts = Path(database.removeprefix("sqlite:///")).parent / "artifacts"
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    hosts = [f"{host}:{port}" for host in LOOPBACK]
    command += ["--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(own_origins(port))]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(artifacts)]
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("MLflow", command, logs / "mlflow.log", environment, ready=f"http://{HOST}:{port}/health")


def mlflow_link(database: str, port: int) -> str:
    """Where to look: MLflow opens on its page for language-model traces unless told that this is training."""
    server = database.rstrip("/") if database.startswith("http") else f"http://{HOST}:{port}"
    return f"{server}/#/experiments?workflowType=machine_learning"


def prefect_worker(port: int, logs: Path) -> Service:
    """A worker that runs flows as processes on this machine, and marks the runs of dead ones as crashed."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    command += ["--install-policy", "never"]
    environment = {**login_environment(port), **run_environment()}  # flow runs inherit it
    # After SIGTERM a worker whose server has gone too waits for it without end (seen: more than 30 s).
    return Service("worker", command, logs / "worker.log", environment, on_parent_death=signal.SIGKILL)


def newest_store() -> str:
    """Of the usual places, the one whose MLflow database changed last."""
    databases = {store: Path(store) / "mlflow" / "mlflow.db" for store in STORES}
    found = [store for store in STORES if databases[store].exists()]
    return max(found, key=lambda store: databases[store].stat().st_mtime, default=STORES[0])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
