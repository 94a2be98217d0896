"""Which ports the runs and services of this user listen on, who owns them, and what keeps other people out (`penstock doctor`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

# What a command line of ours contains -> what protects the ports of that process, and the environment variable without which nothing does.
# The first that fits counts.
PROTECTIONS = (
    ("prefect_server.py", "login, own Host and Origin", "PREFECT_SERVER_API_AUTH_STRING"),
    ("launch_router.py", "key", "PENSTOCK_SERVER_KEY"),
    ("sglang/launch.py", "key; none on ports between its processes", "PENSTOCK_SERVER_KEY"),
    ("mlflow", "Host check; no login", None),
    ("gcs_server", "Ray's token", "RAY_AUTH_TOKEN"),
    ("raylet", "Ray's token", "RAY_AUTH_TOKEN"),
    ("ray::", "Ray's token; none on torch's store of ranks", "RAY_AUTH_TOKEN"),
    ("ray/", "Ray's token", "RAY_AUTH_TOKEN"),
    ("flows", "Ray's token, sessions' keys", None),
    ("penstock", "Ray's token, sessions' keys", None),
)
OURS = ("flows.cli", "flows.services", "bin/penstock")


@dataclass(frozen=True)
class ListeningPort:
    """One port."""

    address: str  # "127.0.0.1:4200"
    owner: str  # "gcs_server (pid 7)"
    protection: str  # "" if there is none
    loopback: bool


def listening_ports(roots: Iterable[psutil.Process] | None = None) -> list[ListeningPort]:
    """Return the ports that processes and their descendants listen on, by port.

    Args:
        roots: the processes; all runs and services of this user by default.
    """
    family = {process.pid: process for root in (own_roots() if roots is None else roots) for process in [root, *_children(root)]}
    found: dict[tuple[str, int], ListeningPort] = {}
    for process in family.values():
        try:
            words, name = " ".join(process.cmdline()), process.name()
            sockets = [each.laddr for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
            protection = protection_of(words, process.environ()) if sockets else ""
        except psutil.Error:  # it has ended, or is another user's
            continue
        for host, port in sockets:
            host = host.removeprefix("::ffff:")
            owner = f"{name} (pid {process.pid})"
            found.setdefault(
                (host, port), ListeningPort(f"{host}:{port}", owner, protection, ipaddress.ip_address(host).is_loopback)
            )
    return sorted(found.values(), key=lambda each: int(each.address.rpartition(":")[2]))


def own_roots() -> list[psutil.Process]:
    """Return this user's `penstock` processes and services."""
    me = psutil.Process().uids().real
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == me and any(mark in word for word in process.cmdline()[:4] for mark in OURS):
                found.append(process)
        except psutil.Error:
            continue
    return found


def protection_of(command: str, environment: dict[str, str]) -> str:
    """Return what keeps others out of a process's ports; empty if nothing does."""
    for mark, protection, variable in PROTECTIONS:
        if mark in command:
            return protection if variable is None or environment.get(variable) else ""
    return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
