"""Ports of this machine for servers that bind them later: chosen, and reserved against other runs as long as this process lives.

The kernel says which port is free now. A server binds it seconds later, after loading, and by then a run that was started at the same
moment may have been given the same one. So a chosen port is reserved under a name in the abstract socket namespace: the kernel gives
each name to one process, and frees it when that process ends, however it ends. Like ports, these names belong to a network namespace,
and nothing of them lies on a disk.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
HIGHEST = 65_535
_reserved: dict[int, socket.socket] = {}  # by this process


def free_port(highest: int = HIGHEST, beside: Sequence[int] = ()) -> int:
    """Return a TCP port up to `highest` that is free and not reserved by another run, and reserve it.

    Args:
        highest: largest number that will do.
        beside: distances to further ports that the server derives from this one; they are free and reserved as well.

    Raises:
        RuntimeError: none was found.
    """
    for _ in range(100):
        port = _suggest() if highest == HIGHEST else random.randint(20_000, highest)
        if reserve([port, *(port + distance for distance in beside)]):
            return port
    raise RuntimeError(f"100 ports up to {highest} were tried and none is free: end some of the servers on this machine")


def reserve(ports: Sequence[int]) -> bool:
    """Reserve these ports for this process, all or none. False if one is in use, or reserved by another process or earlier by this one."""
    taken: dict[int, socket.socket] = {}
    for port in ports:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0penstock-port-{port}")
        except OSError:
            name.close()
        else:
            taken[port] = name
        if port not in taken or not is_free(port):
            for held in taken.values():
                held.close()
            return False
    _reserved.update(taken)
    return True


def is_reserved_here(port: int) -> bool:
    """Whether this process has reserved the port."""
    return port in _reserved


def is_free(port: int) -> bool:
    """Whether a server could listen there now; a port in TIME_WAIT is free for one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError):  # in use, not allowed, or beyond 65535
            return False
    return True


def _suggest() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
