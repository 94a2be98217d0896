"""One rank of a Megatron-core trainer: the model, its gradients, the optimizer and the learning-rate scheduler.

`MegatronEngine` does not depend on samples, losses or rollouts: `stages/train/step.py` passes packed micro-batches and
a loss function of hidden states. Micro-batches ("packs") have no padding; `packing.py` adds the padding that tensor and
context parallelism need, and the engine removes it before the loss.

Contract of the loss function:

    loss_fn(hidden, head, packed) -> (loss, outputs)

    hidden    [r, H] final hidden states. r is the number of tokens of the pack, except under context parallelism, where
              a rank has only some of the tokens: `loss_token_slice(packed)` returns which.
    head      maps rows of hidden states to logits, or to values if the engine's role is "value".
    packed    the packed micro-batch that the caller passed.
    loss      scalar tensor, or None in a forward-only pass.
    outputs   dictionary of detached values, which `forward_backward` returns.

Gradients are plain sums over micro-batches and over data- and context-parallel ranks; Megatron divides neither by the
number of micro-batches nor by the world size. So `loss_fn` must return this micro-batch's part of the step's loss, with
denominators of the whole step: the loss of the step is the sum of the losses of all micro-batches on all data- and
context-parallel ranks. Every tensor-parallel rank computes the same loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from penstock.engines.families.shape import ModelShape
from penstock.engines.lora import LoraOptions
from penstock.engines.megatron.model.attention_kernel import (
    FA4,
    choose_attention_kernel,
    prepare_fa4,
    torch_attention_kernel,
)
from penstock.engines.megatron.model.expert_routing import RoutingRecord, StreamRouting
from penstock.engines.megatron.model.gpt import PolicyModel, ValueModel, build_model
from penstock.engines.megatron.packing import EnginePack, PackedStream, pack_stream
from penstock.engines.megatron.parallel import DEFAULT_SEED, ParallelLayout, device, device_name, peak_flops
from penstock.engines.megatron.patches import MEGATRON_VERSION, has_transformer_engine

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from penstock.engines.megatron import weights
from penstock.engines.megatron.checkpoints.torch_dist import RankState
from penstock.engines.megatron.lora_layers import adapters_disabled, add_adapters, put_adapters
from penstock.engines.megatron.optimizer import (
    ParamGather,
    build_optimizer,
    build_scheduler,
    wrap_chunks_in_ddp,
    zero_adam_state,
)
from penstock.engines.megatron.residency import DeviceMemory
from penstock.engines.memory import MemorySwitch, StateKind
from penstock.storage.errors import LayoutError

OutputHead = Callable[[Tensor], Tensor]
LossFunction = Callable[[Tensor, OutputHead, Any], tuple[Tensor | None, dict[str, Any]]]
Routing = Literal["record", "replay"]


class MegatronEngine:
    """One rank of a model and its optimizer. Create it after `init_parallel`.

    Every method is collective (all ranks must call it) unless its docstring says otherwise.

    Several engines of one process (actor and critic) share process groups and RNG states. Every engine's checkpoint
    contains the RNG states, and the last `load` sets them. With dropout 0 the RNGs are not used after weight
    initialization, so the states are the same in all checkpoints.

    Args:
        shape: shape of the model.
        layout: parallel sizes, the same as passed to `init_parallel`.
        dtype: dtype of weights and computation. Optimizer states are fp32 in either case, and so are gradient buffers,
            unless the option grad_reduce_in_fp32 is False: then they have the dtype of the weights.
        optimizer: values of lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad, lr_decay_style,
            lr_warmup_iters and, unless lr_decay_style is constant, lr_decay_iters; optionally `frozen`, the global
            names of the parameters that are not trained, or `lora`, the `LoraOptions` of adapters, which are then the
            only trained parameters.
        overrides: user-defined `megatron` options (fields of Megatron's dataclasses).
        seed: seed of the random initial weights.
        role: "policy": `head` maps hidden states [n, H] to the logits of this rank's vocabulary shard. "value": a
            critic, whose `head` maps them to float32 values [n, 1], the same on every tensor-parallel rank.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout | None = None,
        *,
        dtype: Literal["fp32", "bf16"],
        optimizer: dict[str, Any],
        overrides: dict[str, Any] | None = None,
        seed: int = DEFAULT_SEED,
        role: Literal["policy", "value"] = "policy",
    ) -> None:
        self.shape, self.layout, self.dtype = shape, layout or ParallelLayout(), dtype
        self.role, self.device = role, device()
        overrides = dict(overrides or {})
        self.attention_kernel = choose_attention_kernel(overrides.pop("attention_backend", None), dtype, shape)
        if self.attention_kernel == "fa4":
            prepare_fa4()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)  # for weights that are drawn on a GPU
        chunk_class = partial(ValueModel, seed=seed) if role == "value" else PolicyModel
        self.chunks = build_model(shape, self.layout, dtype, overrides, chunk_class)
        self.lora: LoraOptions | None = optimizer.get("lora")
        self._base_hashes: dict[str, str] = {}  # of the frozen base of adapters
        if self.lora is not None:
            add_adapters(self.chunks, self.lora, seed)
        weights.freeze_parameters(self.chunks, optimizer.get("frozen", ()))
        self.config = self.chunks[0].config  # shared by all chunks
        self.wrapped = wrap_chunks_in_ddp(self.chunks, self.config, overrides)
        self._param_gather = ParamGather(self.wrapped)
        self.optimizer = build_optimizer(self.wrapped, self.config, optimizer, overrides)
        self.scheduler = build_scheduler(self.optimizer, optimizer)
        adapter_seed = None if self.lora is None else seed
        self._state = RankState(shape, self.layout, role, self.chunks, self.optimizer, self.scheduler, adapter_seed)
        self._memory = DeviceMemory(role, self.wrapped, self.optimizer)

        # Megatron's pipeline schedules read these functions from the model's configuration.
        self.config.grad_scale_func = self.optimizer.scale_loss
        # num_tokens=None: Megatron must not divide gradients by the number of tokens; the loss function normalizes.
        self.config.finalize_model_grads_func = lambda model, num_tokens=None, **options: finalize_model_grads(
            model, None, **options
        )
        if self.wrapped[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    # ---- position in the layout --------------------------------------------------------------------------------------

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Return (rank, size) of the data-parallel group, whose ranks process different micro-batches."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Return the tensor-parallel process group, over which the vocabulary of the logits is sharded; None if its
        size is 1."""
        return parallel_state.get_tensor_model_parallel_group() if self.layout.tensor > 1 else None

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Return the context-parallel process group, over which the tokens of a micro-batch are split; None if its size
        is 1."""
        return parallel_state.get_context_parallel_group() if self.layout.context > 1 else None

    @property
    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of this rank's GPU, or None if unknown (see `parallel.py`)."""
        return peak_flops(self.dtype)

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank is in the last pipeline stage, which computes the loss."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def loss_token_slice(self, packed: EnginePack) -> slice | None:
        """Return the tokens of the micro-batch whose hidden states this rank's loss function gets; None: all. Not
        collective."""
        return self._stream_of(packed).pack_slice if self.layout.context > 1 else None

    def pack_stream(self, packed: EnginePack) -> PackedStream:
        """Return the tokens of a micro-batch that this rank processes, padded and split, on the device. Kept in
        `packed.stream`, they need not be copied again in every pass, which would wait for the GPU. Not collective."""
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        tensor = self.layout.tensor if self.config.sequence_parallel else 1
        return pack_stream(packed, self.device, tensor, size, rank, self.attention_kernel)

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._memory.require_on_device("gradients")
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(
        self,
        microbatches: Sequence[EnginePack],
        loss_fn: LossFunction,
        *,
        forward_only: bool = False,
        routing: Routing | None = None,
    ) -> list[dict[str, Any]]:
        """Run forward and backward passes of micro-batches, then all-reduce the gradients.

        Args:
            microbatches: the same number on every rank, and the same micro-batches on the tensor-, context- and
                pipeline-parallel ranks of a replica.
            loss_fn: see the docstring of this file.
            forward_only: whether to skip the backward passes; `loss_fn` may then return None as the loss.
            routing: routing mode of MoE layers. None: the routers select the experts. "replay": the expert ids in
                `packed.routing` (a `RoutingRecord` or None) are used; for layers and tokens without a record the
                routers select. "record": like "replay", and the ids that were used are added to `packed.routing`.

        Returns:
            the outputs of `loss_fn` for each micro-batch, in order, on the last pipeline stage; [] on other stages.
        """
        assert microbatches, "forward_backward needs at least one micro-batch"
        self._memory.require_on_device("weights", *(() if forward_only else ("gradients",)))
        if self.layout.virtual_pipeline and len(microbatches) % self.layout.pipeline:
            raise LayoutError(
                f"found {len(microbatches)} micro-batches, but --virtual-pipeline-model-parallel-size needs a multiple "
                f"of the {self.layout.pipeline} pipeline stages: pass such a number, or drop the option"
            )
        iterators = [iter(microbatches) for _ in self.wrapped]
        with torch.no_grad() if forward_only else nullcontext():
            outputs = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, loss_fn, routing),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped,
                num_microbatches=len(microbatches),
                seq_length=1,  # not used: pipeline stages communicate the lengths, which vary
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return outputs if self.is_last_stage else []

    def _forward_step(
        self, loss_fn: LossFunction, routing: Routing | None, microbatches: Iterator[Any], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        packed = next(microbatches)
        stream = self._stream_of(packed)
        if routing is not None:
            if packed.routing is None:
                packed.routing = RoutingRecord(len(packed.token_ids))
            stream.routing = StreamRouting(
                packed.routing, self._router_token_indices(stream), recording=routing == "record"
            )
        hidden = chunk(stream)
        if chunk.module.post_process:
            self._param_gather.wait_for_module(chunk.module.output_layer)  # `head` reads its weight directly

        def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if stream.num_tokens < len(hidden):
                hidden = hidden[: stream.num_tokens]
            loss, outputs = loss_fn(hidden, chunk.module.head, packed)
            if loss is None:
                loss = hidden.new_zeros(())
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), outputs

        return hidden, compute_loss

    def _stream_of(self, packed: EnginePack) -> PackedStream:
        """Return the stream of a micro-batch for one pass, which adds RoPE and routing to it: a shallow copy."""
        return replace(self.pack_stream(packed) if packed.stream is None else packed.stream)

    def _router_token_indices(self, stream: PackedStream) -> Tensor | None:
        """Return the index in the micro-batch of each token that this rank's MoE routers process, -1 for padding; None:
        all tokens, in order. [t / sequence-parallel ranks], on the CPU"""
        ranks = self.layout.tensor if self.config.sequence_parallel else 1
        if ranks == self.layout.context == 1:
            return None
        rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
        return stream.router_rows(rank, ranks)

    def optimizer_step(self, num_scheduler_steps: int = 1) -> tuple[bool, float]:
        """Clip the gradients, update the weights, and advance the learning-rate scheduler by `num_scheduler_steps`.

        Returns:
            whether the weights were updated, and the gradient norm before clipping.
        """
        self._memory.require_on_device("weights", "gradients", "optimizer")
        updated, grad_norm, _ = self.optimizer.step()
        self.optimizer.zero_grad()  # frees the fp32 copies of bf16 gradients; the gradient buffers are not changed
        self._param_gather.start_all()
        if updated:
            self.scheduler.step(num_scheduler_steps)
        return bool(updated), float(grad_norm)

    def reset_optimizer_states(self) -> None:
        """Set Adam's moments and step counts to zero. Not collective."""
        self._memory.require_on_device("optimizer")
        zero_adam_state(self.optimizer)

    @property
    def lr(self) -> float:
        """Return the learning rate of the next optimizer step."""
        return self.optimizer.param_groups[0]["lr"]

    # ---- weights and checkpoints -------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the global name and the full tensor of every weight (see `weights.named_weights`)."""
        return weights.named_weights(self._synced_chunks())

    def gather_weights(self) -> weights.GatheredWeights:
        """Return shapes, dtypes and full tensors of all weights (see `weights.gather_weights`)."""
        return weights.gather_weights(self._synced_chunks())

    def named_adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield layer, A and B of every adapter (see `weights.named_adapters`)."""
        return weights.named_adapters(self._synced_chunks())

    def digest(self) -> dict[str, str]:
        """Return a hash of each of this rank's weight shards, by name (see `weights.hash_weights`). Not collective.

        The frozen base of adapters is hashed once after it is loaded.
        """
        chunks = self._synced_chunks()
        if self.lora is None:
            return weights.hash_weights(chunks)
        self._base_hashes = self._base_hashes or weights.hash_weights(chunks)
        return self._base_hashes | weights.hash_adapters(chunks)

    def optimizer_state_digest(self) -> dict[str, str]:
        """Return hashes of this rank's optimizer, learning-rate scheduler and RNG states (see `RankState.digest`). Not
        collective."""
        self._require_on_device_and_gathered("weights", "optimizer")
        return self._state.digest()

    def snapshot_weights(self) -> weights.Snapshot:
        """Copy this rank's weight shards to host memory, for `using_weights`. Not collective."""
        return weights.copy_weights_to_host(self._synced_chunks())

    @contextmanager
    def using_weights(self, snapshot: weights.Snapshot) -> Iterator[None]:
        """Make the model use a snapshot's weights, without adapters, inside the block, where only forward passes are
        allowed.

        The values are swapped: inside the block the snapshot holds the model's own weights.
        """
        weights.swap_weights(self._synced_chunks(), snapshot)
        try:
            with adapters_disabled(self.chunks):
                yield
        finally:
            weights.swap_weights(self.chunks, snapshot)

    def using_base_weights(self) -> AbstractContextManager[None]:
        """Compute without adapters inside the returned context, where only forward passes are allowed. Not
        collective."""
        assert self.lora is not None, "the model has no adapters"
        return adapters_disabled(self.chunks)

    def save(self, directory: str | Path, step_state: dict[str, Any]) -> dict[str, str]:
        """Save model, optimizer, learning-rate scheduler and RNG states as a torch_dist checkpoint. Return the hashes
        (xxh3-128) of this rank's `.distcp` files, by name.

        Args:
            directory: one for all ranks, or one per rank (see `RankState.save`).
            step_state: JSON values of the caller, which `load` returns.
        """
        self._require_on_device_and_gathered("weights", "optimizer")
        return self._state.save(directory, step_state)

    def load_adapters(self, matrices_of: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        """Set the adapters: `matrices_of` returns A [parts * r, in] and B [out, r] of a layer by its global name. Not
        collective."""
        self._require_on_device_and_gathered("weights", "optimizer")
        put_adapters(self.chunks, matrices_of)
        self.optimizer.reload_model_params()

    def save_weights(self, directory: str | Path) -> dict[str, str]:
        """Save only the weights, for `load_weights`. Inside `using_weights`, the snapshot's weights are saved. Return
        the hashes of this rank's `.distcp` files."""
        self._require_on_device_and_gathered("weights")
        return self._state.save_weights(directory)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Load all states of a checkpoint that `save` wrote, and return its `step_state`. Resumed training is
        bit-identical to uninterrupted training. The checkpoint of a model with adapters has only these: load its base
        with `load_weights` before."""
        self._require_on_device_and_gathered("weights", "optimizer")
        return self._state.load(directory)

    def load_weights(self, directory: str | Path) -> None:
        """Load only the weights of a converted model or training checkpoint; reset adapters, optimizer and
        learning-rate scheduler.

        A value model (critic) gets its value head from the checkpoint of a value model. From a policy's checkpoint it
        gets all weights except the LM head, and initializes the value head from the seed.
        """
        self._require_on_device_and_gathered("weights", "optimizer")
        self._base_hashes = {}
        self._state.load_weights(directory)

    def _synced_chunks(self) -> list[PolicyModel]:
        self._require_on_device_and_gathered("weights")
        return self.chunks

    def _require_on_device_and_gathered(self, *kinds: StateKind) -> None:
        """Check that these kinds of state are on the device, and wait for parameter all-gathers."""
        self._memory.require_on_device(*kinds)
        self._param_gather.wait_for_all()

    # ---- device memory -----------------------------------------------------------------------------------------------

    def offload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state to host memory and free their device memory; the content of gradients is discarded.
        Return the duration and memory use of the move, or None if there was nothing to move. Not collective.

        Methods that need an offloaded kind fail until `onload`.
        """
        self._param_gather.wait_for_all()
        return self._memory.offload(kinds)

    def onload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state back to the device; gradients are zero afterwards. Return the duration and memory
        use of the move, or None if there was nothing to move. Not collective."""
        return self._memory.onload(kinds)

    # ---- reproducibility ---------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return the versions, hardware and settings on which the exact bits of training results depend. Runs with
        equal fingerprints and equal inputs have equal weight digests."""
        kernel: str = self.attention_kernel
        if kernel == "fa4":  # compiled at run time
            kernel += "".join(f", {package} {version(package)}" for package in (FA4, "nvidia-cutlass-dsl"))
        return {
            "torch": torch.__version__,
            "megatron": MEGATRON_VERSION,
            "device": device_name(),
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "world_size": dist.get_world_size(),
            "layout": self.layout.model_dump(),
            "dtype": self.dtype,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            # only if they differ from the first release's, so that its runs still replay bit for bit
            **({"attention": kernel} if kernel != torch_attention_kernel(self.dtype) else {}),
            **({"experts": "grouped"} if self.shape.experts and self.config.moe_grouped_gemm else {}),
            **({"norms": f"triton {version('triton')}"} if self.device.type == "cuda" else {}),
            **({"swiglu": "triton"} if self.device.type == "cuda" else {}),
            **({"clipping": "foreach"} if self.device.type == "cuda" and not has_transformer_engine() else {}),
            **({"gradients": "accumulated in place"} if self.config.gradient_accumulation_fusion else {}),
            **({"head": "fp32"} if self.chunks[0].fp32_head else {}),
            **({"context": "all-to-all over heads"} if self.layout.context > 1 else {}),
        }


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels in this process, and raise an error for operations without such a kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new tensors only helps debugging, and costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
