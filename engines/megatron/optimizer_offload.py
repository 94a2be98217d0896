"""Keep AdamW's moments and the fp32 main parameters of bf16 weights in host memory (`--optimizer-cpu-offload`).

A step copies the state of a few parameters at a time to the device and updates them there, so the results are
bit-identical to those of the ordinary optimizer. While a chunk of parameters is updated and copied back to host memory,
the next chunk is copied to the device, on another stream.

Between steps a main parameter's device storage has 0 bytes. Megatron's optimizer reads and writes main parameters when
it loads, saves and updates weights; `OptimizerOffload` replaces the four methods that do so.

Megatron-core's HybridDeviceOptimizer, which computes updates on the CPU, is not used because of two defects in 0.16.1.
It does not refresh its fp32 copies of fp32 parameters when weights are loaded (`update_fp32_param_by_new_param` handles
only bf16 parameters), so the first step after `load_weights` restores the old weights. Without TransformerEngine the
optimizers for GPU and CPU have the same class, and loading a checkpoint leaves the GPU optimizer's state on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from penstock.engines.megatron.memory_plan import CHUNK_NUMEL

MOMENTS = ("exp_avg", "exp_avg_sq")
HOST_NUMEL = 2**26  # fp32 elements of a host buffer: torch rounds pinned allocations up to a power of two


class OptimizerOffload:
    """Keeps moments and main parameters of an optimizer in host memory. The main parameters of an fp32 model are views
    of its weights and stay on the device.

    Args:
        outer: Megatron's optimizer around torch's AdamW. Methods of both are replaced by those of this class.
        fraction: fraction of the parameter elements whose state is offloaded, in the order of the parameters.
    """

    def __init__(self, outer: DistributedOptimizer, fraction: float) -> None:
        self.inner: torch.optim.Optimizer = outer.optimizer
        params = [param for group in self.inner.param_groups for param in group["params"]]
        remaining = fraction * sum(param.numel() for param in params)
        offloaded = []
        for param in params:
            if remaining > 0:
                offloaded.append(param)
            remaining -= param.numel()
        buffers = [iter(_host_tensors(offloaded)) for _ in MOMENTS]
        self.moments = {param: {name: next(buffer) for name, buffer in zip(MOMENTS, buffers)} for param in offloaded}
        # main parameter -> the same elements of the bf16 weights, a view of Megatron's buffer
        self._weights: dict[Tensor, Tensor] = {
            main: weight
            for mains, weights in zip(outer.shard_fp32_from_float16_groups, outer.shard_float16_groups)
            for main, weight in zip(mains, weights)
        }
        mains = [param for param in offloaded if param in self._weights]
        self.main_params = dict(zip(mains, _host_tensors(mains)))
        for param, host in self.main_params.items():
            host.copy_(param)
            param.untyped_storage().resize_(0)
        self._upload_stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._download_stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._replace_methods(outer)

    def _replace_methods(self, outer: Any) -> None:
        inner: Any = self.inner
        self._step, self._load_state_dict = inner.step, inner.load_state_dict
        self._read_state = outer._get_main_param_and_optimizer_states
        inner.step, inner.load_state_dict, inner.offload = self.step, self.load_state_dict, self
        outer._get_main_param_and_optimizer_states = self.read_state
        outer._set_main_param_and_optimizer_states = self.write_state
        outer._copy_main_params_to_model_params = self.update_weights
        outer._copy_model_params_to_main_params = self.update_main_params

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Run one optimizer step, chunk by chunk, and update the weights of the offloaded main parameters."""
        groups = self.inner.param_groups
        chunks = [(group, chunk) for group in groups for chunk in _split_params(group["params"])]
        try:
            for index, (group, chunk) in enumerate(chunks):
                if index > 0:
                    self._release(chunks[index - 1][1])
                else:
                    self._upload(chunk)
                if self._upload_stream is not None:
                    torch.cuda.current_stream().wait_stream(self._upload_stream)  # this chunk is on the device
                if index + 1 < len(chunks):
                    self._upload(chunks[index + 1][1])
                self.inner.param_groups = [group | {"params": chunk}]
                self._step()
                self._download(chunk)
            for _, chunk in chunks[-1:]:
                self._release(chunk)
        finally:
            self.inner.param_groups = groups

    def _upload(self, chunk: list[Tensor]) -> None:
        """Start to copy the state of a chunk to the device."""
        for param in chunk:
            if param in self.main_params:
                param.untyped_storage().resize_(param.numel() * param.element_size())
            if param in self.moments:
                self.inner.state[param] |= {name: torch.empty_like(param) for name in MOMENTS}
        with on_stream(self._upload_stream):
            for on_device, on_host in self._device_host_pairs(chunk):
                on_device.copy_(on_host, non_blocking=True)

    def _download(self, chunk: list[Tensor]) -> None:
        """Update the weights of a chunk, and start to copy its state to host memory."""
        for param in chunk:
            if param in self.main_params:
                self._weights[param].copy_(param)
        with on_stream(self._download_stream):
            for on_device, on_host in self._device_host_pairs(chunk):
                on_host.copy_(on_device, non_blocking=True)

    def _release(self, chunk: list[Tensor]) -> None:
        """Wait until the state of a chunk is in host memory, and free its device memory."""
        if self._download_stream is not None:
            self._download_stream.synchronize()
        for param in chunk:
            if param in self.main_params:
                param.untyped_storage().resize_(0)
            if param in self.moments:
                self.inner.state[param] |= self.moments[param]

    def _device_host_pairs(self, chunk: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the offloaded tensors of a chunk whose state is on the device: (on device, in host memory)."""
        for param in chunk:
            if param in self.main_params:
                yield param, self.main_params[param]
            if param in self.moments:
                yield from ((self.inner.state[param][name], self.moments[param][name]) for name in MOMENTS)

    # ---- reading and writing between steps ---------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict into the torch optimizer, except for moments in host memory, which torch would move to the
        device. Megatron sets those moments from the checkpoint afterwards (`write_state`)."""
        params = [param for group in self.inner.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if param in self.moments:
                state["state"][index] = {"step": state["state"][index]["step"]}
        self._load_state_dict(state)
        for param, moments in self.moments.items():
            self.inner.state[param] |= moments

    def read_state(self, model_param: Tensor) -> dict[str, Tensor]:
        """Return main parameter ("param"), moments and step count of a model parameter: the tensors themselves, in host
        memory if they are offloaded."""
        state: dict[str, Tensor] = self._read_state(model_param)
        return state | {"param": self.main_params.get(state["param"], state["param"])}

    @torch.no_grad()
    def write_state(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        """Set main parameter and moments of a model parameter to the values in `tensors`."""
        state = self.read_state(model_param)
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    @torch.no_grad()
    def update_weights(self) -> None:
        """Copy the main parameters on the device to the weights; `step` has already copied the offloaded ones."""
        for main, weight in self._weights.items():
            if main not in self.main_params:
                weight.copy_(main)

    @torch.no_grad()
    def update_main_params(self, state_dict: None = None) -> None:
        """Copy the weights to the main parameters."""
        assert state_dict is None, "the weights of a state dict cannot be copied to offloaded main parameters"
        for main, weight in self._weights.items():
            self.main_params.get(main, main).copy_(weight)


def main_param(inner: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Return a main parameter, or its copy in host memory if it is offloaded."""
    offload: OptimizerOffload | None = getattr(inner, "offload", None)
    return offload.main_params.get(param, param) if offload else param


def make_zero_moments(inner: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return moments of zero for a parameter, in host memory if they are offloaded."""
    offload: OptimizerOffload | None = getattr(inner, "offload", None)
    if offload and param in offload.moments:
        return {name: moment.zero_() for name, moment in offload.moments[param].items()}
    return {name: torch.zeros_like(param) for name in MOMENTS}


def optimizer_tensors_on_device(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the main parameters and moments that `OptimizerOffload` does not keep in host memory."""
    offload: OptimizerOffload | None = getattr(inner, "offload", None)
    for param in (param for group in inner.param_groups for param in group["params"]):
        if not offload or param not in offload.main_params:
            yield param
        if not offload or param not in offload.moments:
            yield from (inner.state[param][name] for name in MOMENTS)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on a stream, after all earlier work of the current stream; without CUDA, just run it."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _host_tensors(params: list[Tensor]) -> list[Tensor]:
    """Return a tensor in host memory for each parameter, fp32 of the same shape, pinned if there is a GPU. Small
    tensors are views of common buffers."""
    pinned, tensors = torch.cuda.is_available(), []
    buffer, remaining = torch.empty(0), sum(param.numel() for param in params)
    for param in params:
        if len(buffer) < param.numel():
            buffer = torch.empty(max(param.numel(), min(remaining, HOST_NUMEL)), pin_memory=pinned)
        tensors.append(buffer[: param.numel()].view(param.shape))
        buffer, remaining = buffer[param.numel() :], remaining - param.numel()
    return tensors


def _split_params(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split parameters into chunks of at most CHUNK_NUMEL elements; a larger parameter is a chunk of its own."""
    chunk: list[Tensor] = []
    for param in params:
        if chunk and sum(other.numel() for other in chunk) + param.numel() > CHUNK_NUMEL:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk
