"""List the ports that runs and services of this user listen on, with process and authentication, for `penstock
doctor`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# (substring of a command line, authentication of that process's ports, environment variable without which the ports
# have no authentication); the first match counts.
PROTECTIONS = (
    ("prefect_server.py", "login; checks Host and Origin", "PREFECT_SERVER_API_AUTH_STRING"),
    ("launch_router.py", "API key; none on its metrics, states and model names", "PENSTOCK_SERVER_KEY"),
    ("sglang/launch.py", "API key; none on ports between its processes", "PENSTOCK_SERVER_KEY"),
    ("mlflow_server", "login; checks Host and Origin", None),
    ("gcs_server", "Ray token", "RAY_AUTH_TOKEN"),
    ("raylet", "Ray token", "RAY_AUTH_TOKEN"),
    ("ray::", "Ray token; none on torch's TCPStore", "RAY_AUTH_TOKEN"),
    ("ray/", "Ray token", "RAY_AUTH_TOKEN"),
)
OURS = {"penstock", "penstock.flows.cli", "penstock.flows.services.stack"}  # modules started with `python -m`


@dataclass(frozen=True)
class ListeningPort:
    """A port that a process listens on."""

    address: str  # "127.0.0.1:4200"
    owner: str  # "gcs_server (pid 7)"
    command: str  # the command that the process belongs to: "train my-run (pid 5)"
    protection: str  # authentication, "" if there is none
    loopback: bool


def listening_ports(roots: Iterable[psutil.Process] | None = None) -> list[ListeningPort]:
    """Return the TCP ports that the processes `roots` and their descendants listen on, sorted by port number.

    Args:
        roots: by default all `penstock` commands and services of this user.
    """
    family: dict[int, tuple[psutil.Process, str]] = {}
    for root in penstock_processes_of_this_user() if roots is None else roots:
        with suppress(psutil.Error):
            command_name = f"{describe_command(root.cmdline())} (pid {root.pid})"
            processes = [root, *root.children(recursive=True)]
            family |= {each.pid: (each, command_name) for each in processes if each.pid not in family}
    ports: dict[tuple[str, int], ListeningPort] = {}
    for process, command_name in family.values():
        try:
            command, name = process.cmdline(), process.name()
            sockets = [each.laddr for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
            protection = describe_port_authentication(command, process.environ()) if sockets else ""
        except psutil.Error:  # the process has ended, or is another user's
            continue
        for host, port in sockets:
            host = host.removeprefix("::ffff:")
            owner = f"{name} (pid {process.pid})"
            loopback = ipaddress.ip_address(host).is_loopback
            ports.setdefault((host, port), ListeningPort(f"{host}:{port}", owner, command_name, protection, loopback))
    return sorted(ports.values(), key=lambda each: int(each.address.rpartition(":")[2]))


def penstock_processes_of_this_user() -> list[psutil.Process]:
    """Return this user's `penstock` processes: commands and `make up`."""
    me = psutil.Process().uids().real
    roots = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == me and is_penstock_command(process.cmdline()):
                roots.append(process)
        except psutil.Error:
            continue
    return roots


def is_penstock_command(command: list[str]) -> bool:
    """Return whether a command line starts `penstock` or one of its modules."""
    return any(word in OURS or word.endswith("bin/penstock") for word in command[:4])


def describe_command(command: list[str]) -> str:
    """Return the subcommand and the run's name of a `penstock` command line: "train my-run"; "make up" for the
    services, and the program's name for any other command."""
    start = next((number for number, word in enumerate(command[:4]) if is_penstock_command([word])), None)
    if start is None:
        return Path(command[0]).name if command else "?"
    if command[start].endswith("stack"):
        return "make up"
    words = command[start + 1 :]
    named = words[words.index("--run") + 1 :] if "--run" in words else words[1:]
    return " ".join([*words[:1], *(word for word in named[:1] if not word.startswith("-"))])


def describe_port_authentication(command: list[str], environment: dict[str, str]) -> str:
    """Return the authentication of a process's ports, by its command line (PROTECTIONS), or "" if there is none."""
    for mark, protection, variable in PROTECTIONS:
        if mark in " ".join(command):
            return protection if variable is None or environment.get(variable) else ""
    return "Ray token, session keys; none on --prometheus-port" if is_penstock_command(command) else ""
