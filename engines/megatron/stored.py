"""Where Megatron keeps a model's weights inside a torch_dist checkpoint, told without any weights.

A checkpoint's names are not those of parameters: layers are stacked along a new first axis, norms go by other names
(`stored_names.py`), and gated projections lie in two pieces. A meta model knows all of it, so `stages/convert` asks here and needs
no model in memory. Saving and loading a running trainer is `checkpoint.py`'s.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from engines.megatron.door import open_door
from engines.megatron.model_options import training_args
from engines.megatron.parallel import init_parallel, shutdown_parallel
from engines.megatron.safe_load import COMMON
from engines.megatron.shape import ModelShape
from engines.megatron.stored_names import te_key


@dataclass(frozen=True)
class StoredPiece:
    """A box of a stored tensor, and the box of a parameter that lies there. All tuples are per axis."""

    key: str  # of the stored tensor
    offset: tuple[int, ...]  # in the stored tensor, with the axes that stack layers in front
    sizes: tuple[int, ...]  # likewise; 1 on the stacking axes
    stored_shape: tuple[int, ...]  # of the whole stored tensor
    padded: bool  # whether the stored tensor may have more rows (a vocabulary padded for tensor parallelism)
    part: tuple[slice, ...]  # of the full parameter


@dataclass
class StoredModel:
    """Every parameter's pieces."""

    pieces: dict[str, list[StoredPiece]] = field(default_factory=dict)  # global parameter name -> pieces
    te_keys: dict[str, str] = field(default_factory=dict)  # local key -> TransformerEngine's (`stored_names.py`)
    num_layers: int = 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a parameter."""
        return tuple(max(part.stop for part in parts) for parts in zip(*(piece.part for piece in self.pieces[name])))


def stored_model(shape: ModelShape) -> StoredModel:
    """How a checkpoint of a model of this shape is laid out. Makes a world of one rank for the call if there is none."""
    with _single_rank():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        from engines.megatron.model import build_meta_model

        stored = StoredModel(num_layers=shape.num_layers)
        for name, entry in build_meta_model(shape).sharded_state_dict().items():
            boxes = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            assert all(isinstance(box, ShardedTensor) for box in boxes), f"{name} has an unknown kind of sharding"
            stored.pieces[name] = [_piece(box) for box in boxes]
            stored.te_keys |= {piece.key: te_key(shape, piece.key) for piece in stored.pieces[name]}
        return stored


def describe_checkpoint(directory: Path, shape: ModelShape) -> None:
    """Write `metadata.json` and `common.pt`, which make a directory of tensors a Megatron checkpoint. The latter holds what training
    scripts and converters look for: the model as Megatron's command line would say it, and whether layers are stacked."""
    open_door()
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    common = {
        "args": argparse.Namespace(**training_args(shape)),
        "iteration": 0,
        "checkpoint_version": 3.0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": shape.experts is not None},
    }
    torch.save(common, directory / COMMON)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _piece(box: object) -> StoredPiece:
    """A Megatron ShardedTensor of a world of one rank, where a box's place in the stored tensor is its place in the parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    assert isinstance(box, ShardedTensor)
    stacked = box.prepend_axis_num
    return StoredPiece(
        key=box.key,
        offset=tuple(box.global_offset),
        sizes=(1,) * stacked + tuple(box.local_shape),
        stored_shape=tuple(box.global_shape),
        padded=box.allow_shape_mismatch,
        part=tuple(slice(start, start + size) for start, size in zip(box.global_offset[stacked:], box.local_shape)),
    )


@contextmanager
def _single_rank() -> Iterator[None]:
    """A world of one rank: Megatron builds no model without process groups."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        init_parallel(0, 1, f"file://{directory}/world", threads=torch.get_num_threads(), backend="gloo")
        try:
            yield
        finally:
            shutdown_parallel()
