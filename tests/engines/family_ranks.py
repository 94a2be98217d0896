"""Run as two processes by `test_megatron_families.py`: every family, under the layouts that a family can affect,
compared with transformers' eager implementation: logits, gradients, weights. `tests/train/layout_ranks.py` runs every
layout, for three families, and loads checkpoints of one layout under another.

usage: family_ranks.py RANK DIRECTORY SELECTION      `some` are the families of SOME, `others` all others
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.checkpoints.layout import ShardSlice, checkpoint_layout
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines import megatron_reference
from tests.engines.megatron_reference import (
    full_logits,
    make_engine,
    make_pack,
    replace_by_gradients,
    targets_of,
    under_megatron_names,
)
from tests.families import FAMILIES, hf_model, make_family

PACKS = [make_pack([5, 40, 1, 17, 33], 0), make_pack([3, 4, 61, 9], 1)]  # as many as two replicas need
MIXTURES = [name for name, fields in FAMILIES.items() if "moe_intermediate_size" in fields]
TOLERANCE = 1e-4  # of logits, and of gradients relative to the largest of their tensor
# gradients of a key's bias in dimensions that are not rotated are rounding errors
OPTIMIZER = megatron_reference.OPTIMIZER | {"adam_eps": 1e-3}
GROUPED = {"moe_grouped_gemm": True}
ONE_KEY_HEAD = "glm4 with one key head"  # for two tensor-parallel ranks
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    ONE_KEY_HEAD: ("glm4", {"num_key_value_heads": 1}),
}
SOME = ["qwen3", "glm4.5-355b", "deepseek-v3"]  # dense with tied weights, MoE, MoE with latent attention
OTHER_ROTARY = ("llama3.1", "llama3.2")  # no layout but that of one rank can treat them otherwise than llama3
SPLIT = [name for name in FAMILIES if name not in OTHER_ROTARY]


@dataclass
class Case:
    layout: ParallelLayout
    families: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)


CASES = {
    "data": Case(ParallelLayout(), list(FAMILIES)),
    "tensor": Case(ParallelLayout(tensor=2), [ONE_KEY_HEAD, *(name for name in SPLIT if name not in MIXTURES)]),
    "sequence": Case(ParallelLayout(tensor=2, sequence_parallel=True), ["glm4-32b", *MIXTURES]),
    "pipeline": Case(ParallelLayout(pipeline=2), SPLIT),
    "experts": Case(ParallelLayout(expert=2), MIXTURES),
    "grouped": Case(ParallelLayout(), ["qwen3-moe", "glm4.5-355b"], GROUPED),
    "grouped experts": Case(ParallelLayout(expert=2), ["glm4.7-flash", "deepseek-v3"], GROUPED),
    "grouped tensor": Case(ParallelLayout(tensor=2, sequence_parallel=True), ["qwen3-moe", "deepseek-v3"], GROUPED),
    "uneven": Case(ParallelLayout(pipeline=2), ["moonlight"], {"num_layers_in_first_pipeline_stage": 1}),
    "uneven last": Case(ParallelLayout(pipeline=2), ["qwen3"], {"num_layers_in_last_pipeline_stage": 1}),
}


def runs_of(selection: str) -> list[tuple[str, str]]:
    """Return the cases and models of a selection."""
    names = SOME if selection == "some" else MODELS.keys() - set(SOME)
    return [(case, name) for case in CASES for name in CASES[case].families if name in names]


def prepare(directory: Path, name: str) -> None:
    """Save a Hugging Face checkpoint, transformers' results with it, and the model as one Megatron rank saves it."""
    family, changes = MODELS[name]
    source = make_family(directory / name, family, **changes)
    shape, hf = read_shape(source), hf_model(source)
    hf.model.embed_tokens.padding_idx = None  # else transformers gives this token's row no gradient
    full = under_megatron_names(shape, {key: tensor.detach() for key, tensor in hf.state_dict().items()})
    save_alone(shape, full, source / "saved")

    logits = [
        torch.cat([hf(input_ids=x[None]).logits[0] for x in pack.token_ids.tensor_split(pack.cu_seqlens[1:-1].long())])
        for pack in PACKS
    ]
    loss = torch.stack([loss_of(x, pack) for x, pack in zip(logits, PACKS)]).sum()
    loss.backward()
    gradients = under_megatron_names(shape, {key: param.grad for key, param in hf.named_parameters()})
    reference = {"logits": [x.detach() for x in logits], "gradients": gradients, "weights": full}
    torch.save(reference, directory / f"{name}.pt")


def save_alone(shape: ModelShape, full: dict[str, Tensor], directory: Path) -> None:
    """Save from one rank; what `checkpoint_layout` says of the files, without a model, is true."""
    from megatron.core import dist_checkpointing

    from penstock.engines.megatron.checkpoints.torch_dist import PlainWriter
    from penstock.engines.megatron.model.gpt import build_model
    from penstock.engines.megatron.weights import local_parameters

    [model] = build_model(shape)
    with torch.no_grad():
        for name, tensor in local_parameters(model):
            tensor.copy_(full[name])
    directory.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(directory), PlainWriter())

    stored = checkpoint_layout(shape)
    assert stored.slices.keys() == full.keys(), stored.slices.keys() ^ full.keys()
    files = dcp.FileSystemReader(directory)
    found = {piece.key: torch.empty(piece.stored_shape) for pieces in stored.slices.values() for piece in pieces}
    dcp.load(found, storage_reader=files, no_dist=True)
    for name, pieces in stored.slices.items():
        assert stored.shape(name) == tuple(full[name].shape)
        for piece in pieces:
            assert torch.equal(found[piece.key][box(piece)].squeeze(), full[name][piece.part].squeeze()), piece
    parameters = files.read_metadata().state_dict_metadata.keys()
    assert parameters == found.keys(), parameters ^ found.keys()


def box(piece: ShardSlice) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.sizes))


@cache
def reference_of(directory: Path, name: str) -> dict[str, Any]:
    return torch.load(directory / f"{name}.pt")


def loss_of(logits: Tensor, pack: Any) -> Tensor:
    targets, counted = targets_of(pack)
    return F.cross_entropy(logits[counted], targets[counted], reduction="sum")


def run(case_name: str, case: Case, family: str, directory: Path) -> None:
    reference = reference_of(directory, family)
    shape = read_shape(directory / family)
    engine = make_engine(shape, layout=case.layout, optimizer=OPTIMIZER, overrides=case.overrides)
    engine.load_weights(directory / family / "saved")
    gathered = dict(engine.gather_weights().tensors)
    assert gathered.keys() == reference["weights"].keys(), gathered.keys() ^ reference["weights"].keys()
    for key, tensor in gathered.items():
        assert torch.equal(tensor, reference["weights"][key]), f"{key} was changed by loading and gathering"
    if case_name.startswith("uneven"):  # checkpoints do not depend on how the layers are split
        engine.save(directory / f"{case_name} {family}", None)
        assert_same_checkpoints(directory / f"{case_name} {family}", directory / family / "saved")

    rank, size = engine.data_parallel_rank_and_size
    worst = check_logits(engine, PACKS[rank::size], reference["logits"][rank::size], TOLERANCE)
    error, key = check_close("gradients", gradients_of(engine), reference["gradients"], TOLERANCE)
    check_norm(engine, reference["gradients"], TOLERANCE)
    if engine.is_last_stage:
        print(f"{case_name}, {family}: logits {worst:.1e}, gradients {error:.1e} {key}", flush=True)


def check_logits(engine: Any, packs: list[Any], expected: list[Tensor], tolerance: float) -> float:
    """Run a forward and backward pass, and compare the rows of this rank. Return the largest difference."""
    worst = 0.0
    for output, pack, logits in zip(engine.forward_backward(packs, loss_fn_of(engine)), packs, expected):
        rows = engine.pack_stream(pack).pack_slice
        worst = max(worst, (output["logits"] - logits[rows]).abs().max().item())
    assert worst < tolerance, f"logits differ by {worst:.1e}"
    return worst


def check_close(
    what: str, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> tuple[float, str]:
    """Compare tensors relative to their largest value, which is 0 in gradients of an expert without tokens. Return the
    largest error and the name of its tensor."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = sorted(
        ((found[key] - tensor).abs().max().item() / (tensor.abs().max().item() or 1), key)
        for key, tensor in expected.items()
    )
    assert errors[-1][0] < tolerance, f"{what} differ: {errors[-4:]}"
    return errors[-1]


def check_norm(engine: Any, gradients: dict[str, Tensor], tolerance: float) -> None:
    _, norm, _ = engine.optimizer_step()
    expected = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert abs(norm - expected) < tolerance * expected, f"the gradient's norm is {norm}, not {expected}"


def assert_same_checkpoints(one: Path, other: Path) -> None:
    dist.barrier()
    contents = []
    for files in (dcp.FileSystemReader(one), dcp.FileSystemReader(other)):
        metadata = files.read_metadata().state_dict_metadata
        tensors = {key: torch.empty(entry.size) for key, entry in metadata.items() if hasattr(entry, "size")}
        dcp.load(tensors, storage_reader=files, no_dist=True)
        contents.append(tensors)
    assert contents[0].keys() == contents[1].keys() and contents[0]
    assert all(torch.equal(tensor, contents[1][key]) for key, tensor in contents[0].items())


def loss_fn_of(engine: Any) -> Any:
    def loss_fn(hidden: Tensor, head: Any, pack: Any) -> Any:
        logits = full_logits(engine, head(hidden))
        rows = engine.pack_stream(pack).pack_slice
        targets, counted = (x[rows] for x in targets_of(pack))
        loss = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
        return loss, {"logits": logits.detach()[:, : engine.shape.vocab_size]}

    return loss_fn


def gradients_of(engine: Any) -> dict[str, Tensor]:
    """Return full gradients under global names, in place of the weights."""
    replace_by_gradients(engine, (param for chunk in engine.chunks for param in chunk.parameters()))
    return {
        name: tensor.clone() for name, tensor in engine.gather_weights().tensors if not name.endswith("expert_bias")
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    runs = runs_of(sys.argv[3])
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    for name in sorted({name for _, name in runs})[rank::2]:
        prepare(directory, name)
        gc.freeze()  # Megatron collects garbage at every save and load, 0.4 s each with transformers
    shutdown_parallel()
    for case_name, families in groupby(runs, lambda run: run[0]):
        case = CASES[case_name]
        init_parallel(rank, 2, f"file://{directory}/{case_name}", case.layout)
        for _, family in families:
            run(case_name, case, family, directory)
        shutdown_parallel()
