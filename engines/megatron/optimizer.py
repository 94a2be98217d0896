"""AdamW on Megatron-core's distributed optimizer, the learning-rate scheduler, the all-gather of parameters
(`ParamGather`), and optimizer state in host memory (`OptimizerOffload`).

This module works around four defects of Megatron-core with torch's AdamW (TransformerEngine and apex are not
installed):
- AdamW has no state before its first step, and Megatron can then neither save nor load it. Workaround: create the state
  with the optimizer (`zero_adam_state`).
- After a load all parameters share one `step` tensor, which AdamW increments once per parameter, so that training
  silently diverges after a resume. Workaround: copy the tensor for each parameter (`load_moments_and_steps`).
- A checkpoint with several gradient buckets (tied embeddings over pipeline stages, or overlapped reduction) is saved
  without the padding between buckets, but parameters are looked up at offsets that include the padding. Adam's
  moments are then loaded into the wrong parameters, with only a log line. Workaround: save the padding, too
  (`numel_unpadded`).
- A pipeline stage with only dense layers has an expert optimizer without parameters, whose step count Megatron cannot
  determine, so that saving fails. Workaround: build this optimizer's state here (`_empty_state`).

`ParamGather` is the parameter all-gather after an optimizer step with Megatron's option `overlap_param_gather`: each
data-parallel rank updates its shard of the weights, and the all-gather of the other ranks' shards overlaps with the
next computation.

Megatron itself gathers a bucket of parameters only when a forward pass of the next training step needs it. Penstock
also reads weights between steps (forward-only passes, digests, snapshots, publishing), and would then silently read
stale weights. So the all-gathers of all buckets are started at the end of the optimizer step; a module's forward pass
waits for the module's bucket, and every other reader waits for all buckets.

`OptimizerOffload` keeps AdamW's moments and the fp32 main parameters of bf16 weights in host memory
(`--optimizer-cpu-offload`). A step copies the state of a few parameters at a time to the device and updates them there,
so the results are bit-identical to those of the ordinary optimizer. While a chunk of parameters is updated and copied
back to host memory, the next chunk is copied to the device, on another stream. Between steps a main parameter's device
storage has 0 bytes. Megatron's optimizer reads and writes main parameters when it loads, saves and updates weights;
`OptimizerOffload` replaces the four methods that do so.

Megatron-core's HybridDeviceOptimizer, which computes updates on the CPU, is not used because of two defects in 0.16.1.
It does not refresh its fp32 copies of fp32 parameters when weights are loaded (`update_fp32_param_by_new_param` handles
only bf16 parameters), so the first step after `load_weights` restores the old weights. Without TransformerEngine the
optimizers for GPU and CPU have the same class, and loading a checkpoint leaves the GPU optimizer's state on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from penstock.engines.families.tensor_rows import VISION
from penstock.engines.megatron.memory_plan import CHUNK_NUMEL
from penstock.engines.megatron.model.gpt import PolicyModel
from penstock.engines.megatron.model.transformer_config import merge_overrides

ADAM = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
MOMENTS = ("exp_avg", "exp_avg_sq")
HOST_NUMEL = 2**26  # fp32 elements of a host buffer: torch rounds pinned allocations up to a power of two
# Entries of an optimizer's param_groups that a loaded checkpoint must not change.
HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps", "fused")


def wrap_chunks_in_ddp(
    chunks: list[PolicyModel], config: TransformerConfig, overrides: dict[str, Any]
) -> list[DistributedDataParallel]:
    """Wrap each pipeline chunk in Megatron's DistributedDataParallel, which sums gradients over data- and
    context-parallel ranks."""
    defaults = dict(
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,  # a NaN gradient raises an error before any weight is updated
        overlap_grad_reduce=False,
    )
    # `ParamGather`, not Megatron's optimizer step, starts the parameter all-gathers
    fixed = dict(use_distributed_optimizer=True, overlap_param_gather_with_optimizer_step=False)
    ddp = DistributedDataParallelConfig(**merge_overrides(DistributedDataParallelConfig, defaults, overrides, fixed))
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]


def build_optimizer(
    wrapped: list[DistributedDataParallel],
    config: TransformerConfig,
    options: dict[str, Any],
    overrides: dict[str, Any],
) -> MegatronOptimizer:
    """Return Megatron's distributed optimizer with AdamW, with zero moments and step counts. `options` has the values
    of the options in `ADAM`, and perhaps `vision_lr`. With the Megatron option `optimizer_cpu_offload` the moments and
    main parameters are offloaded: all of them, or the fraction `optimizer_offload_fraction`."""
    overrides = dict(overrides)  # without the two offload options, which would enable Megatron's own offloading
    fraction = overrides.pop("optimizer_offload_fraction", 1.0)
    fraction = fraction if overrides.pop("optimizer_cpu_offload", False) else 0.0
    fixed = {name: options[name] for name in ADAM}
    fixed |= dict(optimizer="adam", use_distributed_optimizer=True, bf16=config.bf16, params_dtype=config.params_dtype)
    adam = OptimizerConfig(**merge_overrides(OptimizerConfig, {}, overrides, fixed))
    # Megatron finds the groups of a checkpoint by `is_decoupled_lr` and three other entries, but not by `max_lr`.
    tower = {"max_lr": options.get("vision_lr") or options["lr"], "is_decoupled_lr": True}
    groups = get_standard_config_overrides(adam) | {ParamKey(name=f"*.{VISION}*"): tower}
    optimizer = get_megatron_optimizer(adam, wrapped, groups)
    # If all experts, or all other parameters, are frozen, Megatron adds an optimizer that cannot be saved.
    optimizer.chained_optimizers = [inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            group["fused"] = True  # AdamW in a single kernel, without temporary tensors as large as the model
        if fraction:
            OptimizerOffload(chained, fraction)
    zero_adam_state(optimizer)
    for chained in optimizer.chained_optimizers:
        if chained.data_parallel_group.size() == 1:
            chained.sharded_param_state_fully_reshardable = partial(_single_rank_state_dict, chained)
        if not chained.optimizer.state:
            chained.state_dict = partial(_empty_state, optimizer, chained)
    for buffer in (buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        buffer.numel_unpadded = buffer.numel  # save the padding, too: offsets with and without padding are then equal
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers that Megatron's optimizer wraps."""
    return [chained.optimizer for chained in optimizer.chained_optimizers]


def zero_adam_state(optimizer: MegatronOptimizer) -> None:
    """Set Adam's moments and step counts of all parameters to zero."""
    for inner in inner_optimizers(optimizer):
        offload: OptimizerOffload | None = getattr(inner, "offload", None)
        for param in (param for group in inner.param_groups for param in group["params"]):
            if offload and param in offload.moments:
                moments = {name: moment.zero_() for name, moment in offload.moments[param].items()}
            else:
                moments = {name: torch.zeros_like(param) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            inner.state[param] = {"step": step, **moments}


def _single_rank_state_dict(
    optimizer: Any, model_state: dict[str, Any], *_: Any, **__: Any
) -> dict[int, dict[str, Any]]:
    """Return the sharded state dict of an optimizer on a single data-parallel rank, without copying tensors.

    This function replaces Megatron's own method, which gathers over data-parallel ranks and makes several copies in
    host memory (25 s for 0.6B parameters).
    """
    shardings = {
        sharding.data: sharding for sharding in nested_values(extract_sharded_tensors_and_factories(model_state)[0])
    }
    params = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    states: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(params):
        sharding, states[index] = shardings[param], {}
        for key, tensor in optimizer._get_main_param_and_optimizer_states(param).items():
            if key != "step":  # the step count is saved with the hyperparameters
                dtype = {"dtype": tensor.dtype} if isinstance(sharding, ShardedTensor) else {}
                data = tensor.detach().view(param.shape)
                states[index][key] = replace(sharding, key=f"optimizer.state.{key}.{sharding.key}", data=data, **dtype)
    return states


def _empty_state(optimizer: MegatronOptimizer, empty: Any) -> dict[str, Any]:
    """Return the state dict of `empty`, an inner optimizer without parameters: its param_groups with the step count of
    the other inner optimizers. On other pipeline stages this optimizer has parameters, and a load needs the step
    count."""
    inner = empty.optimizer.state_dict()
    steps = {state["step"].item() for other in inner_optimizers(optimizer) for state in other.state.values()}
    assert len(steps) == 1, f"all parameters must have the same step count, but found {steps}"
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    return {"optimizer": {"param_groups": [group | {"step": min(steps)} for group in groups]}}


def load_moments_and_steps(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load moments and step counts from a checkpoint's optimizer state; keep the learning rates and other
    hyperparameters that `optimizer` has."""
    kept = [
        [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in inner.param_groups]
        for inner in inner_optimizers(optimizer)
    ]
    optimizer.load_state_dict(state)
    for inner, own in zip(inner_optimizers(optimizer), kept, strict=True):
        for group, hyperparameters in zip(inner.param_groups, own, strict=True):
            group.update(hyperparameters)
        for param, param_state in inner.state.items():
            param_state["step"] = param_state["step"].to(param.device, torch.float32, copy=True)


def build_scheduler(optimizer: MegatronOptimizer, options: dict[str, Any]) -> OptimizerParamScheduler:
    """Return the learning-rate scheduler: linear warm-up from 0, then a constant rate, or linear or cosine decay."""
    style, warmup = options["lr_decay_style"], options["lr_warmup_iters"]
    decay = warmup + 1 if style == "constant" else options["lr_decay_iters"]  # a constant rate does not use it
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options["lr"],
        min_lr=options["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=style,
        start_wd=options["weight_decay"],
        end_wd=options["weight_decay"],
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def set_scheduler_to_step(scheduler: OptimizerParamScheduler, num_steps: int) -> None:
    """Set the learning-rate scheduler to its state after `num_steps` optimizer steps."""
    scheduler.num_steps = 0
    scheduler.step(num_steps)


class ParamGather:
    """Start the parameter all-gathers of a model, and wait for them; does nothing without `overlap_param_gather`."""

    def __init__(self, wrapped: list[DistributedDataParallel]) -> None:
        chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        for chunk in chunks:
            chunk.ddp_config.align_param_gather = True  # only `start_all` starts all-gathers
        groups = [group for chunk in chunks for group in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)]
        # Megatron lists the buckets of the last layers first.
        self._buckets = [bucket for group in groups for bucket in reversed(group)]
        self._bucket_of = {param: bucket for chunk in chunks for param, bucket in chunk.param_to_bucket_group.items()}

    def start_all(self) -> None:
        """Start the parameter all-gathers of all buckets, beginning with the first layers."""
        for bucket in self._buckets:
            bucket.start_param_sync()

    def wait(self, module: nn.Module | None = None) -> None:
        """Wait until the weights of a module are gathered, or those of all buckets. Call this before reading weights
        without calling their module: Megatron's hooks wait only in the module's forward call."""
        params = () if module is None else module.parameters()
        of_module = [self._bucket_of[param] for param in params if param in self._bucket_of]
        for bucket in self._buckets if module is None else of_module:
            if bucket.param_gather_handle is not None:
                bucket.finish_param_sync(skip_next_bucket_dispatch=True)


class OptimizerOffload:
    """Keep moments and main parameters of an optimizer in host memory. The main parameters of an fp32 model are views
    of its weights and stay on the device.

    Args:
        outer: Megatron's optimizer around torch's AdamW; methods of both are replaced by those of this class.
        fraction: fraction of the parameter elements whose state is offloaded, in the order of the parameters.
    """

    def __init__(self, outer: Any, fraction: float) -> None:
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
                    torch.cuda.current_stream().wait_stream(self._upload_stream)  # until this chunk is on the device
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
        """Return main parameter ("param"), moments and step count of a model parameter, by name. These are the tensors
        themselves, no copies; offloaded ones are in host memory."""
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
        """Copy the main parameters that are on the device to the weights; `step` has copied the offloaded main
        parameters."""
        for main, weight in self._weights.items():
            if main not in self.main_params:
                weight.copy_(main)

    @torch.no_grad()
    def update_main_params(self, state_dict: None = None) -> None:
        """Copy the weights to the main parameters."""
        assert state_dict is None, "the weights of a state dict cannot be copied to offloaded main parameters"
        for main, weight in self._weights.items():
            self.main_params.get(main, main).copy_(weight)


def optimizer_tensors_on_device(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the main parameters and moments that are on the device, not in host memory (`OptimizerOffload`)."""
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
    """Split parameters into chunks of at most CHUNK_NUMEL elements; a larger parameter becomes a separate chunk."""
    chunk: list[Tensor] = []
    for param in params:
        if chunk and sum(other.numel() for other in chunk) + param.numel() > CHUNK_NUMEL:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk
