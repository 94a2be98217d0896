"""The addresses and the rendezvous at which the processes of a run listen: loopback if all run on one node, otherwise
the address of each process's node, or that of the interface given with --network-interface."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from penstock.storage.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = 2.0  # seconds for a server to accept a connection


def is_loopback(host: str) -> bool:
    """Return whether `host`, an IP address or `localhost`, is reachable from its own machine only."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def node_address(interface: str | None = None) -> str:
    """Return the address at which other nodes reach this node: that of `interface`, by default the address under which
    Ray knows the node. Needs a connection to Ray if `interface` is not given.
    """
    if interface is not None:
        return interface_address(interface)
    import ray

    return str(ray.util.get_node_ip_address())


def interface_address(interface: str) -> str:
    """Return the address of a network interface of this machine, IPv4 if it has one."""
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
    """Return the name of the network interface of this machine whose subnet contains `address`; None if no
    interface's subnet does."""
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


def accepts_connections(host: str, port: int) -> bool:
    """Return whether a server accepts TCP connections at this address."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens on `host`, an address of this machine, and a free port chosen by the kernel."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_store(listener: socket.socket, world_size: int, timeout: timedelta) -> Store:
    """Return the TCPStore of rank 0, which serves on `listener`; the other ranks connect to the listener's address.

    The store takes ownership of the socket. torch would make it listen on all addresses of this machine.
    """
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return TCPStore(
        host, port, world_size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )
