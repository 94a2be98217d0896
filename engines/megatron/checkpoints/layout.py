"""Compute where a torch_dist checkpoint stores each parameter of a model: keys, offsets and shapes. Reads no weights.

Checkpoint keys differ from parameter names: the tensors of all layers are stacked along a new first axis, gate and up
projections are two slices, and norms have different keys in Megatron's local modules and in TransformerEngine's.
TransformerEngine fuses a norm with the projection that follows, so the key of the norm's weight contains the
projection's name. Megatron's local layers use the same keys, with two exceptions: in latent attention they use unfused
keys, and for the norm before experts they use the fused key while TransformerEngine uses the unfused one.
(megatron-core 0.16.1: models/gpt/gpt_layer_specs.py, models/gpt/moe_module_specs.py, transformer/moe/experts.py,
transformer/multi_latent_attention.py, extensions/transformer_engine.py.)
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.checkpoints.safe_load import COMMON
from penstock.engines.megatron.model.gpt import build_meta_model
from penstock.engines.megatron.model.transformer_config import training_args
from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel

# isort: split
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

MegatronNames = Literal["local", "te"]
LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")  # no layer index: the tensor stacks all layers
PRE_MLP_NORM, FUSED_PRE_MLP_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
LINEAR = re.compile(r"\.linear_\w+\.weight$")


@dataclass(frozen=True)
class ShardSlice:
    """A slice of a checkpoint tensor, and the slice of the parameter stored in it. Tuples have one entry per axis."""

    key: str  # key of the checkpoint tensor
    offset: tuple[int, ...]  # start of the slice in the checkpoint tensor; stacking axes come first
    sizes: tuple[int, ...]  # size of the slice in the checkpoint tensor; 1 on the stacking axes
    stored_shape: tuple[int, ...]  # shape of the whole checkpoint tensor
    padded: bool  # whether the checkpoint tensor may have extra rows (vocabulary padding)
    part: tuple[slice, ...]  # the slice of the full parameter, per axis

    @property
    def num_stacking_axes(self) -> int:
        """Return the number of leading axes of the checkpoint tensor that stack layers or experts."""
        return len(self.sizes) - len(self.part)

    def toggle_layer_stacking(self, num_layers: int) -> ShardSlice:
        """Return this slice converted from a tensor that stacks all `num_layers` layers to one tensor per layer, or
        vice versa. A slice of a parameter outside of the layers is returned unchanged."""
        match = LAYER.match(self.key)
        if match is None:
            return self
        layer, name = match.groups()
        if layer is None:
            return replace(
                self,
                key=f"decoder.layers.{self.offset[0]}.{name}",
                offset=self.offset[1:],
                sizes=self.sizes[1:],
                stored_shape=self.stored_shape[1:],
            )
        return replace(
            self,
            key=f"decoder.layers.{name}",
            offset=(int(layer), *self.offset),
            sizes=(1, *self.sizes),
            stored_shape=(num_layers, *self.stored_shape),
        )


@dataclass(frozen=True)
class CheckpointLayout:
    """Where a checkpoint stores every parameter of a model."""

    slices: dict[str, list[ShardSlice]]  # global parameter name -> its slices
    te_keys: dict[str, str]  # key of Megatron's local modules -> key of TransformerEngine's
    num_layers: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full (unsharded) shape of the parameter `name`."""
        return tuple(max(part.stop for part in parts) for parts in zip(*(piece.part for piece in self.slices[name])))

    def all_slices(self) -> Iterator[ShardSlice]:
        """Return an iterator over the slices of all parameters."""
        return (piece for slices in self.slices.values() for piece in slices)

    def with_key_names(self, names: MegatronNames) -> CheckpointLayout:
        """Return this layout with checkpoint keys of Megatron's local modules ("local") or of TransformerEngine ("te").
        This layout itself must have local keys."""
        if names == "local":
            return self
        renamed = {
            name: [replace(piece, key=self.te_keys[piece.key]) for piece in pieces]
            for name, pieces in self.slices.items()
        }
        return replace(self, slices=renamed)

    def adapt_to_stored_keys(self, stored_keys: Container[str]) -> CheckpointLayout:
        """Return this layout with the keys in a checkpoint: those of Megatron's local modules or of TransformerEngine,
        layers stacked or one tensor per layer. Slices whose tensor it lacks stay unchanged."""
        local_keys = {te: local for local, te in self.te_keys.items()}
        slices: dict[str, list[ShardSlice]] = {}
        for name, pieces in self.slices.items():
            for piece in pieces:
                keys = (piece.key, self.te_keys.get(piece.key), local_keys.get(piece.key))
                candidates = []
                for renamed in (replace(piece, key=key) for key in keys if key is not None):
                    candidates += [renamed, renamed.toggle_layer_stacking(self.num_layers)]
                stored = next((candidate for candidate in candidates if candidate.key in stored_keys), piece)
                slices.setdefault(name, []).append(stored)
        return replace(self, slices=slices)

    def extra_state_keys(self, names: MegatronNames) -> list[str]:
        """Return the keys of the empty `_extra_state` objects that Megatron's loader expects, one per projection and,
        in some versions of TransformerEngine, per norm and attention module. It ignores superfluous ones."""
        keys = set()
        for piece in self.all_slices():
            modules = []
            if LINEAR.search(piece.key) or (names == "te" and piece.key.endswith("layernorm.weight")):
                modules.append(piece.key.removesuffix(".weight"))
            if names == "te" and piece.key.endswith("self_attention.linear_proj.weight"):
                modules.append(piece.key.replace("linear_proj.weight", "core_attention"))
            stacked = piece.num_stacking_axes
            offset, shape = piece.offset[:stacked] or (0,), piece.stored_shape[:stacked] or (1,)
            shard = f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
            keys |= {f"{module}._extra_state/{shard}" for module in modules}
        return sorted(keys)


def checkpoint_layout(shape: ModelShape) -> CheckpointLayout:
    """Return the checkpoint layout of a model of this shape, with the keys of Megatron's local modules. Builds the
    model on the meta device, for which process groups of one rank are initialized temporarily if there are none."""
    with _single_rank_process_groups():
        slices: dict[str, list[ShardSlice]] = {}
        for name, entry in build_meta_model(shape).sharded_state_dict().items():
            tensors = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            assert all(isinstance(tensor, ShardedTensor) for tensor in tensors), (
                f"{name} is not saved as ShardedTensors"
            )
            # With one rank the offset in the checkpoint tensor is equal to the offset in the parameter.
            slices[name] = [
                ShardSlice(
                    key=tensor.key,
                    offset=tuple(tensor.global_offset),
                    sizes=(1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
                    stored_shape=tuple(tensor.global_shape),
                    padded=tensor.allow_shape_mismatch,
                    part=tuple(
                        slice(at, at + size)
                        for at, size in zip(tensor.global_offset[tensor.prepend_axis_num :], tensor.local_shape)
                    ),
                )
                for tensor in tensors
            ]
    te_keys = {piece.key: to_transformer_engine_key(shape, piece.key) for pieces in slices.values() for piece in pieces}
    return CheckpointLayout(slices, te_keys, shape.num_layers)


def to_transformer_engine_key(shape: ModelShape, key: str) -> str:
    """Return TransformerEngine's key of the tensor that Megatron's local layers store under `key`."""
    match = LAYER.match(key)
    if match is None:
        return key
    layer, name = match.groups()
    if shape.latent and name in LATENT_NORMS:
        return key.removesuffix(name) + LATENT_NORMS[name]
    if name not in (PRE_MLP_NORM, FUSED_PRE_MLP_NORM):
        return key
    has_experts = shape.experts is not None and (layer is None or int(layer) >= shape.experts.num_dense_layers)
    return key.removesuffix(name) + (PRE_MLP_NORM if has_experts else FUSED_PRE_MLP_NORM)


def write_common_files(directory: Path, shape: ModelShape, iteration: int) -> None:
    """Write `metadata.json` and `common.pt`, without which Megatron does not accept a directory as a checkpoint. The
    latter has what training scripts and converters read: the model as Megatron-LM arguments, and the iteration."""
    common = {
        "args": argparse.Namespace(**training_args(shape)),
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": shape.experts is not None},
    }
    torch.save(common, directory / COMMON)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


@contextmanager
def _single_rank_process_groups() -> Iterator[None]:
    """Initialize process groups of one rank, which Megatron needs to build a model, unless there are some."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        init_parallel(0, 1, f"file://{directory}/world", threads=torch.get_num_threads(), backend="gloo")
        try:
            yield
        finally:
            shutdown_parallel()
