"""AdamW on Megatron-core's distributed optimizer, and its learning-rate schedule.

Four repairs live here. torch's AdamW (TransformerEngine's and apex's are absent) has no state before its first step, and
Megatron can neither save nor load it then: the state is made at once. Loading gives every parameter the *same* `step` tensor,
which AdamW then counts up once per parameter: training diverges silently after a resume, unless they are taken apart again. And
a checkpoint of several gradient buckets (tied embeddings over pipeline stages, or overlapped reduction) leaves the padding
between them out but looks parameters up as if it were there: moments are shifted, silently but for a line in the log. And a pipeline
stage of dense layers only has an optimizer for experts without experts, of which Megatron can tell no step, so it refuses to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from engines.megatron.model import PolicyModel
from engines.megatron.offload import Offload, put_away
from engines.megatron.transformer_config import with_overrides
from storage.errors import OptionError

ADAM = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
SCHEDULE = ("lr_decay_style", "lr_warmup_iters")  # and lr_decay_iters, unless the style is constant
HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps", "fused")


def wrap(chunks: list[PolicyModel], config: TransformerConfig, overrides: dict[str, Any]) -> list[DistributedDataParallel]:
    """Give the chunks gradient buffers that are summed over data- and context-parallel ranks."""
    defaults = dict(
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,  # a NaN raises before any weight is touched
        overlap_grad_reduce=False,
    )
    fixed = dict(use_distributed_optimizer=True, overlap_param_gather_with_optimizer_step=False)  # `gather.py` sends for weights
    ddp = DistributedDataParallelConfig(**with_overrides(DistributedDataParallelConfig, defaults, overrides, fixed))
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]


def build_optimizer(
    wrapped: list[DistributedDataParallel], config: TransformerConfig, options: dict[str, Any], overrides: dict[str, Any]
) -> MegatronOptimizer:
    """AdamW with its state at zero.

    Args:
        wrapped: model chunks.
        config: the model's.
        options: `ADAM` and `SCHEDULE`.
        overrides: the user's `megatron` options. `optimizer_cpu_offload` is ours (`offload.py`), of all moments unless
            `optimizer_offload_fraction` says otherwise.

    Raises:
        OptionError: an option that cannot be honoured.
    """
    overrides = dict(overrides)
    fraction = _offload_fraction(overrides)
    missing = [name for name in (*ADAM, *SCHEDULE) if name not in options]
    assert not missing, f"optimizer options without {missing}"
    settled = {name: options[name] for name in ADAM}
    settled |= dict(optimizer="adam", use_distributed_optimizer=True, bf16=config.bf16, params_dtype=config.params_dtype)
    optimizer = get_megatron_optimizer(OptimizerConfig(**with_overrides(OptimizerConfig, {}, overrides, settled)), wrapped)
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # one kernel, no temporaries as large as the model
        if fraction:
            Offload(inner, fraction)
    reset_state(optimizer)
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer and chained.data_parallel_group.size() == 1:
            chained.sharded_param_state_fully_reshardable = partial(_whole_state, chained)
        if not chained.is_stub_optimizer and not chained.optimizer.state:
            chained.state_dict = partial(_groups_alone, optimizer, chained)
    for buffer in (buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        buffer.numel_unpadded = buffer.numel  # the third repair: padding is content, so offsets with and without it agree
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    return optimizer


def _offload_fraction(overrides: dict[str, Any]) -> float:
    """Share of the moments to be kept in host memory; its two options are taken out, since Megatron would offload itself."""
    wanted, fraction = overrides.pop("optimizer_cpu_offload", False), overrides.pop("optimizer_offload_fraction", 1.0)
    if not 0 <= fraction <= 1:
        raise OptionError(f"megatron option optimizer_offload_fraction = {fraction}: give a share between 0 and 1")
    if overrides.get("use_precision_aware_optimizer"):
        raise OptionError(
            "megatron option use_precision_aware_optimizer needs TransformerEngine's Adam, which Penstock has not: drop it"
        )
    return fraction if wanted else 0.0


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron's."""
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            yield chained.optimizer


def reset_state(optimizer: MegatronOptimizer) -> None:
    """As if no step had been made."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                inner.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
                put_away(inner, param)


def _whole_state(optimizer: Any, model_state: dict[str, Any], *_: Any, **__: Any) -> dict[int, dict[str, Any]]:
    """A checkpoint's view of the optimizer, without copies. Megatron's own gathers over data-parallel ranks, through several copies
    in host memory (25 s for 0.6B parameters); with one such rank all there is to gather is here already."""
    shardings = {sharding.data: sharding for sharding in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    params = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    return {index: _stored(optimizer, param, shardings[param]) for index, param in enumerate(params)}


def _stored(optimizer: Any, param: torch.Tensor, sharding: ShardedTensor | ShardedTensorFactory) -> dict[str, Any]:
    stored = {}
    for key, tensor in optimizer._get_main_param_and_optimizer_states(param).items():
        if key != "step":  # kept with the hyperparameters
            dtype = {"dtype": tensor.dtype} if isinstance(sharding, ShardedTensor) else {}
            data = tensor.detach().view(param.shape)
            stored[key] = replace(sharding, key=f"optimizer.state.{key}.{sharding.key}", data=data, **dtype)
    return stored


def _groups_alone(optimizer: MegatronOptimizer, empty: Any) -> dict[str, Any]:
    """What a checkpoint keeps of an optimizer without parameters: its groups, at the step of the others. Other stages' ranks read it."""
    inner = empty.optimizer.state_dict()
    steps = {state["step"].item() for other in inner_optimizers(optimizer) for state in other.state.values()}
    assert len(steps) == 1, f"parameters at steps {steps}"
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    return {"optimizer": {"param_groups": [group | {"step": min(steps)} for group in groups]}}


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Take moments and step counts from a checkpoint; hyperparameters stay those of this run."""
    own = [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in _groups(optimizer)]
    optimizer.load_state_dict(state)
    for group, hyperparameters in zip(_groups(optimizer), own, strict=True):
        group.update(hyperparameters)
    for inner in inner_optimizers(optimizer):
        for param, param_state in inner.state.items():
            param_state["step"] = param_state["step"].to(param.device, torch.float32, copy=True)
            put_away(inner, param)


def _groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    return [group for inner in inner_optimizers(optimizer) for group in inner.param_groups]


def build_scheduler(optimizer: MegatronOptimizer, options: dict[str, Any]) -> OptimizerParamScheduler:
    """Learning rate over optimizer steps: linear warm-up from 0, then constant, linear or cosine.

    Raises:
        OptionError: a decaying schedule without an end, or one that ends inside its warm-up.
    """
    style, warmup, decay = options["lr_decay_style"], options["lr_warmup_iters"], options.get("lr_decay_iters")
    if style == "constant":
        decay = warmup + 1  # not used
    elif decay is None or decay <= warmup:
        raise OptionError(
            f"--lr-decay-style {style} with {warmup} warm-up steps ends at --lr-decay-iters {decay}: give a number above {warmup}"
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


def set_schedule(scheduler: OptimizerParamScheduler, num_steps: int) -> None:
    """Move the schedule to where it is after that many optimizer steps."""
    scheduler.num_steps = 0
    scheduler.step(num_steps)
