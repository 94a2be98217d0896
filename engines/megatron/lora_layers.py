"""LoRA adapters on Megatron's column- and row-parallel linear layers, on replicated ones (MLA) and on grouped experts.

    y = W x + scale * B (A x)

An adapter is sharded as the weight W of its layer: B has W's rows, A has W's columns, and the other matrix is
replicated over the tensor-parallel ranks. Communication happens on the r-dimensional A x:

    column-parallel   A replicated, B sharded       gather A x under sequence parallelism, else all-reduce its gradient
    row-parallel      A sharded,    B replicated    reduce-scatter A x under sequence parallelism, else all-reduce it
    experts           as above                      no communication: the token dispatcher gathers inputs and sums
                                                    outputs, so only the gradient of the replicated matrix is summed

Modules are registered below `chunk.adapters`, not below their layers, so that names and checkpoints of the base weights
do not change. `engines/lora.py` selects the layers.

A checkpoint has the matrices of all adapters, without the base weights. Keys are global names, so that a checkpoint
can be loaded with other parallel sizes. The matrices of a layer's experts are one tensor [experts, ...], whether the
experts are computed one after the other or by grouped GEMMs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from penstock.engines.families import tensor_layout
from penstock.engines.lora import LoraOptions, adapter_targets, part_of_row, stored_matrix
from penstock.engines.megatron.model.gpt import PolicyModel, is_routed_expert_parameter
from penstock.engines.megatron.model.grouped_experts import StackedWeight
from penstock.engines.megatron.weights import (
    STACKED,
    global_name,
    require_activation_gradients,
    sharded_axis,
    sharding_group,
)

STACKED_LAYER = re.compile(STACKED.pattern.replace(r"\.weight", ""))


class Adapter(nn.Module):
    """The adapter of one linear layer, or of the same layer of this rank's E grouped experts.

    Args:
        layers: names of the layer in its chunk (local names): one, or one per grouped expert.
        names: the same names with layers and experts numbered over the whole model (global names).
        linear: the layer.
        options: rank and scaling.
        part_of_row: [out] for each row of the full weight the index of the Hugging Face layer to which it belongs; None
            if Megatron's layer is a single Hugging Face layer.
        sequence_parallel: whether activations between layers are split over tensor-parallel ranks.
    """

    def __init__(
        self,
        layers: Sequence[str],
        names: Sequence[str],
        linear: nn.Module,
        options: LoraOptions,
        part_of_row: Tensor | None,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        weight: Any = linear.weight
        self.layers, self.names, self.part_of_row = tuple(layers), tuple(names), part_of_row
        self.num_parts = num_parts = 1 if part_of_row is None else int(part_of_row.max()) + 1
        self.rank, self.scale, self.enabled = options.lora_rank, options.scale, True
        self.group: dist.ProcessGroup = sharding_group(f"{layers[0]}.weight")
        axis = sharded_axis(weight)
        rows, columns = weight.shape[-2:]
        self.is_column = axis is not None and axis == weight.dim() - 2
        self.is_row = axis is not None and axis == weight.dim() - 1
        is_expert = is_routed_expert_parameter(f"{layers[0]}.weight")
        # The token dispatcher, not the layer, communicates between tensor-parallel ranks.
        self.is_dispatched = is_expert or bool(getattr(linear, "explicit_expert_comm", False))
        self.sequence_parallel = sequence_parallel
        stacked = weight.shape[:-2]
        empty = partial(torch.empty, dtype=weight.dtype, device=weight.device)
        self.lora_A = nn.Parameter(empty(*stacked, num_parts * options.lora_rank, columns))
        self.lora_B = nn.Parameter(empty(*stacked, rows, options.lora_rank))
        mask = None
        if part_of_row is not None:
            mask = F.one_hot(self._shard_of_rows(part_of_row, rows), num_parts).to(weight)
        self.register_buffer("part_mask", mask, persistent=False)  # [out / ranks, parts]

        # Megatron derives from these attributes how gradients are reduced and norms are summed.
        sharded = {"lora_A": self.is_row, "lora_B": self.is_column}
        for name, param in self.named_parameters():
            if sharded[name] or (is_expert and self.group.size() == 1):
                axis = len(stacked) + (name == "lora_A") if sharded[name] else -1
                set_tensor_model_parallel_attributes(param, is_parallel=True, dim=axis, stride=1)
            if is_expert:
                param.allreduce = False  # type: ignore[attr-defined]
            elif sequence_parallel and not self.is_dispatched and not sharded[name]:
                # Megatron then sums the gradient over tensor-parallel ranks.
                param.sequence_parallel = True  # type: ignore[attr-defined]

    def _shard_of_rows(self, full: Tensor, rows: int) -> Tensor:
        """Return this rank's part of a tensor with one entry per row of the full weight."""
        if rows == len(full):
            return full
        if "linear_fc1" in self.names[0]:  # each rank has its shards of gate and up projection
            return torch.cat([part.chunk(self.group.size())[self.group.rank()] for part in full.chunk(2)])
        return full.chunk(self.group.size())[self.group.rank()]

    def forward(self, x: Tensor, ends: Tensor | None = None, output: Tensor | None = None) -> Tensor | None:
        """Return scale * B (A x), or None while the adapter is disabled. [..., in] -> [..., out / ranks]

        Args:
            x: input of the layer.
            ends: only for grouped experts: [E] the index after the last row of each expert in `x`.
            output: the layer's output. If given, the adapter's output is added to it, possibly in place, so the caller
                must use only the returned sum. While the adapter is disabled, `output` is returned.
        """
        if not self.enabled:
            return output
        if output is not None and self.group.size() == 1:
            return AddAdapter.apply(output, x, self.lora_A, self.lora_B, self.part_mask, self.scale)
        first: Tensor = self.lora_A
        second: Tensor = self.lora_B
        group = self.group
        has_ranks = group.size() > 1 and (self.is_column or self.is_row)
        if has_ranks and self.is_dispatched:  # the backward pass sums the ranks' gradients of the replicated matrix
            if self.is_column:
                first = copy_to_tensor_model_parallel_region(first, group=group)
            else:
                second = copy_to_tensor_model_parallel_region(second, group=group)
        second = _spread(second, self.part_mask)  # type: ignore[arg-type]
        low_rank = _multiply(x, first, ends)
        if has_ranks and not self.is_dispatched:
            if self.is_column and self.sequence_parallel:
                low_rank = gather_from_sequence_parallel_region(low_rank, group=group)
            elif self.is_column:
                low_rank = copy_to_tensor_model_parallel_region(low_rank, group=group)
            elif self.sequence_parallel:
                low_rank = reduce_scatter_to_sequence_parallel_region(low_rank, group=group)
            else:
                low_rank = reduce_from_tensor_model_parallel_region(low_rank, group=group)
        added = _multiply(low_rank * self.scale, second, ends)
        return added if output is None else output + added

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Initialize as PEFT does: A from U(-1 / sqrt(in), 1 / sqrt(in)), B with zeros. The values depend only on the
        seed and the layer's global name, not on the parallel layout."""
        self.lora_B.zero_()
        ranks = self.group.size() if self.is_row else 1
        for first, name in zip(self._per_expert(self.lora_A), self.names, strict=True):
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
            full = torch.rand(first.shape[0], first.shape[1] * ranks, generator=generator)
            full = (full * 2 - 1) / math.sqrt(full.shape[1])
            first.copy_(full.chunk(ranks, 1)[self.group.rank() if self.is_row else 0])

    @torch.no_grad()
    def put(self, matrices_of: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        """Copy this rank's shards from full matrices: `matrices_of` returns A and B of a layer by its global name."""
        first, second = self._per_expert(self.lora_A), self._per_expert(self.lora_B)
        for index, name in enumerate(self.names):
            full_first, full_second = matrices_of(name)
            rank, ranks = (self.group.rank(), self.group.size()) if self.is_row else (0, 1)
            first[index].copy_(full_first.chunk(ranks, 1)[rank])
            second[index].copy_(self._shard_of_rows(full_second, second[index].shape[0]))

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (local name of the layer and "lora_A" or "lora_B", this rank's shard): of each layer A, then B."""
        params = dict(self.named_parameters())
        of_layer = {kind: self._per_expert(param) for kind, param in params.items()}
        for index, layer in enumerate(self.layers):
            for kind, param in params.items():
                matrix, axis = of_layer[kind][index], sharded_axis(param)
                if axis is not None and param.dim() == 3:
                    set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=axis - 1, stride=1)
                yield f"{layer}.{kind}", matrix

    def _per_expert(self, param: Tensor) -> Sequence[Tensor]:
        return param.detach().unbind() if param.dim() == 3 else [param]


class AddAdapter(torch.autograd.Function):
    """Add scale * B (A x) to a layer's output y in place. This is one autograd function, because the many small
    operations of an adapter cost more time on the host than on the GPU."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, first: Tensor, second: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Return `output` (y, [..., out]), to which the product was added in place. x is [..., in], `first` is A
        [parts * r, in], `second` is B [out, r]; `mask` as in `_spread`."""
        rows = x.reshape(-1, x.shape[-1])
        low_rank = rows @ first.t()
        spread = _spread(second, mask)
        output.view(-1, output.shape[-1]).addmm_(low_rank, spread.t(), alpha=scale)
        ctx.save_for_backward(x, low_rank, first, spread, mask)
        ctx.scale = scale
        return output.detach()  # autograd does not accept `output` itself, which another function has returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low_rank, first, spread, mask = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        low_rank_grad = grad @ spread
        second_grad = grad.t() @ low_rank
        if ctx.scale != 1:
            low_rank_grad *= ctx.scale
            second_grad *= ctx.scale
        if mask is not None:
            second_grad = (second_grad.view(*mask.shape, -1) * mask[:, :, None]).sum(1)
        first_grad = low_rank_grad.t() @ x.reshape(-1, x.shape[-1])
        return grads[0], (low_rank_grad @ first).view(x.shape), first_grad, second_grad, None, None


def _spread(second: Tensor, mask: Tensor | None) -> Tensor:
    """Return B widened to match the stacked A matrices of the Hugging Face layers that Megatron joins: each row of B is
    at the columns of its own layer, with zeros elsewhere. [..., out, r] -> [..., out, parts * r]. `mask` [out, parts]
    is 1 where a row belongs to a layer; None: only one layer."""
    return second if mask is None else (second[..., None, :] * mask[:, :, None]).flatten(-2)


def _multiply(x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    """Return x W^T, per expert if `ends` is given."""
    return F.linear(x, weight) if ends is None else F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def add_adapters(chunks: list[PolicyModel], options: LoraOptions, seed: int) -> None:
    """Freeze all parameters of the chunks and add initialized adapters to the target layers. Call this before the
    chunks are wrapped in DistributedDataParallel."""
    shape = chunks[0].shape
    targets, layout = adapter_targets(shape, options.lora_target_modules), tensor_layout(shape)
    for chunk in chunks:
        for param in chunk.parameters():
            param.requires_grad_(False)
        adapters = nn.ModuleList()
        for name, module in chunk.named_modules():
            local = STACKED_LAYER.sub(r".mlp.experts.local_experts.0.\1", name)
            target = targets.get(global_name(chunk, local).removesuffix(".weight"))
            if target is not None:
                adapters.append(_connect_adapter(chunk, name, module, part_of_row(layout, target), options))
        chunk.adapters = adapters
        require_activation_gradients(chunk)
    reset_adapters(chunks, seed)


def _connect_adapter(chunk: PolicyModel, name: str, linear: Any, parts: Tensor | None, options: LoraOptions) -> Adapter:
    """Return the adapter of the layer `name` of a chunk, connected to the layer."""
    layers, is_stacked = [name], isinstance(linear, StackedWeight)
    if is_stacked:
        experts = range(len(linear.weight))
        layers = [STACKED_LAYER.sub(rf".mlp.experts.local_experts.{expert}.\1", name) for expert in experts]
    names = [global_name(chunk, layer) for layer in layers]
    adapter = Adapter(layers, names, linear, options, parts, bool(chunk.config.sequence_parallel))

    def add_output(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):  # Megatron's layers return (output, bias)
            return adapter(inputs[0], output=output[0]), *output[1:]
        return adapter(inputs[0], output=output)

    if is_stacked:
        linear.adapter = adapter.__call__
    else:
        linear.register_forward_hook(add_output)
    return adapter


def reset_adapters(chunks: list[PolicyModel], seed: int) -> None:
    """Initialize all adapters. Their output is then zero: the policy computes the same as its base model."""
    for adapter in (adapter for chunk in chunks for adapter in chunk.adapters):
        adapter.reset(seed)


@contextmanager
def adapters_disabled(chunks: list[PolicyModel]) -> Iterator[None]:
    """Compute with the base weights only inside the block, where only forward passes are allowed."""
    adapters = [adapter for chunk in chunks for adapter in chunk.adapters]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


Offset = tuple[int, int, int]  # axis, index of the shard, number of shards


def adapter_state(chunks: list[PolicyModel]) -> dict[str, Any]:
    """Return Megatron's sharded state dict of this rank's adapters: name of a parameter -> its ShardedTensor or, for
    the rows of gate and up projections, a factory of two ShardedTensors."""
    return {
        f"{adapter.names[0]}.{kind}": _sharded(chunk, adapter.names[0], kind, param)
        for chunk in chunks
        for adapter in chunk.adapters
        for kind, param in adapter.named_parameters()
    }


def _sharded(chunk: PolicyModel, layer: str, kind: str, param: Any) -> ShardedTensor | ShardedTensorFactory:
    """Return an adapter's parameter with its position in the full tensor, as a checkpoint stores it. `layer`: global
    name of the layer; `kind`: "lora_A" or "lora_B"."""
    is_expert, axis = is_routed_expert_parameter(f"{layer}.weight"), sharded_axis(param)
    group = sharding_group(f"{layer}.weight")
    name, expert = stored_matrix(layer, kind)
    first: list[Offset] = []
    prepended = 0
    if is_expert and param.dim() == 3:
        experts = parallel_state.get_expert_model_parallel_group()
        first = [(0, experts.rank(), experts.size())]
    elif is_expert:
        assert expert is not None and chunk.config.num_moe_experts is not None
        first, prepended = [(0, expert, chunk.config.num_moe_experts)], 1
    data_rank = (
        parallel_state.get_expert_data_parallel_rank()
        if is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    replica: ReplicaId = (0, 0 if axis is not None else group.rank(), data_rank)

    def shard(key: str, tensor: Tensor, *last: Offset) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            key, tensor, *first, *last, replica_id=replica, prepend_axis_num=prepended
        )

    if axis is None:
        return shard(name, param)
    place = axis + prepended
    if "linear_fc1" not in name:
        return shard(name, param, (place, group.rank(), group.size()))

    @torch.no_grad()
    def split(key: str, tensor: Tensor, *_: Any) -> list[ShardedTensor]:
        parts = tensor.chunk(2, axis)  # gate, up
        return [
            shard(key, part.contiguous(), (place, index * group.size() + group.rank(), 2 * group.size()))
            for index, part in enumerate(parts)
        ]

    return ShardedTensorFactory(name, param, split, lambda parts: torch.cat(parts, axis), replica)
