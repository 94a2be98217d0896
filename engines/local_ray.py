"""Start a Ray that belongs to this process: retried if one of its processes dies meanwhile, without the helpers a run does not use."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from engines.scratch import LONGEST_FOR_RAY, own_directory
from storage.errors import PenstockError

OBJECT_STORE_BYTES = 200 << 20  # refs and numbers pass through Ray; samples and weights never do
START_TRIES = 3
RAY_PROCESSES = ("gcs_server", "raylet")
HELPERS = ("start_monitor", "start_log_monitor", "start_api_server")  # of Ray's node: what starts processes that we do not need
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
logger = logging.getLogger(__name__)


class ClusterLost(PenstockError, ConnectionError):
    """The driver's own Ray is gone, and everything in it; a new one must be started."""

    code = "cluster-lost"


def import_ray() -> None:
    """Import Ray such that its C++ client never ends this process.

    By default it does so 60 s after the control service of a Ray that this process has used is gone, if a call to it still waits then,
    even when another Ray has been started meanwhile (seen with Ray 2.60). The setting is read at the import; Ray's own processes, which
    must end, do not inherit it.
    """
    ours = RECONNECT not in os.environ
    os.environ.setdefault(RECONNECT, str(10 * 24 * 3600))
    try:
        import ray  # noqa: F401
    finally:
        if ours:
            del os.environ[RECONNECT]


def start_ray(**options: Any) -> None:
    """Start a Ray on this machine. A process of it that is killed meanwhile fails `ray.init` after 30 to 50 s; then it is tried again."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        others = {child.pid for child in psutil.Process().children()}
        try:
            with _without_helpers(), _on_loopback():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=_ray_directory(),
                    **options,
                )
            return
        except ValueError:  # wrong options stay wrong
            raise
        except Exception as error:  # Ray raises RuntimeErrors and bare Exceptions
            ray.shutdown()
            _end_half_started(others)
            reason = str(error).partition("\n")[0]
            if not tries_left:
                raise ClusterLost(
                    f"Ray did not start in {START_TRIES} tries ({reason}): see the logs in {_ray_directory()}"
                ) from error
            logger.warning("Ray did not start (%s); starting it again (%d tries left)", reason, tries_left)


def _ray_directory() -> str:
    """Where Ray keeps sockets and logs: in this process's directory, or in Ray's usual place if that path is too long for sockets."""
    directory = str(own_directory() / "ray")
    return directory if len(directory) <= LONGEST_FOR_RAY else "/tmp/ray"


def _end_half_started(others: set[int]) -> None:
    """End what a failed `ray.init` has left running: this process's children of Ray, other than `others`."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.pid not in others and child.name() in RAY_PROCESSES:
                for process in [*child.children(recursive=True), child]:
                    process.kill()


@contextmanager
def _without_helpers() -> Iterator[None]:
    """In this block `ray.init` leaves out three processes of no use to one driver on one machine: the autoscaler's monitor, the one that
    sends logs to drivers, and the dashboard's server, which Ray 2.60 starts without a dashboard too. It has no options for that; they took
    2.4 s of processor time, and 4 s of a start on 2 cores.
    """
    from ray._private.node import Node

    starters = {name: starter for name in HELPERS if (starter := getattr(Node, name, None))}
    for name in starters:
        setattr(Node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, starter in starters.items():
            setattr(Node, name, starter)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """In this block `ray.init` takes the address 127.0.0.1 as it is given; all processes of the node then listen there alone. Ray 2.60
    replaces it by the machine's own address otherwise, and its processes listen on all interfaces.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve


def keep_signals() -> None:
    """Python's handler of SIGTERM in its place again: `ray.init` puts one of its own there, which prints a stack and ends the process."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)
