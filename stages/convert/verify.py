"""Verify a conversion: both formats have the same tensors, shapes match config.json, and converting back reproduces
every bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.families.ops import TensorLayout
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, checkpoint_layout
from penstock.engines.weights.hf_headers import check_tensors
from penstock.stages.convert.hf.weights import HFWeights
from penstock.stages.convert.torch_dist_reader import TorchDistWeights
from penstock.storage.commit import Commit
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import ModelError
from penstock.storage.store import Store

NUM_THREADS = 2  # each thread holds up to three copies of a parameter


@dataclass(frozen=True)
class ConversionReport:
    """Result of a successful verification."""

    num_tensors: int  # number of compared Hugging Face tensors
    num_bytes: int
    logits: str = ""  # result of the logits comparison, as text

    def report_rows(self) -> list[tuple[str, str]]:
        """Return (title, text) pairs for the terminal."""
        return [
            ("names", f"{self.num_tensors} tensors, the same in both formats"),
            ("shapes", "all match config.json"),
            ("bits", f"{self.num_bytes:,} bytes are identical after the round trip"),
            ("logits", self.logits),
        ]


def verify_existing(
    store: Store, commit: Commit, hf_dir: str | Path, family_path: str | None = None
) -> ConversionReport:
    """Compare names, shapes, bits and logits of a converted model with its Hugging Face source. Checks that the commit
    records as done during the conversion are not repeated.

    Args:
        store: store of the model's files.
        commit: commit of the converted model.
        hf_dir: Hugging Face directory that it was converted from.
        family_path: `--model-family-path`.

    Raises:
        ModelError: names, shapes, bits or logits differ.
    """
    from penstock.stages.convert.logits import compare_logits

    with HFWeights(hf_dir) as weights, store.reading(commit) as directory:
        shape, summary = read_shape(hf_dir, family_path), commit.summary
        if "convert/num_tensors" in summary:
            report = ConversionReport(int(summary["convert/num_tensors"]), int(summary["convert/num_bytes"]))
        else:
            layout, checkpoint = tensor_layout(shape), checkpoint_layout(shape)
            check_source_tensors(layout, checkpoint, weights)
            report = verify_conversion(weights, directory, layout, checkpoint)
        if "convert/logits_difference" in summary:
            return replace(report, logits=commit.state["logits"])
        return replace(report, logits=str(compare_logits(directory, Path(hf_dir), family_path=family_path)))


def check_source_tensors(layout: TensorLayout, checkpoint: CheckpointLayout, weights: HFWeights) -> None:
    """Check that the tensors of a Hugging Face directory match config.json. Reads only file headers, except for
    duplicates of tensors (a tied head), whose contents are compared.

    Raises:
        ModelError: naming the first tensor that is missing, unknown, has the wrong shape or dtype, or differs from the
            tensor that it should duplicate.
    """
    assert set(layout.megatron_names()) == set(checkpoint.slices), (
        "`TensorLayout` and model have different names: "
        f"{sorted(set(layout.megatron_names()) ^ set(checkpoint.slices))}"
    )
    check_tensors(weights.directory, {name: info.shape for name, info in weights.info.items()}, layout)

    def meta_tensor(name: str) -> Tensor:
        return torch.empty(weights.info[name].shape, dtype=weights.info[name].dtype, device="meta")

    dtypes: dict[str, torch.dtype] = {}  # by checkpoint key; one tensor stacks the parameters of all layers
    for name, pieces in checkpoint.slices.items():
        joined = layout.to_megatron(name, meta_tensor)
        assert joined.shape == checkpoint.shape(name), f"{name}: `TensorLayout` and model have different shapes"
        expected = dtypes.setdefault(pieces[0].key, joined.dtype)
        if expected != joined.dtype:
            raise ModelError(
                f"{weights.directory}: {layout.hf_names_of(name)[0]} has dtype {joined.dtype}, but the same tensor "
                f"of another layer has {expected}: save the checkpoint in one dtype"
            )
    for copy, original in layout.copies.items():
        if copy not in weights.info:
            continue
        chunks = zip(weights.read_rows(copy), weights.read_rows(original), strict=True)
        if weights.info[copy] != weights.info[original] or any(bytes(left) != bytes(right) for left, right in chunks):
            raise ModelError(
                f"{weights.directory}: {copy} differs from {original}, but config.json says that they are tied: "
                'set "tie_word_embeddings": false in config.json if they are not'
            )


def verify_conversion(
    weights: HFWeights,
    directory: Path,
    layout: TensorLayout,
    checkpoint: CheckpointLayout,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> ConversionReport:
    """Read every parameter back from the checkpoint, split it into Hugging Face tensors, and compare these with the
    source bit for bit.

    Verification is independent of writing: it reads torch's index of the checkpoint and uses `TensorLayout.to_hf`,
    whereas writing uses `TensorLayout.to_megatron`.

    Args:
        weights: weights of the Hugging Face source.
        directory: directory of the torch_dist checkpoint.
        layout: mapping between the model's Hugging Face and Megatron tensors.
        checkpoint: checkpoint layout of the model.
        on_bytes: called with the size in bytes of every compared tensor.

    Raises:
        ModelError: naming the first tensor that differs.
    """
    converted = TorchDistWeights(directory, checkpoint)

    def check_parameter(name: str) -> list[tuple[str, int]]:
        with converted.open_parameter(name) as parameter:
            tensors = layout.to_hf(name, parameter)
            for hf_name, tensor in tensors:
                check_bits_equal_source(hf_name, weights, tensor)
                on_bytes(tensor.nbytes)
            return [(hf_name, tensor.nbytes) for hf_name, tensor in tensors]

    sizes = dict(
        entry for entries in map_in_threads(check_parameter, layout.megatron_names(), NUM_THREADS) for entry in entries
    )
    assert sizes.keys() == layout.hf_names()
    return ConversionReport(len(sizes), sum(sizes.values()))


def check_bits_equal_source(name: str, weights: HFWeights, tensor: Tensor) -> None:
    """Raise ModelError unless `tensor` has the dtype, shape and bits of the source tensor `name`. Bits are compared,
    not values: a NaN equals itself, and -0.0 differs from 0.0."""
    info, at = weights.info[name], 0
    if (info.dtype, info.shape) != (tensor.dtype, tuple(tensor.shape)):
        raise ModelError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} after the round trip, but {info.dtype} "
            f"{list(info.shape)} in the source: please report this as a bug"
        )
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for chunk in weights.read_rows(name):
        if not np.array_equal(content[at : at + len(chunk)], np.frombuffer(chunk, dtype=np.uint8)):
            raise ModelError(
                f"{name} has different bits after the round trip: check disk and memory, or report this as a bug"
            )
        at += len(chunk)
