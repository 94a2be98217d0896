"""What an export consists of: which Hugging Face tensors, in which files and number types, and what config.json says of them.

Each file is a part of the work that can be done by itself. Where the files go, and by whom they are written, is `to_hf`'s.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engines.megatron.shape import ModelShape
from engines.megatron.stored import StoredModel, stored_model
from stages.convert.fp8 import QUANTIZATION, is_quantised, quantise, scale_shape
from stages.convert.hf_assets import CARRIED, copy_assets
from stages.convert.hf_files import HFWeights, TensorInfo
from stages.convert.hf_writer import Named, Shard, shards, write_index, write_shard
from stages.convert.shares import Tally
from stages.convert.source_check import SCALE
from stages.convert.torch_dist_files import TorchDistWeights
from storage.layouts import layout_for
from storage.layouts.ops import Layout

SHARD_BYTES = 5_000_000_000
KEEPS_DTYPE = "mlp.router.expert_bias"  # added to scores to choose experts: in bf16 it would choose others
ExportDtype = Literal["float32", "bfloat16", "float16", "fp8"]
Mtp = Literal["skip", "keep"]


@dataclass(frozen=True)
class Origin:
    """Whose model it is, and in which form it leaves."""

    directory: Path  # with config.json, tokenizer and so on, which are carried over
    dtype: ExportDtype | None = None  # of the weights; None: the stored one
    vocab_size: int | None = None  # rows of embedding and head, where that is not config.json's
    mtp: Mtp = "skip"  # whether prediction layers in `directory` are written too; those that were kept always are

    def shape(self) -> ModelShape:
        """Of the model."""
        shape = ModelShape.from_hf(self.directory)
        return shape.model_copy(update={"vocab_size": self.vocab_size}) if self.vocab_size else shape


@dataclass(frozen=True)
class File:
    """A part of the work: one file of the result."""

    shard: Shard
    sources: tuple[str, ...]  # of every group: its Megatron name, or the Hugging Face name of a tensor that is only carried

    @property
    def name(self) -> str:
        return self.shard.file

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes


class Export:
    """A planned export: which tensors, in which files. A context manager: the origin's files stay open inside.

    Raises:
        ModelError: no checkpoint, or one that does not fit config.json.
    """

    def __init__(self, source: Path, origin: Origin, shard_bytes: int = SHARD_BYTES, stored: StoredModel | None = None) -> None:
        self.origin, shape = origin, origin.shape()
        self.layout: Layout = layout_for(shape)
        self.stored = stored or stored_model(shape)
        self.weights = TorchDistWeights(source, self.stored)
        self.carried = _carried(origin, self.layout)
        names = [*self.layout.megatron_names(), *(self.carried.info if self.carried else ())]
        groups = {name: self._group(name) for name in names}
        self.shards = shards(list(groups.values()), shard_bytes)
        waiting = iter(names)
        self.parts = [File(shard, tuple(next(waiting) for _ in shard.groups)) for shard in self.shards]
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)

    def __enter__(self) -> Export:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.carried:
            self.carried.__exit__(*exception)

    def write(self, part: File, directory: Path, counter: Tally) -> dict[str, str]:
        """Write one file. Returns its hash by its name."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for source in part.sources:
                for hf_name, tensor in self._made(source):
                    yield hf_name, tensor
                    counter.add(tensor.nbytes)

        return {part.shard.file: write_shard(directory / part.shard.file, part.shard, tensors())}

    def write_rest(self, directory: Path) -> None:
        """Config, tokenizer and index: what goes with the weights."""
        copy_assets(self.origin.directory, directory)
        write_index(directory, self.shards)
        _correct(directory / "config.json", self._changes())

    def _group(self, source: str) -> list[Named]:
        """Names and shapes of the Hugging Face tensors that are made of one Megatron parameter, or carried."""
        if self.carried and source in self.carried.info:
            found = [(source, self.carried.info[source])]
        else:
            meta = torch.empty(self.stored.shape(source), dtype=self.weights.dtype(source), device="meta")
            found = [(name, TensorInfo(part.dtype, tuple(part.shape))) for name, part in self.layout.to_hf(source, meta)]
        return [named for name, info in found for named in self._written_as(source, name, info)]

    def _written_as(self, source: str, name: str, info: TensorInfo) -> list[Named]:
        if self.origin.dtype is None or source.endswith(KEEPS_DTYPE):
            return [(name, info)]
        if self.origin.dtype != "fp8":
            return [(name, replace(info, dtype=getattr(torch, self.origin.dtype)))]
        if not is_quantised(name, info.shape):
            return [(name, replace(info, dtype=torch.bfloat16))]
        scales = TensorInfo(torch.float32, scale_shape(info.shape))
        return [(name, replace(info, dtype=torch.float8_e4m3fn)), (name + SCALE, scales)]

    def _made(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a group, as they are written."""
        if self.carried and source in self.carried.info:
            yield from self._converted(source, source, self.carried.fetch(source))
            return
        with self.weights.lent(source) as whole:
            for name, tensor in self.layout.to_hf(source, whole):
                yield from self._converted(source, name, tensor)

    def _converted(self, source: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        planned = self._written_as(source, name, TensorInfo(tensor.dtype, tuple(tensor.shape)))
        if len(planned) == 1:
            yield name, tensor.to(planned[0][1].dtype)
        else:
            yield from zip([planned_name for planned_name, _ in planned], quantise(tensor), strict=True)

    def _changes(self) -> dict[str, Any]:
        """What config.json must say of the weights as they are written; None takes an entry away."""
        named = dict(named for shard in self.shards for named in shard.tensors)
        changes: dict[str, Any] = {"quantization_config": None}
        if self.origin.dtype == "fp8":
            matrices = [name for name, info in named.items() if name.endswith(".weight") and len(info.shape) == 2]
            plain = sorted(name.removesuffix(".weight") for name in matrices if name + SCALE not in named)
            changes["quantization_config"] = {**QUANTIZATION, "modules_to_not_convert": plain}
        if self.origin.vocab_size:
            changes["vocab_size"] = self.origin.vocab_size
        if self.carried is None:
            changes["num_nextn_predict_layers"] = 0
        sizes: Counter[torch.dtype] = Counter()
        for name, info in named.items():
            sizes[info.dtype] += 0 if name.endswith(SCALE) else info.num_bytes
        sizes.pop(torch.float8_e4m3fn, None)  # what is not quantised says in which type the model computes
        changes["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        return changes


def _carried(origin: Origin, layout: Layout) -> HFWeights | None:
    """The tensors that are written although Megatron has no place for them."""
    if (origin.directory / CARRIED).is_file():
        return HFWeights(origin.directory, [origin.directory / CARRIED])
    if origin.mtp == "skip":
        return None
    found = HFWeights(origin.directory)
    found.info = {name: info for name, info in found.info.items() if layout.carried(name)}
    return found if found.info else None


def _correct(path: Path, changes: dict[str, Any]) -> None:
    """Let config.json say of the weights what is true of these files: loaders believe it more than the files."""
    config = json.loads(path.read_text())
    new = dict(config)
    for entry, value in changes.items():
        key = "torch_dtype" if entry == "dtype" and "torch_dtype" in config else entry  # older transformers
        if value is None:
            new.pop(key, None)
        elif value or new.get(key):  # a zero is written over a number only
            new[key] = value
    if new != config:
        path.write_text(json.dumps(new, indent=2) + "\n")
