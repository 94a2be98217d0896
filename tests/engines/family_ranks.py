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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.checkpoints.layout import ShardSlice, checkpoint_layout
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines import megatron_reference
from tests.engines.megatron_reference import full_logits, make_engine, make_pack, replace_by_gradients, targets_of
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


@dataclass
class Case:
    layout: ParallelLayout
    families: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)


CASES = {
    "data": Case(ParallelLayout(), list(FAMILIES)),
    "tensor": Case(ParallelLayout(tensor=2), [ONE_KEY_HEAD, *(name for name in FAMILIES if name not in MIXTURES)]),
    "sequence": Case(ParallelLayout(tensor=2, sequence_parallel=True), ["glm4-32b", *MIXTURES]),
    "pipeline": Case(ParallelLayout(pipeline=2), list(FAMILIES)),
    "experts": Case(ParallelLayout(expert=2), MIXTURES),
    "grouped": Case(ParallelLayout(), MIXTURES, GROUPED),
    "grouped experts": Case(ParallelLayout(expert=2), MIXTURES, GROUPED),
    "grouped tensor": Case(ParallelLayout(tensor=2, sequence_parallel=True), MIXTURES, GROUPED),
    "uneven": Case(ParallelLayout(pipeline=2), ["moonlight"], {"num_layers_in_first_pipeline_stage": 1}),
    "uneven last": Case(ParallelLayout(pipeline=2), ["qwen3"], {"num_layers_in_last_pipeline_stage": 1}),
}


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


def under_megatron_names(shape: ModelShape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert names of transformers' modules, which stack the experts that checkpoints and layouts name one by one."""
    hub: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, joined in enumerate(tensor):
                gate, up = joined.chunk(2)
                at = name.removesuffix("gate_up_proj") + f"{expert}."
                hub |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            hub |= {f"{at}{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            hub[name] = tensor
    layout = tensor_layout(shape)
    # correction biases have no gradients
    known = [name for name in layout.megatron_names() if hub.keys() >= set(layout.hf_names_of(name))]
    return {name: layout.to_megatron(name, hub.__getitem__) for name in known}


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

    packs, loss_fn = packs_and_loss(engine)
    outputs = engine.forward_backward(packs, loss_fn)
    rank, size = engine.data_parallel_rank_and_size
    worst = 0.0
    for output, pack, expected in zip(outputs, packs, reference["logits"][rank::size]):
        rows = engine.pack_stream(pack).pack_slice
        worst = max(worst, (output["logits"] - expected[rows]).abs().max().item())
    assert worst < TOLERANCE, f"logits differ by {worst:.1e}"

    errors = []
    for key, gradient in gradients_of(engine).items():
        expected = reference["gradients"][key]
        largest = expected.abs().max().item()  # 0 for an expert without tokens
        errors.append(((gradient - expected).abs().max().item() / (largest or 1), key))
    assert max(errors)[0] < TOLERANCE, "gradients differ: " + ", ".join(
        f"{key} {error:.1e}" for error, key in sorted(errors)[-4:]
    )
    assert len(errors) == len(reference["gradients"])

    _, norm, _ = engine.optimizer_step()
    expected = torch.cat([gradient.flatten() for gradient in reference["gradients"].values()]).norm().item()
    assert abs(norm - expected) < TOLERANCE * expected, f"the gradient's norm is {norm}, not {expected}"

    if engine.is_last_stage:
        print(f"{case_name}, {family}: logits {worst:.1e}, gradients {max(errors)[0]:.1e} {max(errors)[1]}", flush=True)


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


def packs_and_loss(engine: Any) -> tuple[list[Any], Any]:
    rank, size = engine.data_parallel_rank_and_size

    def loss_fn(hidden: Tensor, head: Any, pack: Any) -> Any:
        logits = full_logits(engine, head(hidden))
        rows = engine.pack_stream(pack).pack_slice
        targets, counted = (x[rows] for x in targets_of(pack))
        loss = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
        return loss, {"logits": logits.detach()[:, : engine.shape.vocab_size]}

    return PACKS[rank::size], loss_fn


def gradients_of(engine: Any) -> dict[str, Tensor]:
    """Return full gradients under global names, in place of the weights."""
    replace_by_gradients(engine, (param for chunk in engine.chunks for param in chunk.parameters()))
    return {
        name: tensor.clone() for name, tensor in engine.gather_weights().tensors if not name.endswith("expert_bias")
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    names = SOME if sys.argv[3] == "some" else [name for name in MODELS if name not in SOME]
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    for name in names[rank::2]:
        prepare(directory, name)
        gc.freeze()  # Megatron collects garbage at every save and load, 0.4 s each with transformers
    shutdown_parallel()
    for case_name, case in CASES.items():
        init_parallel(rank, 2, f"file://{directory}/{case_name}", case.layout)
        for family in (family for family in case.families if family in names):
            run(case_name, case, family, directory)
        shutdown_parallel()
