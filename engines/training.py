"""The interface of a training engine: `TrainEngine` is one rank of a model with its optimizer; `TrainBackend` prepares
the ranks and builds the engine. Imports torch for type checkers only, because the driver uses this module.

To add a training engine, write a package `engines/<name>` with subclasses of both, and name it in `TRAIN_ENGINE`.

A step passes packed micro-batches and a loss function of hidden states; engines do not depend on samples, losses or
rollouts. Contract of the loss function:

    loss_fn(hidden, head, packed) -> (loss, outputs)

    hidden    [r, H] final hidden states. r is the number of tokens of the pack, except under context parallelism, where
              a rank has only some of the tokens: `packed.stream.pack_slice` tells which.
    head      maps rows of hidden states to logits, or to values if the engine's role is "value".
    packed    the packed micro-batch that the caller passed.
    loss      scalar tensor, or None in a forward-only pass.
    outputs   dictionary of detached values, which `forward_backward` returns.

Gradients are plain sums over micro-batches and over data- and context-parallel ranks. So `loss_fn` must return this
micro-batch's part of the step's loss, with denominators of the whole step: the loss of the step is the sum of the
losses of all micro-batches on all data- and context-parallel ranks. Every tensor-parallel rank computes the same loss.
"""

from __future__ import annotations

import importlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

from pydantic import Field

from penstock.engines.parallel_layout import ParallelLayout
from penstock.storage.commit import Frozen

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from penstock.engines.families.shape import ModelShape
    from penstock.engines.lora import LoraOptions

TRAIN_ENGINE = "penstock.engines.megatron.train_backend:MegatronBackend"  # module:class of the `TrainBackend`
OutputHead = Callable[["Tensor"], "Tensor"]
LossFunction = Callable[["Tensor", OutputHead, Any], "tuple[Tensor | None, dict[str, Any]]"]
Routing = Literal["record", "replay"]
Role = Literal["policy", "value"]
StateKind = Literal["weights", "gradients", "optimizer"]
GIB = 1 << 30
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)


class MemorySwitch(Frozen):
    """Duration and memory use of one move of trainer or engine state between a device and host memory."""

    name: str  # e.g. "policy: offload gradients, optimizer"
    seconds: float
    device_bytes_before: int  # used on the whole device, by all processes; 0 without CUDA
    device_bytes_after: int
    host_bytes_before: int  # resident set size of this process, pinned memory included
    host_bytes_after: int
    at: float = Field(default_factory=time.time)  # end of the move, in seconds since the epoch

    def __str__(self) -> str:
        device = f"{self.device_bytes_before / GIB:.1f} -> {self.device_bytes_after / GIB:.1f} GiB"
        host = f"{self.host_bytes_before / GIB:.1f} -> {self.host_bytes_after / GIB:.1f} GiB"
        return f"{self.name} in {self.seconds:.2f} s: device {device}, host {host}"


class EngineStream(Protocol):
    """The tokens of a micro-batch that one rank processes, padded and split, on the device."""

    @property
    def pack_slice(self) -> slice:
        """Return the tokens of the micro-batch whose hidden states this rank's loss function gets."""


@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch, and the places where they stand. Samples of one group have the same images, which
    are here once and pass the vision tower once."""

    pixel_values: Tensor  # [P, patch_dim] float32, patches in the order of transformers' image processors, on the CPU
    grid_thw: Tensor  # [I, 3] int64, (frames, rows, columns) of patches of each image, on the CPU
    starts: Tensor  # [N] int64, index of the first token of each place in the micro-batch, ascending
    image_index: Tensor  # [N] int64, which of the I images stands there


class EnginePack(Protocol):
    """A packed micro-batch of B sequences with T tokens in total. A loss function may use further fields.

    With routing replay the engine also reads and sets `routing: dict[int, Tensor] | None`. It maps the index of a layer
    in the whole model, from 0, to the expert ids of the tokens: [T, top_k] int16 on the CPU, -1 where they are unknown.
    """

    token_ids: Tensor  # [T] int64, the concatenated sequences
    position_ids: Tensor  # [T] int64, from 0 in every sequence; [3, T] with images (`Vision.token_positions`)
    cu_seqlens: Tensor  # [B + 1] int32, index of each sequence's first token, and T
    max_seqlen: int  # number of tokens of the longest sequence
    images: PackedImages | None  # of a vision-language model
    stream: Any  # result of `TrainEngine.pack_stream`; None: every pass calls `pack_stream`


@dataclass(frozen=True)
class GatheredWeights:
    """The weights of a sharded model as full tensors, gathered one at a time."""

    meta: dict[str, Tensor]  # global name -> tensor on the meta device: shape and dtype of the weight
    tensors: Iterator[tuple[str, Tensor]]  # (global name, full tensor); every rank must consume them all


@dataclass(frozen=True)
class EngineBuild:
    """Everything that determines a `TrainEngine` except its weights."""

    shape: ModelShape
    dtype: Literal["fp32", "bf16"]  # dtype of weights and computation; optimizer states are always fp32
    optimizer: dict[str, Any]
    """Values of lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad, lr_decay_style, lr_warmup_iters
    and, unless lr_decay_style is constant, lr_decay_iters. vision_lr, if given, replaces lr for the vision tower."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)  # as passed to `TrainBackend.init_ranks`
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own options, as the user gave them
    seed: int = 1234  # seed of the random initial weights
    role: Role = "policy"
    freeze: Sequence[str] | None = None  # --freeze-params-name-list
    only_train: Sequence[str] | None = None  # --only-train-params-name-list
    freeze_vision: bool = True  # --freeze-vision
    lora: LoraOptions | None = None  # adapters, which are then the only trained parameters
    fp32_head: bool = False  # --fp32-lm-head
    deterministic: bool = False  # use deterministic kernels, and fail at operations without one
    offloads: bool = False  # `offload` will move all state: allocate its host memory from the start, in the background


class TrainEngine(ABC):
    """One rank of a model and its optimizer. Create it after `TrainBackend.init_ranks`.

    Every method is collective (all ranks must call it) unless its docstring says otherwise. Several engines of one
    process (actor and critic) share process groups and RNG states.
    """

    shape: ModelShape
    device: torch.device
    lora: LoraOptions | None
    data_parallel_rank_and_size: tuple[int, int]  # in the group whose ranks process different micro-batches
    tensor_group: dist.ProcessGroup | None  # over which the vocabulary of the logits is sharded; None: one rank
    context_group: dist.ProcessGroup | None  # over which the tokens of a micro-batch are split; None: one rank
    is_last_stage: bool  # whether this rank computes the loss
    peak_flops: float | None  # peak FLOP/s of this rank's GPU; None: unknown

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    @abstractmethod
    def pack_stream(self, packed: EnginePack) -> EngineStream:
        """Return this rank's tokens of a micro-batch. A caller that runs several passes stores the result in
        `packed.stream`, because every call copies data to the GPU and waits for the copy. Not collective."""

    @abstractmethod
    def forward_backward(
        self,
        microbatches: Sequence[EnginePack],
        loss_fn: LossFunction,
        *,
        forward_only: bool = False,
        routing: Routing | None = None,
    ) -> list[dict[str, Any]]:
        """Run forward and backward passes of micro-batches, then all-reduce the gradients. Gradients of earlier calls
        are discarded.

        Every rank has the same number of micro-batches, and the tensor-, context- and pipeline-parallel ranks of a
        replica have the same ones. With `forward_only` `loss_fn` may return None as the loss. Return the outputs of
        `loss_fn` for each micro-batch, in order, on the last pipeline stage; [] on other stages.

        Routing of MoE layers: None: the routers select the experts. "replay": the expert ids in `packed.routing` are
        used; for layers and tokens without a record the routers select. "record": like "replay", and the ids that were
        used are added to `packed.routing`.
        """

    @abstractmethod
    def optimizer_step(self) -> tuple[bool, float, list[float]]:
        """Clip the gradients, update the weights, and advance the learning-rate scheduler by one step.
        Return whether the weights were updated, the gradient norm before clipping, and the learning rates of this step:
        that of the model, then that of its vision tower if it is trained."""

    @abstractmethod
    def reset_optimizer_states(self) -> None:
        """Set Adam's moments and step counts to zero. Not collective."""

    # ---- weights and checkpoints -------------------------------------------------------------------------------------

    @abstractmethod
    def gather_weights(self) -> GatheredWeights:
        """Return shapes, dtypes and full tensors of all weights."""

    @abstractmethod
    def digest(self) -> dict[str, str]:
        """Return a hash of each of this rank's weight shards, by name. Not collective."""

    @abstractmethod
    def optimizer_state_digest(self) -> dict[str, str]:
        """Return hashes of this rank's optimizer, learning-rate scheduler and RNG states. Not collective."""

    @abstractmethod
    def snapshot_weights(self) -> Any:
        """Copy this rank's weight shards to host memory, for `using_weights`. Not collective."""

    @abstractmethod
    def using_weights(self, snapshot: Any | None) -> AbstractContextManager[None]:
        """Make the model use a snapshot's weights (None: its own), without adapters, inside the context, where only
        forward passes are allowed. The values are swapped: inside the context the snapshot holds the model's own
        weights."""

    @abstractmethod
    def copy_head(self) -> OutputHead:
        """Return the LM head with a copy of the weights that the model uses now. Only on the last pipeline stage, and
        not collective."""

    @abstractmethod
    def average_weights(self, average: list[Any] | None, rate: float) -> list[Any]:
        """Move a moving average of the weights by the share `rate` towards the model's weights, and return it; None:
        begin it with these weights. It consists of two snapshots whose sum is the average: the average in the dtype of
        the weights, and what this rounding leaves, without which small steps would vanish in bf16. Not collective."""

    @abstractmethod
    def save(self, directory: str | Path, step_state: dict[str, Any] | None) -> dict[str, str]:
        """Save model, optimizer, learning-rate scheduler and RNG states as a checkpoint. Return the hashes (xxh3-128)
        of the files that this rank writes, by name.

        Args:
            directory: one for all ranks, or one per rank.
            step_state: JSON values of the caller, which `load` returns. None: save only the weights that the model uses
                (inside `using_weights` those of the snapshot), for `load_weights`.
        """

    @abstractmethod
    def load(self, directory: str | Path) -> dict[str, Any]:
        """Load all states of a checkpoint that `save` wrote, and return its `step_state`. Resumed training is
        bit-identical to uninterrupted training. The checkpoint of a model with adapters has only the adapters: load the
        base weights with `load_weights` first."""

    @abstractmethod
    def load_weights(self, directory: str | Path) -> None:
        """Load only the weights of a converted model or training checkpoint; reset adapters, optimizer and
        learning-rate scheduler.

        A value model (critic) gets its value head from the checkpoint of a value model. From a policy's checkpoint it
        gets all weights except the LM head, and initializes the value head from the seed.
        """

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return the versions, hardware and settings on which the exact bits of training results depend. Runs with
        equal fingerprints and equal inputs have equal weight digests."""

    # ---- adapters (`lora`) -------------------------------------------------------------------------------------------

    @abstractmethod
    def named_adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the layer's name and the matrices A and B of every adapter."""

    @abstractmethod
    def load_adapters(self, matrices_of: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        """Set the adapters; `matrices_of(layer)` returns A [parts * r, in] and B [out, r]. Not collective."""

    # ---- device memory -----------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state to host memory and free their device memory; the content of gradients is discarded.
        Return the duration and memory use of the move, or None if there was nothing to move. Not collective.

        Methods that need an offloaded kind fail until `onload`.
        """

    @abstractmethod
    def onload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        """Move these kinds of state back to the device; gradients are zero afterwards. Return the duration and memory
        use of the move, or None if there was nothing to move. Not collective."""


class TrainBackend(ABC):
    """A training engine's implementation: prepares ranks and builds engines. The driver imports it without torch."""

    checkpoint_format: ClassVar[Literal["torch_dist", "hf"]]  # format of the directories that `TrainEngine.save` writes

    @abstractmethod
    def rank_environment(self, layout: ParallelLayout, threads: int) -> dict[str, str]:
        """Return the environment variables with which a rank that uses `threads` CPU threads must be started."""

    @abstractmethod
    def import_libraries(self) -> None:
        """Import what `build` needs, so that it starts without delay."""

    @abstractmethod
    def init_ranks(
        self,
        rank: int,
        num_ranks: int,
        rendezvous: str | socket.socket,
        layout: ParallelLayout,
        threads: int,
        timeout: timedelta,
    ) -> None:
        """Initialize torch.distributed and the process groups of a layout, once per process."""

    @abstractmethod
    def build(self, build: EngineBuild) -> TrainEngine:
        """Build this rank's engine, with random weights. Collective."""

    @abstractmethod
    def is_written_by_rank(self, rank: int, name: str) -> bool:
        """Return whether a rank writes the checkpoint file `name`."""

    @abstractmethod
    def bytes_used(self) -> tuple[int, int]:
        """Return the bytes used on this rank's device, by all processes, and by this process in host memory."""


@cache
def train_backend() -> TrainBackend:
    """Return an instance of the class that `TRAIN_ENGINE` names."""
    module, _, cls = TRAIN_ENGINE.partition(":")
    backend: TrainBackend = getattr(importlib.import_module(module), cls)()
    return backend
