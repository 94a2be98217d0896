"""Is a conversion right? Every name of either side is accounted for, shapes fit, and the way there and back changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.megatron.shape import ModelShape
from engines.megatron.stored import StoredModel, stored_model
from stages.convert.hf_files import HFWeights
from stages.convert.source_check import check_tensors
from stages.convert.torch_dist_files import TorchDistWeights
from storage.disk import in_parallel
from storage.errors import ModelError
from storage.layouts import layout_for
from storage.layouts.ops import Layout
from storage.refs import Commit
from storage.store import Store

NUM_THREADS = 2  # each holds a parameter three times


@dataclass(frozen=True)
class ConversionReport:
    """What was compared, and found equal."""

    num_tensors: int  # on the Hugging Face side
    num_bytes: int
    logits: str = ""  # what came of comparing them

    def rows(self) -> list[tuple[str, str]]:
        """For people: title and text."""
        return [
            ("names", f"{self.num_tensors} tensors, each accounted for on both sides"),
            ("shapes", "all as config.json says"),
            ("bits", f"{self.num_bytes:,} bytes came back as they were"),
            ("logits", self.logits),
        ]


def verify_standing(store: Store, commit: Commit, hf_dir: str | Path) -> ConversionReport:
    """Everything that can be known of a converted model: names, shapes and bits, and logits, unless they were compared when it was made.

    Args:
        store: that the commit's files are in.
        commit: of the model.
        hf_dir: what it was made of.

    Raises:
        ModelError: something is wrong.
    """
    from stages.convert.probe import compare_logits

    with HFWeights(hf_dir) as weights, store.reading(commit) as directory:
        shape = ModelShape.from_hf(hf_dir)
        if "convert/num_tensors" in commit.summary:
            report = ConversionReport(int(commit.summary["convert/num_tensors"]), int(commit.summary["convert/num_bytes"]))
        else:
            layout, stored = layout_for(shape), stored_model(shape)
            check_source(layout, stored, weights)
            report = verify_conversion(weights, directory, layout, stored)
        if "convert/logits_difference" in commit.summary:
            return replace(report, logits=commit.state["logits"])
        return replace(report, logits=str(compare_logits(directory, Path(hf_dir))))


def check_source(layout: Layout, stored: StoredModel, weights: HFWeights) -> None:
    """Do the source's tensors fit config.json? Told from file headers, before anything is written.

    Raises:
        ModelError: with the first tensor that is missing, too much, of another shape, or no copy although the config says so.
    """
    assert set(layout.megatron_names()) == set(stored.pieces), (
        f"layout and model differ in {sorted(set(layout.megatron_names()) ^ set(stored.pieces))}"
    )
    shape = ModelShape.from_hf(weights.directory)
    check_tensors(weights.directory, {name: info.shape for name, info in weights.info.items()}, layout, shape)
    dtypes: dict[str, torch.dtype] = {}  # of stored tensors, which hold a parameter of every layer
    for name, pieces in stored.pieces.items():
        joined = layout.to_megatron(name, lambda hf_name: _meta(weights, hf_name))
        assert joined.shape == stored.shape(name), f"{name}: layout and model differ"
        if dtypes.setdefault(pieces[0].key, joined.dtype) != joined.dtype:
            raise ModelError(
                f"{weights.directory}: {layout.hf_of(name)[0]} has {joined.dtype}, other layers have {dtypes[pieces[0].key]}: "
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
    on_bytes: Callable[[int], object] = lambda count: None,
) -> ConversionReport:
    """Read every parameter back from the checkpoint, turn it into Hugging Face tensors and compare these with the source.

    It goes by torch's own reader and the other direction of the layout, so it shares no step with how the checkpoint was written.

    Args:
        weights: the source.
        directory: the torch_dist checkpoint made of it.
        on_bytes: called with the size of everything that was compared.

    Raises:
        ModelError: with the first tensor that differs.
    """
    converted = TorchDistWeights(directory, stored)

    def check(name: str) -> list[tuple[str, int]]:
        with converted.lent(name) as whole:
            found = layout.to_hf(name, whole)
            for hf_name, tensor in found:
                compare(hf_name, weights, tensor)
                on_bytes(tensor.nbytes)
            return [(hf_name, tensor.nbytes) for hf_name, tensor in found]

    seen = dict(entry for entries in in_parallel(check, layout.megatron_names(), NUM_THREADS) for entry in entries)
    assert seen.keys() == layout.hf_names()
    return ConversionReport(len(seen), sum(seen.values()))


def compare(name: str, weights: HFWeights, found: Tensor) -> None:
    """Raise ModelError unless a tensor has the type, the shape and the bits of the source's: NaN equals itself, and -0.0 is not 0.0."""
    info, at = weights.info[name], 0
    if (info.dtype, info.shape) != (found.dtype, tuple(found.shape)):
        raise ModelError(
            f"{name} came back as {found.dtype} {list(found.shape)}, it was {info.dtype} {list(info.shape)}: "
            "please report this as a bug"
        )
    content = found.contiguous().view(-1).view(torch.uint8).numpy()
    for piece in weights.rows(name):
        if not np.array_equal(content[at : at + len(piece)], np.frombuffer(piece, dtype=np.uint8)):
            raise ModelError(
                f"{name} came back with other bits: the disk or the memory is faulty, or please report this as a bug"
            )
        at += len(piece)


def _check_copy(weights: HFWeights, copy: str, original: str) -> None:
    one, other = weights.info[copy], weights.info[original]
    pieces = zip(weights.rows(copy), weights.rows(original), strict=True)
    if one != other or any(bytes(piece) != bytes(another) for piece, another in pieces):
        raise ModelError(
            f"{weights.directory}: {copy} differs from {original}, but config.json says that they are tied: "
            'set "tie_word_embeddings": false in config.json if they are not'
        )


def _meta(weights: HFWeights, name: str) -> Tensor:
    info = weights.info[name]
    return torch.empty(info.shape, dtype=info.dtype, device="meta")
