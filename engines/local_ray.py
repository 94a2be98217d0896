"""Start a local Ray that ends with this process: retry if one of Ray's daemons dies during the start, and do not start
the daemons that a run does not need."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from penstock.engines.scratch import MAX_RAY_PATH, own_temp_directory
from penstock.storage.errors import PenstockError

OBJECT_STORE_BYTES = 200 << 20  # small: only keys of stored objects and numbers are passed through Ray
START_TRIES = 3
RAY_PROCESSES = ("gcs_server", "raylet")
# Methods of Ray's class Node that start daemons a run does not need.
UNUSED_STARTERS = ("start_monitor", "start_log_monitor", "start_api_server")
WORKER_DIED = "A worker died or was killed"  # start of Ray's message about a worker that died during a task
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
logger = logging.getLogger(__name__)


class ClusterLost(PenstockError, ConnectionError):
    """The driver's local Ray died, and with it all actors, or did not start; the driver must start a new `Cluster`."""

    code = "cluster-lost"


def import_ray() -> None:
    """Import Ray with a setting that prevents its C++ client from ending this process when Ray's GCS dies.

    By default the client ends the process 60 s after the GCS (Ray's control service) to which it was connected has
    died, if a call to that GCS is still pending, even if another Ray has been started since (seen with Ray 2.60). The
    setting is read at import. It is removed from the environment afterwards, because Ray's own processes must end when
    their GCS dies.
    """
    was_unset = RECONNECT not in os.environ
    os.environ.setdefault(RECONNECT, str(10 * 24 * 3600))
    try:
        import ray  # noqa: F401
    finally:
        if was_unset:
            del os.environ[RECONNECT]


def start_ray(**options: Any) -> None:
    """Start a local Ray and connect to it; retry if the start fails. `options` are passed to `ray.init`."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        others = {child.pid for child in psutil.Process().children()}
        try:
            with _patched_ray():
                connect_to_ray(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=_ray_directory(),
                    **options,
                )
            return
        except ValueError:  # wrong options: a retry would fail the same way
            raise
        except Exception as error:  # Ray raises RuntimeErrors and bare Exceptions
            ray.shutdown()
            kill_processes(local_ray_processes(others))  # the daemons that the failed start left running
            reason = str(error).partition("\n")[0]
            if not tries_left:
                raise ClusterLost(
                    f"Ray did not start in {START_TRIES} tries ({reason}): see the logs in {_ray_directory()}"
                ) from error
            logger.warning("Ray did not start (%s); retrying (%d tries left)", reason, tries_left)


def _ray_directory() -> str:
    """Return the directory for Ray's sockets and logs: `ray` in this process's temporary directory, or /tmp/ray if that
    path is longer than MAX_RAY_PATH, with which Ray's Unix socket paths would exceed the kernel's limit."""
    directory = str(own_temp_directory() / "ray")
    return directory if len(directory) <= MAX_RAY_PATH else "/tmp/ray"


def local_ray_processes(keep_pids: Collection[int] = ()) -> list[psutil.Process]:
    """Return the daemons of this process's local Ray, except those in `keep_pids`, and their children."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.pid not in keep_pids and child.name() in RAY_PROCESSES:
                processes += [*child.children(recursive=True), child]
    return processes


def kill_processes(processes: list[psutil.Process]) -> None:
    """Kill the processes that are still running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def connect_to_ray(**options: Any) -> None:
    """Call `ray.init` without its signal handlers: this process handles its signals itself (flows/runtime/signals.py).

    The two handlers that Ray sets in Python raise SystemExit, which is lost if the signal arrives during an import. The
    handler that Ray sets in C++ prints a stack trace. Processes that Ray starts keep these handlers.
    """
    import ray
    from ray._private import ray_constants, utils

    utils.set_sigterm_handler = lambda handler: None
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    ray.init(**options)


@contextmanager
def _patched_ray() -> Iterator[None]:
    """Make `ray.init` start fewer processes and listen on 127.0.0.1 only. Ray 2.60 has no options for this.

    A single-node Ray does not need the autoscaler's monitor, the log monitor, and the dashboard's API server, which
    starts even with `include_dashboard=False`; they cost 2.4 s of CPU time, and 4 s of the start on 2 cores. Without
    the patch of `resolve_ip_for_localhost` Ray replaces 127.0.0.1 by the machine's network address and listens on all
    interfaces.
    """
    from ray._private import services
    from ray._private.node import Node

    starters = {name: starter for name in UNUSED_STARTERS if (starter := getattr(Node, name, None))}
    resolve = services.resolve_ip_for_localhost
    for name in starters:
        setattr(Node, name, lambda self, **options: None)
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve
        for name, starter in starters.items():
            setattr(Node, name, starter)


def log_ray_messages() -> None:
    """Log the messages that Ray's daemons send to a driver, instead of printing them on stdout.

    Ray 2.60 prints them even with `log_to_driver=False`, and has no option against it. Messages about the death of a
    worker are logged at level DEBUG only, because the worker's caller reports it, too.
    """
    from ray._private import worker

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logger.log(logging.DEBUG if line.startswith(WORKER_DIED) else logging.WARNING, "Ray: %s", line)

    worker.print_to_stdstream = log
