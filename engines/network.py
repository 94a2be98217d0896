"""The addresses, ports and rendezvous at which the processes of a run listen: loopback if all run on one node,
otherwise the address of each process's node, or the address of the interface given with --network-interface.

A server binds its port seconds after the port was chosen, when the model is loaded; another run that starts at the same
moment could choose the same port. So a chosen port is reserved by binding a Unix socket to a name in the abstract
socket namespace (`penstock-port-<port>`): only one process can bind a name, and the kernel frees it when that process
ends, even after a kill. Like ports, these names are local to a network namespace. They leave no files on disk.

Ports are chosen below those that the kernel gives to outgoing connections. Otherwise a client that waits for a server
on this machine could get the server's port as its own, connect to itself, and keep the server from binding it.
"""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from penstock.storage.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"


def node_address(interface: str | None = None) -> str:
    """Return the address at which other nodes reach this node: the address of `interface` or, if `interface` is None,
    the address under which Ray knows the node. The latter needs a connection to Ray."""
    if interface is None:
        import ray

        return str(ray.util.get_node_ip_address())
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces.get(interface, []):
            if entry.family == family and not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local:
                return entry.address
    raise EngineError(
        f"--network-interface {interface}: the machine {socket.gethostname()} has no interface with this name and an "
        f"IP address; it has {', '.join(sorted(interfaces))}: name an interface that every node of the Ray cluster has"
    )


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface whose subnet contains `address`, or None."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask:
                own = entry.address.partition("%")[0]
                # Python does not parse IPv6 masks, and compares an IPv6 address without one only with itself.
                network = own if ":" in own else f"{own}/{entry.netmask}"
                if ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False):
                    return name
    return None


def socket_environment(interface: str | None) -> dict[str, str]:
    """Return the environment variables with which NCCL and gloo use a network interface; {} for None."""
    if interface is None:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}  # "=": exact name, not a prefix


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accepts_connections(host: str, port: int, timeout: float = 2.0) -> bool:
    """Return whether a server accepts TCP connections at this address within `timeout` seconds."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens on `host`, an address of this machine, and a free port chosen by the kernel."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_store(listener: socket.socket, world_size: int, timeout: timedelta) -> Store:
    """Return the TCPStore of rank 0, which takes ownership of `listener` and serves on it; the other ranks connect to
    its address. A socket that torch creates would listen on all addresses of this machine."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return TCPStore(
        host, port, world_size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


# ---- ports -----------------------------------------------------------------------------------------------------------

LOWEST, HIGHEST = 20_000, 65_535
# The range that the kernel gives to outgoing connections.
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: dict[int, socket.socket] = {}  # port reserved by this process -> the Unix socket that reserves it


def reserve_free_port(highest: int = HIGHEST, extra_offsets: Sequence[int] = (), host: str = LOOPBACK) -> int:
    """Reserve a TCP port from LOWEST to `highest` that is free at `host` and that no other run has reserved, together
    with the ports at `extra_offsets` from it, which the server also binds. Return the port."""
    below = int(OUTGOING_PORTS.read_text().split()[0]) - 1
    highest = min(highest, below) if below >= LOWEST + 1_000 else highest
    for _ in range(100):
        port = random.randint(LOWEST, highest)
        if reserve_ports([port, *(port + distance for distance in extra_offsets)], host):
            return port
    raise RuntimeError(f"tried 100 ports up to {highest}, and none is free: stop some of the servers on this machine")


def reserve_ports(ports: Sequence[int], host: str = LOOPBACK) -> bool:
    """Reserve all these TCP ports of the address `host` of this machine against other Penstock processes, or none of
    them. Return False if one is in use, or already reserved by any process, this one included."""
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


def is_reserved_here(port: int) -> bool:
    """Return whether this process has reserved the TCP port."""
    return port in _reserved


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could bind this TCP port of `host` now. A port in TIME_WAIT counts as free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):  # in use, not allowed, or beyond 65535
            return False
    return True
