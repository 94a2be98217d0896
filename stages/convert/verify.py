"""Is a conversion right? Every name of either side is accounted for, shapes fit, and the way there and back changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engines.megatron.stored import StoredModel
from stages.convert.hf_files import HFWeights
from stages.convert.torch_dist_files import TorchDistWeights
from storage.layouts.ops import Layout


@dataclass(frozen=True)
class ConversionReport:
    """What was compared, and found equal."""

    num_tensors: int  # on the Hugging Face side
    num_bytes: int


def check_source(layout: Layout, stored: StoredModel, weights: HFWeights) -> None:
    """Do the source's tensors fit config.json? Told from file headers, before anything is written.

    Raises:
        ValueError: with the first tensor that is missing, too much, of another shape, or no copy although the config says so.
    """
    assert set(layout.megatron_names()) == set(stored.pieces), (
        f"layout and model differ in {sorted(set(layout.megatron_names()) ^ set(stored.pieces))}"
    )
    needed, found = layout.hf_names(), set(weights.info)
    if missing := sorted(needed - found):
        raise ValueError(
            f"{weights.directory} lacks {missing[0]} ({len(missing)} tensors missing) which config.json's model has: "
            "download it again, or correct config.json"
        )
    if unknown := sorted(found - needed - set(layout.copies)):
        raise ValueError(
            f"{weights.directory} has {unknown[0]} ({len(unknown)} such tensors), which the {layout.shape.family} layout lacks: "
            "use a plain checkpoint of this family"
        )
    dtypes: dict[str, torch.dtype] = {}  # of stored tensors, which hold a parameter of every layer
    for name, pieces in stored.pieces.items():
        joined, shape = layout.to_megatron(name, lambda hf_name: _meta(weights, hf_name)), list(stored.shape(name))
        sources = ", ".join(f"{hf_name} {list(weights.info[hf_name].shape)}" for hf_name in layout.hf_of(name))
        if list(joined.shape) != shape:
            raise ValueError(
                f"{weights.directory}: {sources} make {list(joined.shape)}, config.json needs {shape}: correct config.json"
            )
        if dtypes.setdefault(pieces[0].key, joined.dtype) != joined.dtype:
            raise ValueError(
                f"{weights.directory}: {sources} has {joined.dtype}, other layers have {dtypes[pieces[0].key]}: "
                "save the checkpoint in one dtype"
            )
    for copy, original in layout.copies.items():
        if copy in weights.info:
            _check_copy(weights, copy, original)


def verify_conversion(
    weights: HFWeights,
    directory: Path,
    layout: Layout,
    stored: StoredModel,
    on_progress: Callable[[int], None] | None = None,
) -> ConversionReport:
    """Read every parameter back from the checkpoint, turn it into Hugging Face tensors and compare these with the source.

    Args:
        weights: the source.
        directory: the torch_dist checkpoint made of it.
        on_progress: called with the number of bytes compared so far.

    Raises:
        ValueError: with the first tensor that differs.
    """
    converted = TorchDistWeights(directory, stored)
    seen: set[str] = set()
    num_bytes = 0
    for name in layout.megatron_names():
        for hf_name, tensor in layout.to_hf(name, converted.fetch(name)):
            compare(hf_name, weights.fetch(hf_name), tensor)
            seen.add(hf_name)
            num_bytes += tensor.nbytes
        if on_progress:
            on_progress(num_bytes)
    assert seen == layout.hf_names()
    return ConversionReport(len(seen), num_bytes)


def compare(name: str, expected: Tensor, found: Tensor) -> None:
    """Raise ValueError unless both tensors have the same type, shape and bits."""
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        raise ValueError(
            f"{name} came back as {found.dtype} {list(found.shape)}, it was {expected.dtype} {list(expected.shape)}: "
            "please report this as a bug"
        )
    if not torch.equal(_bits(expected), _bits(found)):
        raise ValueError(f"{name} came back with other bits: the disk or the memory is faulty, or please report this as a bug")


def _check_copy(weights: HFWeights, copy: str, original: str) -> None:
    if not torch.equal(_bits(weights.fetch(copy)), _bits(weights.fetch(original))):
        raise ValueError(
            f"{weights.directory}: {copy} differs from {original}, but config.json says that they are tied: "
            'set "tie_word_embeddings": false in config.json if they are not'
        )


def _bits(tensor: Tensor) -> Tensor:
    """As integers: NaN equals itself, and -0.0 is not 0.0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _meta(weights: HFWeights, name: str) -> Tensor:
    info = weights.info[name]
    return torch.empty(info.shape, dtype=info.dtype, device="meta")
