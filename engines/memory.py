"""Kinds of trainer state that can be offloaded to host memory, and the measurement of one such move. The driver uses
them, so this module does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

from penstock.storage.commit import Frozen

StateKind = Literal["weights", "gradients", "optimizer"]
GIB = 1 << 30
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)


class MemorySwitch(Frozen):
    """Duration and memory use of one move of trainer or engine state between a device and host memory."""

    name: str  # e.g. "policy: offload gradients, optimizer"
    seconds: float
    device_bytes_before: int  # used on the whole device, by all processes; 0 without CUDA
    device_bytes_after: int
    host_bytes_before: int  # resident set size of this process, pinned memory included
    host_bytes_after: int

    def __str__(self) -> str:
        device = f"{self.device_bytes_before / GIB:.1f} -> {self.device_bytes_after / GIB:.1f} GiB"
        host = f"{self.host_bytes_before / GIB:.1f} -> {self.host_bytes_after / GIB:.1f} GiB"
        return f"{self.name} in {self.seconds:.2f} s: device {device}, host {host}"
