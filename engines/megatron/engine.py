"""One rank of a Megatron-core trainer (`MegatronEngine`): the model, its gradients, the optimizer and the learning-rate
scheduler.

Micro-batches ("packs") have no padding; `packing.py` adds the padding that tensor and context parallelism need, and the
engine removes it before the loss. Megatron divides gradients neither by the number of micro-batches nor by the world
size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from penstock.engines.megatron.model.gpt import PolicyModel, ValueModel, build_model
from penstock.engines.megatron.model.transformer_config import FA4, choose_attention_kernel, torch_attention_kernel
from penstock.engines.megatron.packing import PackedStream, StreamRouting, pack_stream, place_images
from penstock.engines.megatron.parallel import device, device_name, peak_flops
from penstock.engines.megatron.patches import MEGATRON_VERSION, has_transformer_engine

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from penstock.engines.megatron import weights
from penstock.engines.megatron.checkpoints.torch_dist import RankState
from penstock.engines.megatron.frozen_parameters import frozen_parameters
from penstock.engines.megatron.lora_layers import adapters_disabled, add_adapters
from penstock.engines.megatron.optimizer import (
    ParamGather,
    build_optimizer,
    build_scheduler,
    wrap_chunks_in_ddp,
    zero_adam_state,
)
from penstock.engines.megatron.residency import DeviceMemory
from penstock.engines.training import (
    EngineBuild,
    EnginePack,
    GatheredWeights,
    LossFunction,
    MemorySwitch,
    OutputHead,
    Routing,
    StateKind,
    TrainEngine,
)


class MegatronEngine(TrainEngine):
    """The `TrainEngine` of Megatron-core. Create it after `init_parallel`.

    Several engines of one process share RNG states: every engine's checkpoint contains them, and the last `load` sets
    them. With dropout 0 the RNGs are not used after weight initialization, so the states are the same in all
    checkpoints. Gradient buffers are fp32, unless Megatron's option grad_reduce_in_fp32 is False: then they have the
    dtype of the weights.

    The `head` of a policy maps hidden states [n, H] to the logits of this rank's vocabulary shard, that of a critic
    (role "value") to float32 values [n, 1], the same on every tensor-parallel rank.
    """

    def __init__(self, build: EngineBuild) -> None:
        shape, dtype, seed, optimizer = build.shape, build.dtype, build.seed, build.optimizer
        self.shape, self.layout, self.dtype, self.device = shape, build.layout, dtype, device()
        if build.deterministic:
            use_deterministic_kernels()
        overrides = dict(build.options)
        self.attention_kernel = choose_attention_kernel(overrides.pop("attention_backend", None), dtype, shape)
        if self.attention_kernel == "fa4":
            # Otherwise FlashAttention-4 asks the driver for this number in every forward pass: 10 % of the host's time
            # in a step of a 0.6B model on an H100.
            processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
            os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", str(processors))
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)  # seeds the generators of weights drawn on a GPU
        chunk_class = partial(ValueModel, seed=seed) if build.role == "value" else PolicyModel
        self.chunks = build_model(shape, self.layout, dtype, overrides, chunk_class)
        for chunk in self.chunks:
            chunk.fp32_head = build.fp32_head
        self.lora = build.lora
        self._base_hashes: dict[str, str] = {}  # hashes of the frozen base weights under adapters
        if self.lora is not None:
            add_adapters(self.chunks, self.lora, seed)
        frozen = frozen_parameters(shape, build.freeze, build.only_train, build.freeze_vision)
        weights.freeze_parameters(self.chunks, frozen)
        self.config = self.chunks[0].config  # shared by all chunks
        self.wrapped = wrap_chunks_in_ddp(self.chunks, self.config, overrides)
        self._param_gather = ParamGather(self.wrapped)
        self.optimizer = build_optimizer(self.wrapped, self.config, optimizer, overrides)
        self.scheduler = build_scheduler(self.optimizer, optimizer)
        adapter_seed = None if self.lora is None else seed
        self._state = RankState(
            shape, self.layout, build.role, self.chunks, self.optimizer, self.scheduler, adapter_seed
        )
        self._memory = DeviceMemory(build.role, self.wrapped, self.optimizer)
        if build.offloads:
            self._memory.start_allocation()

        # Megatron's pipeline schedules read these functions from the model's configuration.
        self.config.grad_scale_func = self.optimizer.scale_loss
        # num_tokens=None: Megatron must not divide gradients by the number of tokens; the loss function normalizes.
        self.config.finalize_model_grads_func = lambda model, num_tokens=None, **options: finalize_model_grads(
            model, None, **options
        )
        if self.wrapped[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

        tensor, context = self.layout.tensor > 1, self.layout.context > 1
        self.tensor_group = parallel_state.get_tensor_model_parallel_group() if tensor else None
        self.context_group = parallel_state.get_context_parallel_group() if context else None
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.data_parallel_rank_and_size = rank, size
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.peak_flops = peak_flops(dtype)

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    def pack_stream(self, packed: EnginePack) -> PackedStream:
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        tensor = self.layout.tensor if self.config.sequence_parallel else 1
        stream = pack_stream(packed, self.device, tensor, size, rank, self.attention_kernel)
        vision, images = self.shape.vision, packed.images
        if vision and images and parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            tensor_rank = parallel_state.get_tensor_model_parallel_rank() if tensor > 1 else 0
            stream.images = place_images(images, stream, vision, tensor, tensor_rank)
        return stream

    def forward_backward(
        self,
        microbatches: Sequence[EnginePack],
        loss_fn: LossFunction,
        *,
        forward_only: bool = False,
        routing: Routing | None = None,
    ) -> list[dict[str, Any]]:
        count, multiple = len(microbatches), self.layout.pipeline if self.layout.virtual_pipeline else 1
        assert count and count % multiple == 0, f"{count} micro-batches are not a positive multiple of {multiple}"
        self._memory.require_on_device("weights", *(() if forward_only else ("gradients",)))
        if not forward_only:
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        iterators = [iter(microbatches) for _ in self.wrapped]
        with torch.no_grad() if forward_only else nullcontext():
            outputs = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, loss_fn, routing),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped,
                num_microbatches=count,
                seq_length=1,  # not used: pipeline stages communicate the lengths, which vary
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return outputs if self.is_last_stage else []

    def _forward_step(
        self, loss_fn: LossFunction, routing: Routing | None, microbatches: Iterator[Any], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        packed = next(microbatches)
        stream: PackedStream = replace(packed.stream or self.pack_stream(packed))  # a copy, which this pass changes
        if routing is not None:
            packed.routing = {} if packed.routing is None else packed.routing
            ranks = self.layout.tensor if self.config.sequence_parallel else 1
            all_tokens = ranks == self.layout.context == 1  # each router gets all tokens of the micro-batch, in order
            rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
            rows = None if all_tokens else stream.router_rows(rank, ranks)
            num_tokens, recording = len(packed.token_ids), routing == "record"
            stream.routing = StreamRouting(packed.routing, num_tokens, rows, recording)
        hidden = chunk(stream)
        if chunk.module.post_process:
            self._param_gather.wait(chunk.module.output_layer)  # whose weight `head` reads without a call

        def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if stream.num_tokens < len(hidden):
                hidden = hidden[: stream.num_tokens]
            loss, outputs = loss_fn(hidden, chunk.module.head, packed)
            if loss is None:
                loss = hidden.new_zeros(())
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), outputs

        return hidden, compute_loss

    def optimizer_step(self) -> tuple[bool, float, list[float]]:
        self._memory.require_on_device("weights", "gradients", "optimizer")
        rates = {group["is_decoupled_lr"]: group["lr"] for group in self.optimizer.param_groups}  # True: vision tower
        updated, grad_norm, _ = self.optimizer.step()
        self.optimizer.zero_grad()  # frees the fp32 copies of bf16 gradients; the gradient buffers are not changed
        self._param_gather.start_all()
        if updated:
            self.scheduler.step(1)
        return bool(updated), float(grad_norm), [rate for _, rate in sorted(rates.items())]

    def reset_optimizer_states(self) -> None:
        self._memory.require_on_device("optimizer")
        zero_adam_state(self.optimizer)

    # ---- weights and checkpoints -------------------------------------------------------------------------------------

    def gather_weights(self) -> GatheredWeights:
        return weights.gather_weights(self._synced_chunks("weights"))

    def named_adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        return weights.named_adapters(self._synced_chunks("weights"))

    def digest(self) -> dict[str, str]:
        chunks = self._synced_chunks("weights")
        if self.lora is None:
            return weights.hash_weights(chunks)
        # The frozen base weights under adapters are hashed once after they are loaded.
        self._base_hashes = self._base_hashes or weights.hash_weights(chunks)
        return self._base_hashes | weights.hash_weights(chunks, of_adapters=True)

    def optimizer_state_digest(self) -> dict[str, str]:
        self._synced_chunks("weights", "optimizer")
        return self._state.digest()

    def snapshot_weights(self) -> weights.Snapshot:
        return weights.copy_weights_to_host(self._synced_chunks("weights"))

    def copy_head(self) -> OutputHead:
        chunk = self._synced_chunks("weights")[-1]
        return partial(chunk.logits, weight=chunk.head_weight.detach().clone())

    def average_weights(self, average: list[weights.Snapshot] | None, rate: float) -> list[weights.Snapshot]:
        return weights.move_average(self._synced_chunks("weights"), average, rate)

    @contextmanager
    def using_weights(self, snapshot: weights.Snapshot | None) -> Iterator[None]:
        chunks = self._synced_chunks("weights")
        if snapshot is not None:
            weights.swap_weights(chunks, snapshot)
        try:
            with adapters_disabled(chunks):
                yield
        finally:
            if snapshot is not None:
                weights.swap_weights(chunks, snapshot)

    def save(self, directory: str | Path, step_state: dict[str, Any] | None) -> dict[str, str]:
        self._synced_chunks("weights", *(() if step_state is None else ("optimizer",)))
        return self._state.save(directory, step_state)

    def load_adapters(self, matrices_of: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        self._synced_chunks("weights", "optimizer")
        for adapter in (adapter for chunk in self.chunks for adapter in chunk.adapters):
            adapter.put(matrices_of)
        self.optimizer.reload_model_params()

    def load(self, directory: str | Path) -> dict[str, Any]:
        self._synced_chunks("weights", "optimizer")
        return self._state.load(directory)

    def load_weights(self, directory: str | Path) -> None:
        self._synced_chunks("weights", "optimizer")
        self._base_hashes = {}
        self._state.load_weights(directory)

    def _synced_chunks(self, *kinds: StateKind) -> list[PolicyModel]:
        """Check that these kinds of state are on the device, wait for parameter all-gathers, and return the chunks."""
        self._memory.require_on_device(*kinds)
        self._param_gather.wait()
        return self.chunks

    # ---- device memory -----------------------------------------------------------------------------------------------

    def offload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        self._param_gather.wait()
        return self._memory.offload(kinds)

    def onload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        return self._memory.onload(kinds)

    # ---- reproducibility ---------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
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
            # The following keys exist only where a kernel or method other than the ordinary one is used.
            **({"attention": kernel} if kernel != torch_attention_kernel(self.dtype) else {}),
            **({"experts": "grouped"} if self.shape.experts and self.config.moe_grouped_gemm else {}),
            **({"norms": f"triton {version('triton')}", "swiglu": "triton"} if self.device.type == "cuda" else {}),
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
