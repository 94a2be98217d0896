"""Routed experts as two stacked weights, which grouped GEMMs multiply with the tokens of all experts at once, and the
dispatch of tokens to them. Used with Megatron's option `moe_grouped_gemm`.

Megatron-core's `SequentialMLP` multiplies one expert after the other; its grouped variants need TransformerEngine or
the package grouped_gemm. Here torch's `grouped_mm` multiplies all experts: in one kernel on a Hopper GPU, in a loop on
a CPU. Checkpoints are the same as those of `SequentialMLP`.

Tokens are gathered in the order of their experts and summed again with fixed index tables, so results are
deterministic. Without expert parallelism no step waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel import CheckpointWithoutOutput, all_to_all, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn

FC1, FC2 = "linear_fc1.weight", "linear_fc2.weight"


class StackedWeight(nn.Module):
    """The weights of this rank's E experts for one projection, [E, out, in]."""

    def __init__(self, num_experts: int, size_out: int, size_in: int, sharded_axis: int, config: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(num_experts, size_out, size_in, dtype=config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=sharded_axis, stride=1)
        self.adapter: Callable[[Tensor, Tensor], Tensor | None] | None = None  # see `lora_layers.py`

    def multiply(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return x W^T of each row's expert, plus the output of its adapter. The rows are sorted by expert; `ends` [E]
        has the index after the last row of each expert. [n, in] -> [n, out]"""
        out = F.grouped_mm(x, self(), offs=ends)
        added = self.adapter(x, ends) if self.adapter is not None else None
        return out if added is None else out + added

    def forward(self) -> Tensor:
        """Return the weights as `grouped_mm` takes them, [E, in, out]. They are read by a call of the module, because
        Megatron's hook then waits for the all-gather of the weights (`--overlap-param-gather`)."""
        return self.weight.transpose(1, 2)


class GroupedExperts(MegatronModule):
    """This rank's E routed experts with SwiGLU: fc2(silu(gate) * up * router weight), [gate, up] = fc1(token)."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config)
        self.expert_group, self.tensor_group = pg_collection.ep, pg_collection.expt_tp
        self.data_group = pg_collection.expt_dp
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        ffn, hidden = config.moe_ffn_hidden_size // self.tensor_group.size(), config.hidden_size
        self.num_local_experts = num_local_experts
        self.linear_fc1 = StackedWeight(num_local_experts, 2 * ffn, hidden, 1, config)
        self.linear_fc2 = StackedWeight(num_local_experts, hidden, ffn, 2, config)
        if config.perform_initialization:  # on GPUs, every expert-parallel rank draws different random numbers
            tracker, name = get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
            with nullcontext() if config.use_cpu_initialization else tracker.fork(name):
                for fc1, fc2 in zip(self.linear_fc1.weight.detach(), self.linear_fc2.weight.detach()):
                    config.init_method(fc1)
                    config.output_layer_init_method(fc2)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, router_weights: Tensor) -> tuple[Tensor, None]:
        """Return the outputs of the experts, multiplied by the router's weights, fp32. The tokens are sorted by expert.
        [n, H], [E], [n] -> [n, H]"""
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_up = self.linear_fc1.multiply(tokens, ends)
        recomputation = CheckpointWithoutOutput() if self.recomputes_activation else None
        activate = self._activate if recomputation is None else partial(recomputation.checkpoint, self._activate)
        activated = activate(gate_up, router_weights[:, None])
        out = self.linear_fc2.multiply(activated, ends)
        if recomputation is not None:
            recomputation.discard_output_and_register_recompute(out)
        return out, None

    def _activate(self, gate_up: Tensor, router_weights: Tensor) -> Tensor:
        """Return silu(gate) * up * router weight. [n, 2 * ffn] -> [n, ffn]"""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(gate_up, None, router_weights, self.config.activation_func_fp8_input_store)
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up * router_weights).to(gate_up.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as `SequentialMLP` saves them: one tensor [..., all experts, out, in] per projection, with
        one chunk per expert, and gate and up projection as two chunks. `sharded_offsets`: (axis, index, number) of each
        axis before the experts' axis, in Megatron's format."""
        axis = len(sharded_offsets)  # index of the axis of the experts
        first_expert = self.expert_group.rank() * self.num_local_experts
        num_experts = self.expert_group.size() * self.num_local_experts
        rank, ranks = self.tensor_group.rank(), self.tensor_group.size()
        replica = (0, 0, self.data_group.rank())

        @torch.no_grad()
        def split(num_parts: int, part_axis: int, key: str, tensor: Tensor, *_: Any) -> list[ShardedTensor]:
            sharded = []
            for expert, weight in enumerate(tensor, start=first_expert):
                for index, part in enumerate(weight.chunk(num_parts)):
                    place = (part_axis, index * ranks + rank, num_parts * ranks)
                    offsets = (*sharded_offsets, (axis, expert, num_experts), place)
                    sharded.append(
                        ShardedTensor.from_rank_offsets(
                            key, part, *offsets, replica_id=replica, prepend_axis_num=axis + 1
                        )
                    )
            return sharded

        split_fc1, split_fc2 = partial(split, 2, axis + 1), partial(split, 1, axis + 2)  # fc1: gate, up
        key, fc1, fc2 = f"{prefix}experts.", self.linear_fc1.weight, self.linear_fc2.weight
        return {
            prefix + FC1: ShardedTensorFactory(
                key + FC1, fc1, split_fc1, lambda parts: torch.cat(parts).view(fc1.shape), replica
            ),
            prefix + FC2: ShardedTensorFactory(key + FC2, fc2, split_fc2, torch.stack, replica),
        }


class TokenDispatcher(MoETokenDispatcher):
    """Send each token to its top-k experts, and sum the experts' outputs.

    The methods are the steps of Megatron's `MoELayer`, in their order. Every token must have exactly top-k experts.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = config.num_moe_experts // self.ep_size

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of each of the n tokens [..., H] for each of its experts, [n * top_k, H], and the weight of the
        expert's output, [n * top_k], both sorted by expert. `routing_map` (which experts are selected) and `probs`
        (their weights) are [n, experts]."""
        self.shape, top_k = tokens.shape, self.config.moe_router_topk
        num_tokens = routing_map.shape[0]
        pairs = torch.nonzero_static(routing_map.T.flatten(), size=num_tokens * top_k)[:, 0]  # expert * n + token
        self.token_of = pairs % num_tokens
        # The copies of each token, in the order of the experts, so that sums are deterministic.
        self.copies_of = self.token_of.argsort(stable=True).view(num_tokens, top_k)
        self.tokens_per_expert = routing_map.sum(dim=0)
        copies = TakeRows.apply(tokens.reshape(num_tokens, -1), self.token_of, self.copies_of)
        return copies, probs.T.flatten()[pairs]

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the copies to the expert-parallel ranks that have their experts, and receive the copies for this rank's
        experts, sorted by sending rank, then by expert. [n * top_k, H] -> [m, H]"""
        if self.ep_size == 1:
            return hidden_states, probs
        num_experts = self.tokens_per_expert.shape[0]
        counts = torch.empty(self.ep_size * num_experts, dtype=torch.long, device=probs.device)
        dist.all_gather_into_tensor(counts, self.tokens_per_expert, group=self.ep_group)
        counts = counts.view(self.ep_size, self.ep_size, -1)  # [sender, receiver, expert of the receiver]
        rank = self.ep_group.rank()
        self.received = counts[:, rank]  # [sender, local expert]
        sizes = counts.sum(dim=2).tolist()  # waits for the GPU: NCCL needs the sizes
        self.num_sent, self.num_received = sizes[rank], [row[rank] for row in sizes]
        counts_of_ranks = self.num_received, self.num_sent
        copies = all_to_all(self.ep_group, hidden_states, *counts_of_ranks)
        return copies, all_to_all(self.ep_group, probs, *counts_of_ranks)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the received copies by expert; return them, their number per expert, and their weights."""
        if self.ep_size == 1:
            return hidden_states, self.tokens_per_expert, probs
        experts = torch.arange(self.num_local_experts, device=probs.device).repeat(self.ep_size)
        of_row = experts.repeat_interleave(self.received.flatten(), output_size=probs.shape[0])
        self.order = of_row.argsort(stable=True)
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(len(self.order), device=probs.device)
        sorted_states = TakeRows.apply(hidden_states, self.order, self.inverse)
        return sorted_states, self.received.sum(dim=0), TakeRows.apply(probs, self.order, self.inverse)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Undo `dispatch_postprocess`. [m, H]"""
        if self.ep_size == 1:
            return hidden_states
        received = TakeRows.apply(hidden_states, self.inverse, self.order)
        del self.order, self.inverse, self.received
        return received

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Undo `token_dispatch`. [m, H] -> [n * top_k, H]"""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self.num_sent, self.num_received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the outputs of each token's experts. [n * top_k, H] -> [..., H]"""
        summed = TakeRows.apply(hidden_states, self.copies_of, self.token_of).view(self.shape)
        del self.token_of, self.copies_of, self.tokens_per_expert
        return summed


class TakeRows(torch.autograd.Function):
    """Return `take_rows(x, rows)`; the gradient is `take_rows(grad, back)`, where `back` is the reverse of `rows`.

    To copy rows: `rows` [n * k] has the index in x of each row of the result, and `back` [n, k] the indices of the
    copies of each row of x. To sum the copies of each row, in this order: exchange `rows` and `back`. To permute rows:
    `rows` is a permutation and `back` its inverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return take_rows(x, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return take_rows(grads[0], ctx.saved_tensors[0]), None, None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of x with the indices `rows` [n], or for `rows` [n, k] sums of k rows of x each, accumulated in
    fp32 in one kernel. [m, H] -> [n, H]"""
    return x.index_select(0, rows) if rows.dim() == 1 else F.embedding_bag(rows, x, mode="sum")
