"""Choose free ports for servers that bind them later, and reserve them against other runs while this process lives.

A server binds its port seconds after the port was chosen, when the model is loaded; another run that starts at the same
moment could choose the same port. So a chosen port is reserved by binding a Unix socket to a name in the abstract
socket namespace (`penstock-port-<port>`): only one process can bind a name, and the kernel frees it when that process
ends, even after a kill. Like ports, these names are local to a network namespace. They leave no files on disk.

Ports are chosen below those that the kernel gives to outgoing connections. Otherwise a client that waits for a server
on this machine could get the server's port as its own, connect to itself, and keep the server from binding it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.network import LOOPBACK

LOWEST, HIGHEST = 20_000, 65_535
_reserved: dict[int, socket.socket] = {}  # port reserved by this process -> the Unix socket that reserves it


def reserve_free_port(highest: int = HIGHEST, extra_offsets: Sequence[int] = (), host: str = LOOPBACK) -> int:
    """Reserve a free TCP port up to `highest` that no other run has reserved, and return it.

    Args:
        highest: largest allowed port, at least LOWEST.
        extra_offsets: offsets (port + offset) of further ports that the server binds; these ports are reserved, too.
        host: address of this machine on which the port must be free.
    """
    below = first_outgoing_port() - 1
    highest = min(highest, below) if below >= LOWEST + 1_000 else highest
    for _ in range(100):
        port = random.randint(LOWEST, highest)
        if reserve_ports([port, *(port + distance for distance in extra_offsets)], host):
            return port
    raise RuntimeError(f"tried 100 ports up to {highest}, and none is free: stop some of the servers on this machine")


def reserve_ports(ports: Sequence[int], host: str = LOOPBACK) -> bool:
    """Reserve all these TCP ports of the address `host` of this machine against other Penstock processes, or none.
    Return False if one is in use, or already reserved by any process, this one included."""
    locks: dict[int, socket.socket] = {}
    for port in ports:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0penstock-port-{port}")
        except OSError:
            lock.close()
        else:
            locks[port] = lock
        if port not in locks or not is_free(port, host):
            for lock in locks.values():
                lock.close()
            return False
    _reserved.update(locks)
    return True


def first_outgoing_port() -> int:
    """Return the lowest port that the kernel gives to outgoing connections."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def is_reserved_here(port: int) -> bool:
    """Return whether this process has reserved the TCP port."""
    return port in _reserved


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could bind this TCP port of the address `host` now. A port in TIME_WAIT counts as
    free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):  # in use, not allowed, or beyond 65535
            return False
    return True
