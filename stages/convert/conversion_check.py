"""Verify a conversion in two ways: the tensors (both formats have the same tensors, shapes match config.json, and
converting back reproduces every bit), and the logits.

The logits of the converted model are compared with those of transformers. This verifies that names, shapes and
config.json are interpreted correctly, which equal weights do not prove.

Both implementations compute a few tokens in fp32 on this machine, one after the other. For a large model only a part is
compared, to bound time and memory: the first and last layers, some experts, some rows of the vocabulary, with the
model's own weights. If this part does not fit into memory either, the comparison is skipped, and its result states the
reason.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from penstock.engines.families import family_of, read_config, read_shape, shape_from_config, tensor_layout
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorLayout
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, checkpoint_layout
from penstock.engines.megatron.parallel import device, init_parallel, shutdown_parallel
from penstock.engines.training import PackedImages
from penstock.engines.weights.hf_headers import check_tensors
from penstock.stages.convert.hf_checkpoint import HFWeights, name_in_file, stack_expert
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.storage.commit import Commit
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import ModelError, PenstockError
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
    """Compare names, shapes, bits and logits of a converted model with its Hugging Face source. Checks that were done
    during the conversion, according to `commit`, are not repeated."""
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
    duplicates of tensors (a tied head), whose contents are compared."""
    assert set(layout.megatron_names()) == set(checkpoint.slices), (
        "`TensorLayout` and model have different names: "
        f"{sorted(set(layout.megatron_names()) ^ set(checkpoint.slices))}"
    )
    check_tensors(weights.directory, {name: info.shape for name, info in weights.info.items()}, layout)

    dtypes: dict[str, torch.dtype] = {}  # by checkpoint key; one tensor stacks the parameters of all layers
    for name, pieces in checkpoint.slices.items():
        joined = layout.to_megatron(
            name, lambda hf: torch.empty(weights.info[hf].shape, dtype=weights.info[hf].dtype, device="meta")
        )
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
    whereas writing uses `TensorLayout.to_megatron`. `on_bytes` is called with the size of every compared tensor.
    """
    converted = TorchDistWeights(directory, checkpoint)

    def compare_parameter(name: str) -> list[tuple[str, int]]:
        with converted.open_parameter(name) as parameter:
            tensors = layout.to_hf(name, parameter)
            for hf_name, tensor in tensors:
                if difference := difference_from_source(hf_name, weights, tensor):
                    raise ModelError(f"{hf_name} {difference}")
                on_bytes(tensor.nbytes)
            return [(hf_name, tensor.nbytes) for hf_name, tensor in tensors]

    results = map_in_threads(compare_parameter, layout.megatron_names(), NUM_THREADS)
    sizes = dict(entry for entries in results for entry in entries)
    assert sizes.keys() == layout.hf_shapes.keys()
    return ConversionReport(len(sizes), sum(sizes.values()))


def difference_from_source(name: str, weights: HFWeights, tensor: Tensor) -> str:
    """Return how `tensor` differs from the source tensor `name` in dtype, shape or bits, or "" if it does not. Bits are
    compared, not values: a NaN equals itself, and -0.0 differs from 0.0."""
    info, at = weights.info[name], 0
    if (info.dtype, info.shape) != (tensor.dtype, tuple(tensor.shape)):
        return (
            f"is {tensor.dtype} {list(tensor.shape)} after conversion to Megatron and back, but {info.dtype} "
            f"{list(info.shape)} in the source: please report this as a bug"
        )
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for chunk in weights.read_rows(name):
        if not np.array_equal(content[at : at + len(chunk)], np.frombuffer(chunk, dtype=np.uint8)):
            return (
                "has different bits after conversion to Megatron and back: check disk and memory, or report this as a "
                "bug"
            )
        at += len(chunk)
    return ""


# ---- logits ----------------------------------------------------------------------------------------------------------

NUM_TOKENS = 48
# maximum difference of log-probabilities; fp32 rounding gives 1e-6 in a tiny model and 1e-4 in a large one
TOLERANCE = 1e-3
MAX_WHOLE_PARAMETERS = 100_000_000  # only a part of a model with more parameters is compared
MAX_PARAMETERS = 1_000_000_000  # if the part has more parameters, it is compared without the last layer
MAX_VOCABULARY = 4096
BYTES_PER_PARAMETER = 10  # bytes of memory: fp32 weight, source tensor (at most fp32), and 25% reserve


@dataclass(frozen=True)
class LogitsComparison:
    """Result of comparing a converted model's logits with those of transformers."""

    difference: float | None = None  # maximum difference of log-probabilities; None: not compared
    reason: str = ""  # why logits were not compared
    part: str = "the whole model"  # what was compared

    def __str__(self) -> str:
        if self.difference is None:
            return f"not compared: {self.reason}"
        return (
            f"log-probabilities of {NUM_TOKENS} tokens, computed with {self.part}, differ by at most "
            f"{self.difference:.1e} from those of transformers"
        )


@dataclass(frozen=True)
class PartialModel:
    """A model that consists of some layers, experts and vocabulary rows of another (the whole) model."""

    values: dict[str, Any]  # entries of its config.json
    shape: ModelShape
    layers: tuple[int, ...]  # indices in the whole model, ascending
    is_whole: bool

    def name_in_whole_model(self, name: str) -> str:
        """Return the name in the whole model of a Megatron tensor of this partial model."""
        return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(self.layers[int(match[0])]), name)

    def __str__(self) -> str:
        if self.is_whole:
            return "the whole model"
        experts = f", {self.shape.experts.num_experts} experts" if self.shape.experts else ""
        return f"layers {', '.join(map(str, self.layers))}{experts} and {self.shape.vocab_size} rows of the vocabulary"


@dataclass
class _Pack:
    """One token sequence as `pack_stream` takes it, which prepares the input of Megatron's model."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T], or [3, T] with an image
    cu_seqlens: Tensor  # [2]
    max_seqlen: int
    images: PackedImages | None = None
    stream: Any = None


def _make_pack(shape: ModelShape) -> _Pack:
    """Return NUM_TOKENS tokens spread over the vocabulary; for a vision-language model half of them are an image."""
    token_ids = (torch.arange(NUM_TOKENS) * 7919 + 13) % shape.vocab_size
    cu_seqlens = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    vision = shape.vision
    if vision is None:
        return _Pack(token_ids, torch.arange(NUM_TOKENS), cu_seqlens, NUM_TOKENS)
    start, grid = 8, (1, 4 * vision.merge_size, 6 * vision.merge_size)  # more than one attention window
    token_ids[token_ids == vision.image_token_id] = (vision.image_token_id + 1) % shape.vocab_size
    token_ids[start : start + vision.num_image_tokens(grid)] = vision.image_token_id
    patches = vision.num_image_tokens(grid) * vision.merge_size**2
    pixel_values = torch.arange(patches * vision.patch_dim).sin().view(patches, vision.patch_dim)
    positions = torch.from_numpy(vision.token_positions(NUM_TOKENS, [start], [grid]))
    images = PackedImages(pixel_values, torch.tensor([grid]), torch.tensor([start]), torch.tensor([0]))
    return _Pack(token_ids, positions, cu_seqlens, NUM_TOKENS, images)


def compare_logits(
    converted: Path, hf_dir: Path, part: PartialModel | None = None, family_path: str | None = None
) -> LogitsComparison:
    """Compare the logits of a converted model with those that transformers computes from its Hugging Face source; by
    default, of the part of the model that `choose_part_to_compare` chooses."""
    shape = read_shape(hf_dir, family_path)
    part = part or choose_part_to_compare(read_config(hf_dir / "config.json"), family_path=family_path)
    needed, available = part.shape.num_parameters * BYTES_PER_PARAMETER, psutil.virtual_memory().available
    if available < needed:
        return LogitsComparison(
            reason=f"the comparison takes {needed / 1e9:.1f} GB of memory, but only {available / 1e9:.1f} GB are free"
        )
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model_class = getattr(transformers, shape.architecture, None)
    if model_class is None:
        return LogitsComparison(reason=f"transformers does not have {shape.architecture}")
    pack = _make_pack(part.shape)
    try:
        expected = _transformers_log_probs(model_class, hf_dir, shape, part, pack)
    except PenstockError:
        raise
    except Exception as error:  # transformers may raise any exception for an invalid model
        reason = " ".join(str(error).split())[:120]
        raise ModelError(f"{hf_dir}: transformers cannot load this model ({reason}): correct config.json") from error
    difference = float((_megatron_log_probs(converted, shape, part, pack) - expected).abs().max())
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{converted}: log-probabilities computed with {part} differ by {difference:.1e} from those of "
            f"transformers (tolerance {TOLERANCE:.0e}): please report this as a bug"
        )
    return LogitsComparison(difference, part=str(part))


def choose_part_to_compare(
    values: dict[str, Any], max_whole_parameters: int = MAX_WHOLE_PARAMETERS, family_path: str | None = None
) -> PartialModel:
    """Return the part of the model with the config.json entries `values` whose logits are compared: the whole model if
    it has at most `max_whole_parameters` parameters."""
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    values |= {"num_nextn_predict_layers": 0} if values.get("num_nextn_predict_layers") else {}
    whole = shape_from_config(values, family_path=family_path)
    if whole.num_parameters <= max_whole_parameters or (whole.experts and not family_of(whole).expert_entries):
        return PartialModel(values, whole, tuple(range(whole.num_layers)), True)
    first_sparse = whole.experts.num_dense_layers if whole.experts else 0
    part = _part_with_layers(values, whole, {0, first_sparse, whole.num_layers - 1})
    if part.shape.num_parameters <= MAX_PARAMETERS:
        return part
    return _part_with_layers(values, whole, {0, first_sparse or whole.num_layers - 1})


def _part_with_layers(values: dict[str, Any], whole: ModelShape, chosen: set[int]) -> PartialModel:
    """Return the part of a model with the layers `chosen`, some of the experts and the first vocabulary rows."""
    layers, experts = tuple(sorted(chosen)), whole.experts
    num_dense = sum(layer < (experts.num_dense_layers if experts else whole.num_layers) for layer in layers)
    vocab_size = min(whole.vocab_size, MAX_VOCABULARY)
    text = values.get("text_config", values)  # entries of the language model
    text = text | {"num_hidden_layers": len(layers), "vocab_size": vocab_size, "pad_token_id": None}
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][: len(layers)]
    family = family_of(whole)
    if family.expert_entries:
        text |= family.expert_entries(num_dense, len(layers))
    if experts:  # equal groups with more experts than top-k, so that routing has a choice
        group_size = max(2, -(-experts.top_k // experts.top_groups) + 1)
        name = "num_experts" if "num_experts" in family.defaults else "n_routed_experts"
        num_experts = min(experts.num_experts, experts.num_groups * group_size)
        text |= dict.fromkeys((name, "num_local_experts"), num_experts)
    values = values | {"text_config": text} if "text_config" in values else text
    if whole.vision:
        values = values | {"image_token_id": min(whole.vision.image_token_id, vocab_size - 1)}
    return PartialModel(values, shape_from_config(values, family_path=whole.family_path), layers, False)


@torch.no_grad()
def _transformers_log_probs(
    model_class: Any, directory: Path, shape: ModelShape, part: PartialModel, pack: _Pack
) -> Tensor:
    """Return the log-probabilities [T, V] that transformers computes for `part`, with the weights of a Hugging Face
    directory."""
    # the class is chosen by architecture: transformers does not know some of the hub's model types (kimi_k2)
    config = model_class.config_class(**{key: value for key, value in part.values.items() if key != "model_type"})
    layout, whole = tensor_layout(part.shape), tensor_layout(shape)
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = defaultdict(list)  # parts of tensors that stack experts
    with HFWeights(directory) as weights:
        for megatron in layout.megatron_names():
            sources = whole.hf_names_of(part.name_in_whole_model(megatron))
            fetched = [
                (name, weights.fetch(source, layout.hf_shapes[name][0]).float())
                for name, source in zip(layout.hf_names_of(megatron), sources, strict=True)
            ]
            for name, tensor in stack_expert(fetched) if family_of(shape).stacked_experts else fetched:
                if name == name_in_file(name):
                    tensors[name] = tensor
                else:
                    stacks[name_in_file(name)].append(tensor)
    tensors |= {name: torch.stack(parts) for name, parts in stacks.items()}
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # grouped GEMM needs row sizes that are multiples of 16 bytes
        output_loading_info=True,
    )
    missing = sorted(set(report["missing_keys"]) - ({"lm_head.weight"} if part.shape.tied_embeddings else set()))
    if missing or report["unexpected_keys"]:
        raise ValueError(f"{len(missing)} weights missing, {len(report['unexpected_keys'])} unexpected")
    images = {}
    if pack.images is not None and part.shape.vision is not None:
        is_image = (pack.token_ids == part.shape.vision.image_token_id).int()
        images = dict(
            pixel_values=pack.images.pixel_values, image_grid_thw=pack.images.grid_thw, mm_token_type_ids=is_image[None]
        )
    return model.eval()(pack.token_ids[None], **images).logits[0].log_softmax(-1)


@torch.no_grad()
def _megatron_log_probs(directory: Path, shape: ModelShape, part: PartialModel, pack: _Pack) -> Tensor:
    """Return the log-probabilities [T, V] that Megatron computes for `part`, with the weights of a torch_dist
    checkpoint."""
    weights = TorchDistWeights(directory, checkpoint_layout(shape))
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        init_parallel(0, 1, f"file://{scratch}/world", threads=torch.get_num_threads())
        try:
            from penstock.engines.megatron.model.gpt import build_model
            from penstock.engines.megatron.packing import pack_stream, place_images
            from penstock.engines.megatron.weights import local_parameters

            [model] = build_model(part.shape)
            for name, tensor in local_parameters(model):
                with weights.open_parameter(part.name_in_whole_model(name)) as parameter:
                    tensor.copy_(parameter[: tensor.shape[0]])
            stream = pack_stream(pack, device())
            if pack.images is not None and part.shape.vision is not None:
                stream.images = place_images(pack.images, stream, part.shape.vision, 1, 0)
            return model.head(model.eval()(stream)).log_softmax(-1).cpu()
        finally:
            shutdown_parallel()
