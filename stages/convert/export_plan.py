"""Plan an export: its Hugging Face tensors, their files and dtypes, and the changes to config.json.

Each file is a work item. `to_hf` decides where files are written and which process writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.families.family import source_hash
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorLayout
from penstock.engines.weights.fp8_blocks import QUANTIZATION, quantize, scale_shape, should_quantize
from penstock.engines.weights.hf_headers import SCALE
from penstock.stages.convert.config import ExportDtype, Mtp
from penstock.stages.convert.hf_checkpoint import (
    CARRIED,
    HFWeights,
    NamedTensor,
    Shard,
    ShardFile,
    TensorInfo,
    assets_hash,
    copy_assets,
    plan_shards,
    write_index,
    write_shard,
)
from penstock.stages.convert.work import Progress
from penstock.storage.disk import map_in_threads

SHARD_BYTES = 5_000_000_000
NUM_THREADS = 4  # that read a checkpoint; each holds up to three copies of a parameter
# Exported in its own dtype, because rounding it to bf16 would change which experts are selected: name in Megatron, and
# in Hugging Face's multi-token prediction layers, which are copied.
KEEPS_DTYPE = ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")


class ParameterSource(Protocol):
    """Full Megatron parameters that are read one at a time."""

    @property
    def meta(self) -> Mapping[str, Tensor]:
        """Return parameter name -> full tensor on the meta device."""

    def open_parameter(self, name: str) -> AbstractContextManager[Tensor]:
        """Return a context with a full parameter on the CPU, valid inside the `with` block only."""


@dataclass(frozen=True)
class Origin:
    """The model that a checkpoint belongs to, and the options of its export."""

    directory: Path  # with config.json and tokenizer, which are copied into the export
    dtype: ExportDtype | None = None  # of exported weights; None: as in the checkpoint
    vocab_size: int | None = None  # vocabulary rows of embedding and LM head; None: vocab_size of config.json
    mtp: Mtp = (
        "skip"  # whether to export the MTP layers of `directory`; a converted model's `CARRIED` file is always exported
    )
    family_path: str | None = field(default=None, repr=False)  # --model-family-path

    def shape(self) -> ModelShape:
        """Return the shape of the model, with the vocabulary size of the export."""
        shape = read_shape(self.directory, self.family_path)
        return shape.model_copy(update={"vocab_size": self.vocab_size}) if self.vocab_size else shape

    def fingerprint(self) -> str:
        """Return a string that changes whenever config, tokenizer or multi-token prediction tensors (`CARRIED`) in
        `directory` change, or the source code of a user-defined model family."""
        family_path = self.shape().family_path
        return assets_hash(self.directory) + (f" {source_hash(family_path)}" if family_path else "")


@dataclass(frozen=True)
class ExportFile:
    """A work item: one weight file of the export."""

    shard: Shard
    sources: tuple[
        str, ...
    ]  # per group of the shard: name of a Megatron parameter, or of a tensor copied from the origin

    @property
    def name(self) -> str:
        return self.shard.file

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes


class ExportPlan:
    """The plan of a Hugging Face export. A context manager: it keeps the files of copied tensors open.

    Args:
        meta: Megatron parameter name -> full tensor on the meta device, which has its shape and dtype.
        origin: model of the parameters, and options of the export.
        shard_bytes: maximum size of a safetensors file in bytes.
    """

    def __init__(self, meta: Mapping[str, Tensor], origin: Origin, shard_bytes: int = SHARD_BYTES) -> None:
        self.meta, self.origin = meta, origin
        self.layout: TensorLayout = tensor_layout(origin.shape())
        self.carried = _open_carried_weights(origin, self.layout)
        names = [*self.layout.megatron_names(), *(self.carried.info if self.carried else ())]
        self.shards = plan_shards([self._plan_exported_tensors(name) for name in names], shard_bytes)
        remaining = iter(names)
        self.files = [ExportFile(shard, tuple(next(remaining) for _ in shard.groups)) for shard in self.shards]
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)

    def __enter__(self) -> ExportPlan:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.carried:
            self.carried.__exit__(*exception)

    def write_file(self, file: ExportFile, directory: Path, weights: ParameterSource, progress: Progress) -> str:
        """Write one weight file of the export from a checkpoint's `weights`; return its xxh3-128 hash."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for source in file.sources:  # a Megatron parameter, or a tensor that is copied from the origin's directory
                copied = self.carried.fetch(source) if self.carried and source in self.carried.info else None
                with weights.open_parameter(source) if copied is None else nullcontext(copied) as parameter:
                    for hf_name, tensor in self._convert_parameter(source, parameter):
                        yield hf_name, tensor
                        progress.add(tensor.nbytes)

        return write_shard(directory / file.name, file.shard, tensors())

    def write_files(self, directory: Path, weights: ParameterSource) -> dict[str, str]:
        """Write all weight files of the export in parallel from a checkpoint's `weights`; return file name -> xxh3-128
        hash."""
        progress = Progress(self.num_bytes, None)
        write = partial(self.write_file, directory=directory, weights=weights, progress=progress)
        hashes = map_in_threads(write, self.files, NUM_THREADS)
        return {file.name: digest for file, digest in zip(self.files, hashes)}

    def write_gathered(self, directory: Path, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write all weight files of the export from (Megatron parameter name, full tensor) of every parameter, in any
        order; return file name -> xxh3-128 hash."""
        with ExitStack() as stack:
            files = [stack.enter_context(ShardFile(directory / file.name, file.shard)) for file in self.files]
            file_of = {source: files[index] for index, file in enumerate(self.files) for source in file.sources}
            carried = ((name, self.carried.fetch(name)) for name in self.carried.info) if self.carried else ()
            for source, parameter in chain(weights, carried):
                for name, tensor in self._convert_parameter(source, parameter.detach()):
                    file_of[source].write(name, tensor)
        return {file.path.name: file.hash() for file in files}

    def write_config_and_index(self, directory: Path) -> None:
        """Write config.json, the tokenizer's files and the index of the weight files."""
        copy_assets(self.origin.directory, directory)
        write_index(directory, self.shards)
        path = directory / "config.json"  # must describe the exported weights: loaders rely on it
        config = json.loads(path.read_text())
        new = dict(config)
        for entry, value in self._config_changes().items():
            key = "torch_dtype" if entry == "dtype" and "torch_dtype" in config else entry  # key of older transformers
            if value is None:
                new.pop(key, None)
            elif value or new.get(key):  # a zero only replaces a nonzero value; it is not added
                new[key] = value
        if new != config:
            path.write_text(json.dumps(new, indent=2) + "\n")

    def _plan_exported_tensors(self, source: str) -> list[NamedTensor]:
        """Return names, dtypes and shapes of the exported tensors of `source`, which names a Megatron parameter or a
        tensor that is copied from the origin's directory."""
        if self.carried and source in self.carried.info:
            return self._plan_tensor_and_scales(source, source, self.carried.info[source])
        parts = self.layout.to_hf(source, self.meta[source])
        infos = [(name, TensorInfo(part.dtype, tuple(part.shape))) for name, part in parts]
        return [named for name, info in infos for named in self._plan_tensor_and_scales(source, name, info)]

    def _plan_tensor_and_scales(self, source: str, name: str, info: TensorInfo) -> list[NamedTensor]:
        """Return name, dtype and shape of an exported tensor and, if it is quantized to fp8, of its scales."""
        if self.origin.dtype is None or source.endswith(KEEPS_DTYPE):
            return [(name, info)]
        if self.origin.dtype != "fp8":
            return [(name, replace(info, dtype=getattr(torch, self.origin.dtype)))]
        if not should_quantize(name, info.shape):
            return [(name, replace(info, dtype=torch.bfloat16))]
        scales = TensorInfo(torch.float32, scale_shape(info.shape))
        return [(name, replace(info, dtype=torch.float8_e4m3fn)), (name + SCALE, scales)]

    def _convert_parameter(self, source: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the exported tensors of `source`, whose value is `parameter`."""
        if self.carried and source in self.carried.info:
            yield from self._convert_tensor(source, source, parameter)
            return
        for name, tensor in self.layout.to_hf(source, parameter):
            yield from self._convert_tensor(source, name, tensor)

    def _convert_tensor(self, source: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor in the dtype of the export and, if it is quantized to fp8, its scales."""
        planned = self._plan_tensor_and_scales(source, name, TensorInfo(tensor.dtype, tuple(tensor.shape)))
        if len(planned) == 1:
            yield name, tensor.to(planned[0][1].dtype)
        else:
            yield from zip([planned_name for planned_name, _ in planned], quantize(tensor), strict=True)

    def _config_changes(self) -> dict[str, Any]:
        """Return the config.json entries that must change to describe the exported weights; None removes an entry."""
        infos = dict(named for shard in self.shards for named in shard.tensors)
        changes: dict[str, Any] = {"quantization_config": None}
        if self.origin.dtype == "fp8":
            matrices = [name for name, info in infos.items() if name.endswith(".weight") and len(info.shape) == 2]
            plain = sorted(name.removesuffix(".weight") for name in matrices if name + SCALE not in infos)
            changes["quantization_config"] = {**QUANTIZATION, "modules_to_not_convert": plain}
        if self.origin.vocab_size:
            changes["vocab_size"] = self.origin.vocab_size
        if self.carried is None:
            changes["num_nextn_predict_layers"] = 0
        sizes: Counter[torch.dtype] = Counter()
        for name, info in infos.items():
            sizes[info.dtype] += 0 if name.endswith(SCALE) else info.num_bytes
        sizes.pop(torch.float8_e4m3fn, None)  # unquantized weights have the compute dtype
        changes["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        return changes


def _open_carried_weights(origin: Origin, layout: TensorLayout) -> HFWeights | None:
    """Return the tensors (multi-token prediction) that are copied from the origin's directory, because Megatron's model
    does not have them; None if there are none."""
    if (origin.directory / CARRIED).is_file():
        return HFWeights(origin.directory, [origin.directory / CARRIED])
    if origin.mtp == "skip":
        return None
    weights = HFWeights(origin.directory)
    weights.info = {name: info for name, info in weights.info.items() if layout.is_untrained(name)}
    return weights if weights.info else None
