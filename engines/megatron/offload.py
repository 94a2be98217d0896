"""AdamW's moments in host memory: two thirds of an optimizer's bytes are away from the GPU while a model computes.

They visit it a few parameters at a time, during the step, so every bit is what the ordinary optimizer's would be. Megatron-core's
HybridDeviceOptimizer, which steps on the CPU, was read and left out: in 0.16.1 its fp32 copies never hear of newly loaded weights
(`update_fp32_param_by_new_param` knows only those of bf16 parameters), so the first step after `load_weights` brings the old ones
back; and without TransformerEngine, where the GPU's and the CPU's optimizer are one class, loading leaves the GPU's state on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
PART = 2**26  # numbers whose moments are on the device together: 512 MiB of them


class Offload:
    """Keeps moments of one of torch's optimizers away from its device.

    Args:
        inner: AdamW; its `step` is replaced.
        fraction: of its parameters' numbers, the first ones, whose moments are kept away.
    """

    def __init__(self, inner: torch.optim.Optimizer, fraction: float) -> None:
        self.inner, self._step = inner, inner.step
        params = [param for group in inner.param_groups for param in group["params"]]
        left = fraction * sum(param.numel() for param in params)
        self.away: set[Tensor] = set()
        for param in params:
            if left > 0:
                self.away.add(param)
            left -= param.numel()
        inner.step = self.step  # type: ignore[method-assign, assignment]
        inner.offload = self  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self) -> None:
        """One step, part by part; a part's moments are back in host memory when the next begins."""
        groups = self.inner.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.inner.param_groups = [group | {"params": part}]
                    with self._visiting([param for param in part if param in self.away]):
                        self._step()
        finally:
            self.inner.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a checkpoint reads them from the host

    @contextmanager
    def _visiting(self, params: list[Tensor]) -> Iterator[None]:
        """Inside, their moments are on the device. All in one stream, so nothing has to wait."""
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


def put_away(inner: torch.optim.Optimizer, param: Tensor) -> None:
    """After a parameter's state was made anew, by a reset or by a load. Both make it beside the parameter, a load for all at once."""
    offload: Offload | None = getattr(inner, "offload", None)
    if offload and param in offload.away:
        inner.state[param] |= {name: _in_host_memory(inner.state[param][name]) for name in MOMENTS}


def _in_host_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available()).copy_(tensor)


def _parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for param in params:
        if part and sum(other.numel() for other in part) + param.numel() > PART:
            yield part
            part = []
        part.append(param)
    if part:
        yield part
