"""Rendezvous of torch process groups on one address of this machine: by default a TCPStore listens on all of them."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens on `host`, an address of this machine, and a free port chosen by the kernel."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_store(listener: socket.socket, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the TCPStore of rank 0, which serves on `listener`; the other ranks connect to the listener's address.

    The store takes ownership of the socket.
    """
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    return dist.TCPStore(
        host, port, world_size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )
