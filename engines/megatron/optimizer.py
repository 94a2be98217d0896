"""AdamW on Megatron-core's distributed optimizer, and the learning-rate scheduler.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import nn

from penstock.engines.megatron.model.gpt import PolicyModel
from penstock.engines.megatron.model.transformer_config import merge_overrides
from penstock.engines.megatron.optimizer_offload import OptimizerOffload, make_zero_moments
from penstock.storage.errors import OptionError

# Names of required optimizer options; lr_decay_iters is required unless lr_decay_style is constant.
ADAM = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
SCHEDULE = ("lr_decay_style", "lr_warmup_iters")
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
    """Return Megatron's distributed optimizer with AdamW, with zero moments and step counts.

    Args:
        wrapped: wrapped pipeline chunks of the model.
        config: Megatron's configuration of the model.
        options: values of the options in `ADAM` and `SCHEDULE`.
        overrides: Megatron options. With `optimizer_cpu_offload` the moments and main parameters are
            offloaded by `optimizer_offload.py`: all of them, or the fraction `optimizer_offload_fraction`.
    """
    overrides = dict(overrides)  # without the options for offloading, which would enable Megatron's own
    fraction = overrides.pop("optimizer_offload_fraction", 1.0)
    fraction = fraction if overrides.pop("optimizer_cpu_offload", False) else 0.0
    missing = [name for name in (*ADAM, *SCHEDULE) if name not in options]
    assert not missing, f"`options` lacks the optimizer options {missing}"
    fixed = {name: options[name] for name in ADAM}
    fixed |= dict(optimizer="adam", use_distributed_optimizer=True, bf16=config.bf16, params_dtype=config.params_dtype)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**merge_overrides(OptimizerConfig, {}, overrides, fixed)), wrapped
    )
    # If all experts, or all other parameters, are frozen, Megatron adds an optimizer that cannot be saved.
    optimizer.chained_optimizers = [inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # a single kernel, without temporary tensors as large as the model
    for chained in optimizer.chained_optimizers:
        if fraction and not chained.is_stub_optimizer:
            OptimizerOffload(chained, fraction)
    zero_adam_state(optimizer)
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer and chained.data_parallel_group.size() == 1:
            chained.sharded_param_state_fully_reshardable = partial(_single_rank_state_dict, chained)
        if not chained.is_stub_optimizer and not chained.optimizer.state:
            chained.state_dict = partial(_empty_state, optimizer, chained)
    for buffer in (buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        buffer.numel_unpadded = buffer.numel  # save the padding, too: offsets with and without padding are then equal
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers that Megatron's optimizer wraps."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            yield chained.optimizer


def zero_adam_state(optimizer: MegatronOptimizer) -> None:
    """Set Adam's moments and step counts of all parameters to zero."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                inner.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    **make_zero_moments(inner, param),
                }


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
    own = [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in _param_groups(optimizer)]
    optimizer.load_state_dict(state)
    for group, hyperparameters in zip(_param_groups(optimizer), own, strict=True):
        group.update(hyperparameters)
    for inner in inner_optimizers(optimizer):
        for param, param_state in inner.state.items():
            param_state["step"] = param_state["step"].to(param.device, torch.float32, copy=True)


def _param_groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return the param_groups of all inner torch optimizers."""
    return [group for inner in inner_optimizers(optimizer) for group in inner.param_groups]


def build_scheduler(optimizer: MegatronOptimizer, options: dict[str, Any]) -> OptimizerParamScheduler:
    """Return the learning-rate scheduler: linear warm-up from 0, then a constant rate, or linear or cosine decay."""
    style, warmup, decay = options["lr_decay_style"], options["lr_warmup_iters"], options.get("lr_decay_iters")
    if style == "constant":
        decay = warmup + 1  # not used
    elif decay is None or decay <= warmup:
        raise OptionError(
            f"--lr-decay-style {style} needs --lr-decay-iters greater than the {warmup} warm-up steps, but found "
            f"{decay}: set it to a number above {warmup}"
        )
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
    """Starts the parameter all-gathers of a model and waits for them; a no-op without `overlap_param_gather`."""

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

    def wait_for_all(self) -> None:
        """Wait until the parameter all-gathers of all buckets are finished."""
        _finish_all_gathers(self._buckets)

    def wait_for_module(self, module: nn.Module) -> None:
        """Wait until the weights of a module are gathered. Call this before reading the weights without calling the
        module: Megatron's hooks wait only in the module's forward call."""
        _finish_all_gathers(self._bucket_of[param] for param in module.parameters() if param in self._bucket_of)


def _finish_all_gathers(buckets: Iterable[Any]) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)
