"""A second CUDA stream, on which tensors are exchanged between ranks while the first one computes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """Return the one side stream of a device: its exchanges run in the order in which they were started."""
    return SideStream(torch.cuda.Stream(device) if device.type == "cuda" else None)


class SideStream:
    """Runs functions on a stream of their own. On a CPU (`stream` None) they run at once.

    autograd runs the backward pass of each function on the same stream, and waits where gradients cross streams.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def start(self, function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
        """Start `function(*inputs)` after the work already queued on the current stream. The returned callable makes
        the current stream wait for the result and returns it."""
        if self.stream is None:
            out = function(*inputs)
            return lambda: out
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        for x in inputs:
            x.record_stream(self.stream)  # its memory must not be reused before this stream has read it
        with torch.cuda.stream(self.stream):
            out = function(*inputs)
            done = self.stream.record_event()

        def wait() -> Tensor:
            current.wait_event(done)
            out.record_stream(current)
            return out

        return wait
