"""Offload AdamW's moments to host memory: two thirds of the optimizer's bytes are off the GPU outside of `step`.

A step copies the moments of a few parameters at a time to the device and updates them there, so the results are
bit-identical to those of the ordinary optimizer.

Megatron-core's HybridDeviceOptimizer, which updates on the CPU, is not used because of two defects in 0.16.1. It does
not refresh its fp32 copies of fp32 parameters when weights are loaded (`update_fp32_param_by_new_param` handles only
bf16 parameters), so the first step after `load_weights` restores the old weights. Without TransformerEngine the
optimizers for GPU and CPU have the same class, and loading a checkpoint leaves the GPU optimizer's state on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_NUMEL = 2**26  # parameter elements whose moments are on the device at the same time: 512 MiB of moments


class MomentOffload:
    """Keeps AdamW's moments of some parameters in host memory.

    Args:
        inner: torch's AdamW; its method `step` is replaced by that of this class.
        fraction: fraction of the parameter elements whose moments are offloaded, in the order of the parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, fraction: float) -> None:
        self.inner, self._step = inner, inner.step
        params = [param for group in inner.param_groups for param in group["params"]]
        remaining = fraction * sum(param.numel() for param in params)
        self.offloaded: set[Tensor] = set()
        for param in params:
            if remaining > 0:
                self.offloaded.add(param)
            remaining -= param.numel()
        inner.step = self.step  # type: ignore[method-assign, assignment]
        inner.offload = self  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self) -> None:
        """Run one optimizer step, chunk by chunk: the moments of a chunk are copied back to host memory before the next
        chunk is updated."""
        groups = self.inner.param_groups
        try:
            for group in groups:
                for chunk in _chunks(group["params"]):
                    self.inner.param_groups = [group | {"params": chunk}]
                    with self._on_device([param for param in chunk if param in self.offloaded]):
                        self._step()
        finally:
            self.inner.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # checkpoints read the moments in host memory

    @contextmanager
    def _on_device(self, params: list[Tensor]) -> Iterator[None]:
        """Copy the moments of these parameters to the device for the block, and back to host memory afterwards.

        All copies are on the current stream, which keeps them in order with the update.
        """
        host = {param: {name: self.inner.state[param][name] for name in MOMENTS} for param in params}
        for param, moments in host.items():
            self.inner.state[param] |= {
                name: moment.to(param.device, non_blocking=True, copy=True) for name, moment in moments.items()
            }
        yield
        for param, moments in host.items():
            for name, moment in moments.items():
                moment.copy_(self.inner.state[param][name], non_blocking=True)
            self.inner.state[param] |= moments


def offload_moments(inner: torch.optim.Optimizer, param: Tensor) -> None:
    """Move a parameter's moments to host memory if `MomentOffload` offloads this parameter.

    Call it after a reset or load of the optimizer state, which creates the moments on the parameter's device.
    """
    offload: MomentOffload | None = getattr(inner, "offload", None)
    if offload and param in offload.offloaded:
        for name in MOMENTS:
            moment = inner.state[param][name]
            host = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=torch.cuda.is_available())
            inner.state[param][name] = host.copy_(moment)


def device_tensors(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the main parameters and moments that are on the device: all except the moments that `MomentOffload` keeps
    in host memory. Step counts are left out."""
    offload: MomentOffload | None = getattr(inner, "offload", None)
    for param in (param for group in inner.param_groups for param in group["params"]):
        yield param
        if not offload or param not in offload.offloaded:
            yield from (inner.state[param][name] for name in MOMENTS)


def _chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split parameters into chunks of at most CHUNK_NUMEL elements; a larger parameter is a chunk of its own."""
    chunk: list[Tensor] = []
    for param in params:
        if chunk and sum(other.numel() for other in chunk) + param.numel() > CHUNK_NUMEL:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk
