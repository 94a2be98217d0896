"""One rank of a Megatron-core trainer: the model, its gradients, the optimizer and the schedule.

It knows no samples, no losses and no rollouts: `stages/train/step.py` hands in packs and a function of hidden states. Packs are
free of padding (`packing.py` adds what tensor and context parallelism need and takes it away again). Files beside this one hold
the parts: `model.py`, `optimizer.py`, `checkpoint.py`, `weights.py`.

What the loss must be:

    loss_fn(hidden [r, H], head, packed) -> (loss: scalar tensor, or None in a forward-only pass; outputs: detached values)

    Gradients are plain sums, over micro-batches and over data- and context-parallel ranks; Megatron multiplies by nothing (no
    num_microbatches, no world size). So `loss_fn` returns this micro-batch's share of the step's loss, with denominators of the
    whole step: the loss of the step is the sum of what all micro-batches on all ranks return. Every tensor-parallel rank
    computes it alike.

`head` turns rows of hidden states into logits, or into values if the engine was made for a critic.

`r` is the number of tokens of the pack, except under context parallelism: there a rank has some of them only, and
`rows_of(packed)` says which.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from engines.megatron.args import check_megatron_args
from engines.megatron.door import MEGATRON_VERSION
from engines.megatron.model import PolicyModel, build_model
from engines.megatron.packing import Packed, PackedStream, pack_stream
from engines.megatron.parallel import ParallelLayout, device
from engines.megatron.peak import peak_flops
from engines.megatron.replay import rows_of_routers, stream_routing
from engines.megatron.shape import ModelShape
from engines.megatron.value import ValueModel

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from engines.megatron import checkpoint, weights
from engines.megatron.gather import WeightGather
from engines.megatron.optimizer import build_optimizer, build_scheduler, wrap
from storage.errors import LayoutError

Head = Callable[[Tensor], Tensor]
Loss = tuple[Tensor | None, dict[str, Any]]
Routing = Literal["record", "replay"]
LossFunction = Callable[[Tensor, Head, Any], Loss]


class MegatronEngine:
    """One rank. `init_parallel` comes first; every method is called by all ranks together unless it says otherwise.

    Args:
        shape: of the model.
        layout: as given to `init_parallel`.
        dtype: of weights and computation; sums of gradients and the optimizer are fp32 in either case.
        optimizer: lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad, lr_decay_style, lr_warmup_iters,
            lr_decay_iters.
        overrides: the user's `megatron` options (fields of Megatron's own dataclasses).
        seed: of random initial weights.
        deterministic: refuse kernels whose result varies from call to call.
        role: "policy", whose `head(hidden [n, H])` gives logits of this rank's part of the vocabulary; or "value", a policy's trunk whose
            `head` gives float32 values [n, 1], on every tensor-parallel rank the same.

    Engines of one process share its process groups and its random state. Each one's checkpoint holds that state, and the last `load` wins:
    with dropout 0 nothing draws from it after the weights are made, so it is the same in all of them.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout | None = None,
        *,
        dtype: Literal["fp32", "bf16"],
        optimizer: dict[str, Any],
        overrides: dict[str, Any] | None = None,
        seed: int = 1234,
        deterministic: bool = False,
        role: Literal["policy", "value"] = "policy",
    ) -> None:
        self.shape, self.layout, self.dtype, self.deterministic = shape, layout or ParallelLayout(), dtype, deterministic
        self.role, self.device = role, device()
        overrides = check_megatron_args(overrides or {})
        if deterministic:
            use_deterministic_kernels()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)  # a GPU's weights are drawn from these
        make = partial(ValueModel, seed=seed) if role == "value" else PolicyModel
        self.chunks = build_model(shape, self.layout, dtype, overrides, make)
        self.config = self.chunks[0].config  # one for all chunks
        self.wrapped = wrap(self.chunks, self.config, overrides)
        self._gather = WeightGather(self.wrapped)
        self.optimizer = build_optimizer(self.wrapped, self.config, optimizer, overrides)
        self.scheduler = build_scheduler(self.optimizer, optimizer)
        self._connect()

    def _connect(self) -> None:
        """Megatron's schedules find these in the model's configuration."""
        self.config.grad_scale_func = self.optimizer.scale_loss
        # the number of tokens, by which it would divide, stays away: the loss brings its own denominators
        self.config.finalize_model_grads_func = lambda model, num_tokens=None, **options: finalize_model_grads(
            model, None, **options
        )
        if self.wrapped[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    # ---- where this rank is -------------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) among the ranks that get different packs."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    @property
    def context_parallel(self) -> tuple[int, int]:
        """(rank, size) among the ranks that share a pack's tokens."""
        return parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the vocabulary of the logits; None if there is only this one."""
        return parallel_state.get_tensor_model_parallel_group() if self.layout.tensor > 1 else None

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the other tokens of this rank's packs; None if there are none."""
        return parallel_state.get_context_parallel_group() if self.layout.context > 1 else None

    @property
    def peak_flops(self) -> float | None:
        """See `peak.peak_flops`."""
        return peak_flops(self.dtype)

    @property
    def is_last_stage(self) -> bool:
        """Does this rank see hidden states, and so the loss?"""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def rows_of(self, packed: Packed) -> Tensor | None:
        """[r] places in the pack of the tokens whose hidden states this rank's `loss_fn` gets; None: all. Not collective."""
        return self._stream(packed).origin if self.layout.context > 1 else None

    # ---- one optimizer step -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget gradients."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(
        self,
        microbatches: Sequence[Packed],
        loss_fn: LossFunction,
        *,
        forward_only: bool = False,
        routing: Routing | None = None,
    ) -> list[dict[str, Any]]:
        """Run the micro-batches through the (pipelined) model; afterwards the gradients are summed over all ranks.

        Args:
            microbatches: equally many on every rank; the same ones on tensor-, context- and pipeline-parallel ranks.
            loss_fn: see the module's docstring.
            forward_only: no gradients; `loss_fn` may return None for the loss.
            routing: "replay" sends tokens to the experts that `packed.routing` (a `replay.RoutingRecord`, or None) knows and lets the
                routers choose for the rest; "record" does the same and adds what they chose. None: routers are free.

        Returns:
            the second results of `loss_fn`, in order, on the last pipeline stage; an empty list elsewhere.
        """
        assert microbatches, "no micro-batches"
        if self.layout.virtual_pipeline and len(microbatches) % self.layout.pipeline:
            raise LayoutError(
                f"{len(microbatches)} micro-batches under virtual pipelining: use a multiple of {self.layout.pipeline}"
            )
        run = get_forward_backward_func()
        with torch.no_grad() if forward_only else nullcontext():
            outputs = run(
                forward_step_func=partial(self._forward_step, loss_fn, routing),
                data_iterator=[iter(microbatches) for _ in self.wrapped] if len(self.wrapped) > 1 else iter(microbatches),
                model=self.wrapped,
                num_microbatches=len(microbatches),
                seq_length=1,  # lengths vary and are communicated
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return outputs if self.is_last_stage else []

    def _forward_step(
        self, loss_fn: LossFunction, routing: Routing | None, microbatches: Iterator[Packed], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        packed = next(microbatches)
        stream = self._stream(packed)
        if routing is not None:
            stream.routing = stream_routing(packed, routing == "record", self._rows_of_routers(stream))
        hidden = chunk(stream)
        if chunk.module.post_process:
            self._gather.wait_for(chunk.module.output_layer)  # `head` takes its weight
        return hidden, partial(_loss, loss_fn, packed, stream, chunk.module)

    def _stream(self, packed: Packed) -> PackedStream:
        rank, size = self.context_parallel
        tensor = self.layout.tensor if self.config.sequence_parallel else 1
        bucketed = self.device.type == "cpu" or self.dtype == "fp32"  # flash attention knows half precisions only
        return pack_stream(packed, self.device, tensor, size, rank, bucketed)

    def _rows_of_routers(self, stream: PackedStream) -> Tensor | None:
        if stream.real is None or stream.origin is None:
            return None
        ranks = self.layout.tensor if self.config.sequence_parallel else 1
        rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
        return rows_of_routers(stream.real, stream.origin, len(stream.token_ids), rank, ranks)

    def step(self, increment: int = 1) -> tuple[bool, float]:
        """Clip, update the weights, and move the schedule on by `increment`.

        Returns:
            whether the weights were updated, and the norm of the gradient before clipping.
        """
        updated, grad_norm, _ = self.optimizer.step()
        self._gather.start()
        if updated:
            self.scheduler.step(increment)
        return bool(updated), float(grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    # ---- weights and checkpoints --------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `weights.named_weights`."""
        return weights.named_weights(self._whole_chunks())

    def digest(self) -> dict[str, str]:
        """See `weights.digest`. Not collective: this rank's shards."""
        return weights.digest(self._whole_chunks())

    def state_digest(self) -> dict[str, str]:
        """See `checkpoint.state_digest`. Not collective: this rank's optimizer, schedule and random state."""
        return checkpoint.state_digest(self)

    def snapshot(self) -> weights.Snapshot:
        """A copy of this rank's weights in host memory. Not collective."""
        return weights.snapshot(self._whole_chunks())

    @contextmanager
    def using(self, held: weights.Snapshot) -> Iterator[None]:
        """Inside, the model has the snapshot's weights (and the snapshot the model's). For forward passes only."""
        weights.exchange(self._whole_chunks(), held)
        try:
            yield
        finally:
            weights.exchange(self.chunks, held)

    def save(self, directory: str | Path, step_state: dict[str, Any]) -> None:
        """Write model, optimizer, schedule and random state as torch_dist; `step_state` is the caller's, and JSON. The directory may
        be shared by the ranks or be each one's own (`checkpoint.save_checkpoint`)."""
        self._gather.wait()
        checkpoint.save_checkpoint(self, directory, step_state)

    def save_weights(self, directory: str | Path) -> None:
        """Write the model alone, for `load_weights`. Inside `using`, that is the snapshot's."""
        self._gather.wait()
        checkpoint.save_weights(self, directory)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Continue, bit for bit, from `save`; gives its `step_state` back."""
        self._gather.wait()
        return checkpoint.load_checkpoint(self, directory)

    def load_weights(self, directory: str | Path) -> None:
        """Begin from the model of a converted or a training checkpoint, with a fresh optimizer and schedule. A value model takes the
        trunk, and the head too if the checkpoint is a value model's; else the head is what the seed makes it."""
        self._gather.wait()
        checkpoint.load_weights(self, directory)

    def _whole_chunks(self) -> list[PolicyModel]:
        self._gather.wait()
        return self.chunks

    def fingerprint(self) -> dict[str, Any]:
        """All that may change the last bit of a result. Two runs with equal fingerprints and inputs have equal digests."""
        return {
            "torch": torch.__version__,
            "megatron": MEGATRON_VERSION,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else _cpu_name(),
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "world_size": dist.get_world_size(),
            "layout": self.layout.model_dump(),
            "dtype": self.dtype,
            "deterministic": self.deterministic,
        }


def _loss(
    loss_fn: LossFunction, packed: Packed, stream: PackedStream, chunk: PolicyModel, hidden: Tensor
) -> tuple[Tensor, Tensor, dict]:
    if stream.real is not None:
        hidden = hidden[stream.real]
    loss, outputs = loss_fn(hidden, chunk.head, packed)
    if loss is None:
        loss = hidden.new_zeros(())
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), outputs


def use_deterministic_kernels() -> None:
    """For the whole process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # a debugging help that costs a pass over every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _cpu_name() -> str:
    """Math libraries choose their kernels by model and vector extensions."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
